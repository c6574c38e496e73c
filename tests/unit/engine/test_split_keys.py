"""Long memories attended to in parts: the logits of one piece and of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE
from torch import Tensor

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.prompts import question_ids
from sedem.backbone.loading import open_backbone
from sedem.engine import open, self_check, split_keys
from sedem.engine.eager import Eager
from sedem.engine.interface import Start
from sedem.engine.layers import attend
from sedem.engine.split_keys import attend_in_parts, pays, split_biases
from sedem.engine.static import Static

PART, LONG = 16, 64
QUESTIONS = ["What is the rent?", "Pets?", "Who may leave, and when exactly?"]
BLOCKS = [[3, 8, 0, 5, 17], [], [2, 4]]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts of 16 columns for caches of 64; how many parts each call had."""
    monkeypatch.setattr(split_keys, "PART", PART)
    monkeypatch.setattr(split_keys, "LONG", LONG)
    seen: list[int] = []
    fused = split_keys._attend

    def counted(query: Tensor, key: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        assert key.shape[2] == PART
        seen.append(key.shape[1])
        return fused(query, key, *others)

    monkeypatch.setattr(split_keys, "_attend", counted)
    return seen


def build(config: SedemConfig, *, split: bool | None = True, **changes: Any) -> SeDeM:
    backbone = open_backbone(config.encoder, dtype=changes.pop("dtype", torch.float32))
    torch.manual_seed(1)
    model = SeDeM(config.with_changes(**changes), backbone, backbone)
    model.requires_grad_(False).eval()
    model.engine = Static(model, graphs=False, split_keys=split)
    return model


def starts(model: SeDeM) -> list[Start]:
    bank = model.read([Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)])
    made = []
    for question, blocks in zip(QUESTIONS, BLOCKS, strict=True):
        prefix = torch.tensor(question_ids(model.decoder, question))
        made.append(Start(bank, blocks, torch.arange(len(blocks)) * 0.2, prefix))
    return made


def logits(model: SeDeM, rows: list[Start], steps: int = 4, limit: int = 9) -> Tensor:
    tokens = torch.randint(2, 258, (steps, len(rows)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), model.engine.start(rows, limit) as (first, step):
        return torch.stack([first.clone(), *(step(t, range(len(rows))).clone() for t in tokens)])


# Attention alone


def whole(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return attend(query, key, value, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_give_the_attention_of_the_whole(dtype: torch.dtype, parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, count, 8, generator=generator)
        for heads, count in ((4, 1), (2, 5 * PART), (2, 5 * PART))
    )
    bias = torch.randn(3, 1, 1, 5 * PART, generator=generator)
    bias[0, ..., PART : 3 * PART] = -torch.inf  # parts without a visible column
    bias[1, ..., 1:] = -torch.inf
    bias[2] *= 20
    exact = whole(query, key, value, bias)
    query, key, value, bias = (t.to(dtype) for t in (query, key, value, bias))
    split = split_biases({None: bias}, 2)[None]
    actual = attend_in_parts(0, query, key, value, split)
    assert actual.dtype == dtype and parts == [2 * 5]
    if dtype == torch.float32:
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-6)
    else:
        error = (actual.float() - exact).norm()
        assert error <= 1.5 * (whole(query, key, value, bias).float() - exact).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_on_a_gpu_give_the_attention_of_the_whole_on_a_cpu(dtype: torch.dtype) -> None:
    columns = 9 * split_keys.PART
    query, key, value = (torch.randn(2, h, c, 64) for h, c in ((8, 1), (2, columns), (2, columns)))
    bias = torch.zeros(2, 1, 1, columns)
    bias[0, ..., 700:] = -torch.inf
    exact = whole(query, key, value, bias)
    query, key, value, bias = (t.to("cuda", dtype) for t in (query, key, value, bias))
    actual = attend_in_parts(0, query, key, value, split_biases({None: bias}, 2)[None])
    error = (actual.float().cpu() - exact).norm() / exact.norm()
    assert error < (1e-3 if dtype == torch.float32 else 1e-2)


# A model


@pytest.mark.parametrize("guidance", [False, True], ids=["", "guided"])
@pytest.mark.parametrize("context", ["joint", "separate", "independent"])
def test_steps_in_parts_have_the_logits_of_the_reference(
    context: str, guidance: bool, config: SedemConfig, parts: list[int]
) -> None:
    fast = build(config, block_context=context, guidance=guidance)
    rows = starts(fast)
    actual = logits(fast, rows)
    upper = fast.decoder.depth - config.inject_layer
    assert len(parts) == 4 * upper  # every step, no prefill
    fast.engine = Eager(build(config, split=False, block_context=context, guidance=guidance))
    torch.testing.assert_close(actual, logits(fast, rows), rtol=1e-4, atol=5e-5)


def test_a_window_hides_whole_parts(
    config: SedemConfig, parts: list[int], tiny_folder: Any
) -> None:
    changed = config.with_changes(encoder=tiny_folder("mistral", sliding_window=6))
    found = []
    for split in (True, False):
        model = build(changed, split=split)
        found.append(logits(model, starts(model)))
    assert parts
    torch.testing.assert_close(*found, rtol=1e-4, atol=5e-5)


def test_rows_move_between_batches_in_parts_and_in_one_piece(
    config: SedemConfig, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long answers outgrow their batch; few rows are split, many are not."""
    monkeypatch.setattr(split_keys, "BUSY", 2 * 2)
    lives = [[0, 1, 2]] * 3 + [[0]] * 70
    tokens = torch.randint(2, 258, (len(lives), 3), generator=torch.Generator().manual_seed(0))
    found = []
    for split in (True, False):
        model = build(config, split=split)
        with torch.no_grad(), model.engine.start(starts(model), 100) as (_, step):
            found.append(
                [step(t, live)[live].clone() for t, live in zip(tokens, lives, strict=True)]
            )
    assert len(parts) == 70 * (model.decoder.depth - config.inject_layer)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_only_long_memories_of_few_rows_on_a_gpu_are_split(
    config: SedemConfig, parts: list[int]
) -> None:
    assert pays(1, LONG, 8, 64) and not pays(1, LONG - 1, 8, 64)
    assert pays(8, LONG, 8, 64) and not pays(9, LONG, 8, 64)
    assert not pays(1, LONG, 8, 60)
    on_cpu = build(config, split=None)
    rows = starts(on_cpu)
    logits(on_cpu, rows)
    short = build(config)
    logits(short, rows[1:2])
    assert not parts


# The trial of an engine


def test_an_engine_that_fails_in_parts_alone_is_used_without_them(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    opened: list[bool | None] = []

    def static(model: SeDeM, *, graphs: bool, split_keys: bool | None = True, **_: Any) -> Static:
        opened.append(split_keys)
        return Static(model, graphs=False, split_keys=split_keys)

    def failing(*_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(open, "Static", static)
    monkeypatch.setattr(split_keys, "_attend", failing)
    model = build(config, split=False)
    bank: MemoryBank = model.read([Document("lease.txt", LEASE)])
    for _ in range(2):
        engine = open._tried(model, None)
        assert isinstance(engine, Static) and not engine.batches.split
    assert opened == [True, False]
    assert not self_check.is_known(self_check.key_of(model))
    model.engine = engine
    assert model.answer(bank, QUESTIONS[0]).text

"""More blocks than a static cache has columns for: the same logits, and memory that is bounded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, POSITIONS, RECIPE
from torch import Tensor

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.prompts import question_ids
from sedem.backbone.loading import open_backbone
from sedem.engine import batches, pieces
from sedem.engine.interface import Start
from sedem.engine.kept import KeptBudget
from sedem.engine.open import open_engine
from sedem.engine.scratch import Scratch
from sedem.engine.static import Static
from sedem.errors import ConfigError
from sedem.quantization import Quantized, quantize

DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]
QUESTIONS = ["What is the rent?", "How many eggs, and of what?", "Pets?", "Plums?"]
EVERY = list(range(29))
ROWS = [EVERY, [4, 20, 1], [], EVERY]


def build(
    config: SedemConfig, engine: str = "static", budget: KeptBudget | None = None, **changes: Any
) -> SeDeM:
    settings = {"block_context": "independent", "guidance": True, **changes}
    backbone = open_backbone(config.encoder)
    torch.manual_seed(1)
    model = SeDeM(config.with_changes(**settings), backbone, backbone)
    model.requires_grad_(False).eval()
    model.engine = open_engine(engine, model, budget=budget)
    return model


@pytest.fixture
def bank(config: SedemConfig) -> MemoryBank:
    return build(config, "eager").read(DOCUMENTS)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes in pieces, of about three blocks each."""
    monkeypatch.setattr(batches, "MAX_COLUMNS", 0)
    monkeypatch.setattr(pieces, "COLUMNS", 50)


def starts(model: SeDeM, bank: MemoryBank, rows: list[list[int]] = ROWS) -> list[Start]:
    made = []
    for number, row in enumerate(rows):
        scores = torch.arange(len(row)).roll(number) * 0.2
        prefix = torch.tensor(question_ids(model.decoder, QUESTIONS[number]))
        made.append(Start(bank, row, scores, prefix))
    return made


def logits(model: SeDeM, rows: list[Start], steps: int = 3, limit: int = 5) -> Tensor:
    tokens = torch.randint(2, 258, (steps, len(rows)), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), model.engine.start(rows, limit) as (first, step):
        seen = [first.clone()]
        seen += [step(ids, range(len(rows))).clone() for ids in tokens]
    return torch.stack(seen)


def engine_of(model: SeDeM) -> Static:
    assert isinstance(model.engine, Static)
    return model.engine


# The same logits


@pytest.mark.parametrize("guidance", [True, False], ids=["guided", ""])
def test_pieces_give_the_logits_of_one_static_cache_and_of_the_reference(
    guidance: bool, config: SedemConfig, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, whole = (build(config, name, guidance=guidance) for name in ("eager", "static"))
    expected = logits(eager, starts(eager, bank))
    torch.testing.assert_close(logits(whole, starts(whole, bank)), expected, rtol=1e-4, atol=5e-5)
    monkeypatch.setattr(batches, "MAX_COLUMNS", 40)
    for columns in (1, 50, 2000):
        monkeypatch.setattr(pieces, "COLUMNS", columns)
        cut = build(config, guidance=guidance)
        actual = logits(cut, starts(cut, bank))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)


def test_sliding_windows_hide_the_same_columns(
    config: SedemConfig, small_pieces: None, tiny_folder: Callable[..., str]
) -> None:
    folder = tiny_folder("mistral", sliding_window=6)
    eager, cut = (build(config, name, encoder=folder) for name in ("eager", "static"))
    bank = eager.read(DOCUMENTS)
    rows = starts(eager, bank)
    torch.testing.assert_close(logits(cut, rows), logits(eager, rows), rtol=1e-4, atol=5e-5)


def test_long_answers_and_finished_rows(
    config: SedemConfig, bank: MemoryBank, small_pieces: None
) -> None:
    eager, cut = (build(config, name) for name in ("eager", "static"))
    lives = [*([[0, 1, 2, 3]] * 70), *([[0, 1, 3]] * 4), *([[1, 3]] * 4), *([[3]] * 4)]
    tokens = torch.randint(2, 258, (len(lives), 4), generator=torch.Generator().manual_seed(0))
    found = []
    for model in (eager, cut):
        with torch.no_grad(), model.engine.start(starts(model, bank), 100) as (_, step):
            found.append(
                [step(ids, live)[live].clone() for ids, live in zip(tokens, lives, strict=True)]
            )
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_logits_are_equal_to_the_bit_from_memory_from_files_and_computed(
    config: SedemConfig, bank: MemoryBank, small_pieces: None
) -> None:
    ample = build(config)
    expected = logits(ample, starts(ample, bank))
    for budget in (0, 5000, 20_000):
        model = build(config, budget=KeptBudget(ram_bytes=budget))
        for _ in range(2):
            assert torch.equal(logits(model, starts(model, bank)), expected)
        assert engine_of(model).kept.nbytes <= budget
    assert engine_of(ample).kept.hits == 0 + 3
    assert torch.equal(logits(ample, starts(ample, bank)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounded_blocks_are_the_same_in_a_file(
    dtype: str, config: SedemConfig, bank: MemoryBank, small_pieces: None
) -> None:
    found = []
    for ram_bytes in (0, 2**20):
        model = build(config, budget=KeptBudget(ram_bytes=ram_bytes, dtype=dtype))
        found.append(logits(model, starts(model, bank)))
    assert torch.equal(*found)


@pytest.mark.parametrize("guidance", [True, False], ids=["guided", ""])
@pytest.mark.parametrize("limit", [0, 4096], ids=["pieces", "whole"])
def test_the_order_of_blocks_decides_nothing(
    limit: int,
    guidance: bool,
    config: SedemConfig,
    bank: MemoryBank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "MAX_COLUMNS", limit)
    monkeypatch.setattr(pieces, "COLUMNS", 50)
    for engine in ("static", "eager"):
        model = build(config, engine, guidance=guidance)
        rows = starts(model, bank)
        expected = logits(model, rows)
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            shuffled = []
            for start in rows:
                order = torch.randperm(len(start.blocks), generator=generator)
                blocks = [start.blocks[place] for place in order]
                shuffled.append(replace(start, blocks=blocks, scores=start.scores[order]))
            torch.testing.assert_close(logits(model, shuffled), expected, rtol=1e-4, atol=5e-5)


def test_joint_blocks_are_ordered(config: SedemConfig, bank: MemoryBank) -> None:
    model = build(config, block_context="joint", guidance=False)
    there, back = (
        logits(model, starts(model, bank, [order])) for order in ([3, 9, 20], [20, 9, 3])
    )
    assert (there - back).abs().max() > 0.01


# Any K


def test_k_goes_beyond_the_positions_of_the_decoder(config: SedemConfig) -> None:
    model = build(config, k=40)
    parts = [model.read([Document(f"{n}.txt", LEASE)]) for n in range(30)]
    bank = parts[0]
    for part in parts[1:]:
        bank.append(part)
    answer = model.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(4))
    assert answer.k == len(bank) == 510
    assert answer.conditioning > 7900 > POSITIONS
    eager = build(config, "eager", k=40)
    assert eager.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(4)).text == answer.text
    joint = build(config, block_context="joint")
    with pytest.raises(ConfigError, match=r"selected states.*use k of at most 2\d"):
        joint.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(4))
    with pytest.raises(ConfigError, match=r"16 states of the longest block, .*ask something"):
        model.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(POSITIONS))


def test_many_questions_share_what_they_load(
    config: SedemConfig, bank: MemoryBank, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    loaded: list[int] = []
    load = pieces.Piece.load

    def counted(piece: pieces.Piece, layer: int, device: torch.device) -> Tensor:
        loaded.append(layer)
        return load(piece, layer, device)

    monkeypatch.setattr(pieces.Piece, "load", counted)
    model.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(1))
    alone = len(loaded)
    model.answer(bank, QUESTIONS, k="all", decoding=Decoding(1))
    assert len(loaded) == 2 * alone > 0


def test_answers_let_go_of_their_blocks(
    config: SedemConfig, bank: MemoryBank, small_pieces: None
) -> None:
    model = build(config, budget=KeptBudget(ram_bytes=0))
    model.answer(bank, QUESTIONS[0], k="all", decoding=Decoding(2))
    (batch,) = engine_of(model).batches.idle
    assert batch.memory == ()  # type: ignore[attr-defined]


# The file


def test_a_scratch_file_gives_back_what_it_got_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    vectors = [torch.randn(2, 2, 1, states, 8) for states in (5, 3)]
    given = [Quantized(vectors[0]), quantize(vectors[1], "int8"), Quantized(vectors[1].bfloat16())]
    scratch = Scratch(10_000)
    for entry in given:
        scratch.add(entry)
    found = scratch.entries()
    assert not list(tmp_path.iterdir())
    del scratch
    for ours, theirs in zip(found, given, strict=True):
        assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_a_file_that_has_no_room_is_refused_before_anything_is_computed(
    config: SedemConfig, bank: MemoryBank, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config, budget=KeptBudget(ram_bytes=0))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 7}))
    with pytest.raises(ConfigError, match=r"need [\d,]+ bytes beyond .* has 7 left; use a smaller"):
        model.answer(bank, QUESTIONS[0], k="all")
    assert not engine_of(model).batches.active

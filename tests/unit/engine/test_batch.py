"""Prefill without a mask: where there is none, where one remains, and the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from answers import all_logits, opened
from conftest import LEASE, RECIPE
from torch import Tensor

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.decoder import KeyAxis
from sedem.backbone.prompts import question_ids
from sedem.engine.interface import AnswerInputs
from sedem.method.injection import in_reading_order

DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE), Document("3.txt", "1 2")]
ASKED = ["What is the rent?", "Pets?", "Who may leave, and when exactly?"]
LOWER = 2


def build(config: SedemConfig, engine: str = "static", **changes: Any) -> SeDeM:
    return opened(config, engine, inject_layer=LOWER, **changes)


def starts(model: SeDeM, bank: MemoryBank) -> list[AnswerInputs]:
    """Rows of other lengths and K; the last block of the bank is a short one."""
    made = []
    for question, blocks in zip(ASKED, ([3, len(bank) - 1, 0, 5], [], [2]), strict=True):
        prefix = torch.tensor(question_ids(model.decoder, question))
        made.append(AnswerInputs(bank, blocks, torch.arange(len(blocks)) * 0.1, prefix))
    return made


def logits(model: SeDeM, rows: list[AnswerInputs], steps: int = 3) -> Tensor:
    tokens = torch.randint(2, 258, (steps, len(rows)), generator=torch.Generator().manual_seed(3))
    return all_logits(model, rows, tokens)


class Masks:
    """Counts the masks that are made, and notes for each attention whether it is given one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        self.given: list[bool] = []
        added_to, attention = KeyAxis.added_to, functional.scaled_dot_product_attention

        def making(*arguments: Any, **settings: Any) -> Tensor:
            self.made += 1
            return added_to(*arguments, **settings)

        def attending(*tensors: Tensor, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
            assert (attn_mask is None) == settings.get("is_causal", False)
            self.given.append(attn_mask is not None)
            return attention(*tensors, attn_mask=attn_mask, **settings)

        monkeypatch.setattr(KeyAxis, "added_to", making)
        monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)

    def of_a_prefill(self, model: SeDeM, bank: MemoryBank) -> list[bool]:
        rows = starts(model, bank)
        model.engine.encode_questions(torch.randint(2, 258, (2, 7)))
        assert (self.made, any(self.given)) == (0, False)
        self.given.clear()
        logits(model, rows, steps=0)
        return self.given


def test_joint_blocks_are_prefilled_without_a_mask(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config)
    masks = Masks(monkeypatch)
    bank = model.read(DOCUMENTS)
    assert masks.given and not any(masks.given)
    assert masks.of_a_prefill(model, bank) == [False] * model.decoder.depth
    assert masks.made == 0
    # Steps have one for each cache: their keys stand in a static cache with free columns.
    logits(model, starts(model, bank), steps=2)
    assert masks.made == 2 * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"guidance": True},
        {"block_context": "separate"},
        {"block_context": "independent"},
        {"block_context": "independent", "guidance": True},
    ],
    ids=["guided", "separate", "independent", "independent, guided"],
)
def test_blocks_apart_and_guided_ones_have_one_mask_above_injection(
    changes: dict[str, Any], config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(config, **changes)
    bank = model.read(DOCUMENTS)
    logits(model, starts(model, bank), steps=0)  # keeps the keys and values of the blocks
    masks = Masks(monkeypatch)
    upper = model.decoder.depth - LOWER
    assert masks.of_a_prefill(model, bank) == [False] * LOWER + [True] * upper
    assert masks.made == 1


@pytest.mark.parametrize(("window", "masked"), [(4096, False), (80, True), (6, True)])
@pytest.mark.parametrize("context", ["joint", "independent"])
def test_windows_shorter_than_the_text_have_a_mask(
    context: str,
    window: int,
    masked: bool,
    config: SedemConfig,
    tiny_folder: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of 80 holds every prefix, but not the memory between its start and its question."""
    folder = tiny_folder("mistral", sliding_window=window)
    changes = {"block_context": context, "encoder": folder}
    eager, fast = (build(config, engine, **changes) for engine in ("eager", "static"))
    bank = eager.read(DOCUMENTS)
    rows = starts(eager, bank)
    assert max(len(start.prefix) for start in rows) < 80 < len(rows[0].prefix) + 3 * 16
    torch.testing.assert_close(logits(fast, rows), logits(eager, rows), rtol=1e-4, atol=5e-5)
    if context == "joint":
        masks = Masks(monkeypatch)
        logits(fast, rows, steps=0)
        assert masks.given == [masked] * fast.decoder.depth
        assert masks.made == (2 if masked else 0)


def test_columns_move_to_their_positions_and_padding_after_them() -> None:
    positions = torch.tensor([[2, 0, 1, 0, 3], [0, 0, 0, 1, 0]])
    valid = torch.tensor([[True, False, True, True, True], [False, True, False, True, False]])
    hidden = torch.arange(20.0).view(2, 5, 2)
    ordered, places, real = in_reading_order(hidden, positions, valid)
    assert places.tolist() == [[0, 1, 2, 3, 4]]
    assert real.tolist() == [[True] * 4 + [False], [True] * 2 + [False] * 3]
    assert torch.equal(ordered[0], hidden[0, [3, 2, 0, 4, 1]])
    assert torch.equal(ordered[1], hidden[1, [1, 3, 0, 2, 4]])

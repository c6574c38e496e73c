"""Keys and values of independent blocks: kept, evicted, warmed; always the same logits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import all_logits, opened
from conftest import LEASE, RECIPE
from torch import Tensor

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.prompts import question_ids
from sedem.engine.interface import AnswerInputs
from sedem.engine.kept import Kept, KeptBudget, KeptLevel
from sedem.engine.static import Static, open_engine
from sedem.errors import BankMismatchError, ConfigError

QUESTIONS = ["What is the rent?", "How many eggs?", "Pets?"]
DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]
ROWS = [[0, 3, 5], [3], [9, 2, 14, 0]]


def build(config: SedemConfig, budget: KeptBudget | None = None, **changes: Any) -> SeDeM:
    settings = {"block_context": "independent", "guidance": True, **changes}
    model = opened(config, lora=True, **settings)
    model.engine = open_engine("static", model, budget=budget)
    return model


@pytest.fixture
def model(config: SedemConfig) -> SeDeM:
    return build(config)


@pytest.fixture
def bank(model: SeDeM) -> MemoryBank:
    return model.read(DOCUMENTS)


def kept(model: SeDeM) -> Kept:
    assert isinstance(model.engine, Static)
    return model.engine.kept


def starts(model: SeDeM, bank: MemoryBank, rows: list[list[int]] = ROWS) -> list[AnswerInputs]:
    made = []
    for row, question in zip(rows, QUESTIONS, strict=False):
        scores = torch.arange(len(row)) * 0.7
        prefix = torch.tensor(question_ids(model.decoder, question))
        made.append(AnswerInputs(bank.snapshot(), row, scores, prefix))
    return made


def logits(model: SeDeM, bank: MemoryBank, rows: list[list[int]] = ROWS) -> Tensor:
    """Of the prefill and two steps."""
    tokens = torch.tensor([50, 60, 70])[: len(rows)].expand(2, -1)
    return all_logits(model, starts(model, bank, rows), tokens)


def entry_bytes(model: SeDeM, bank: MemoryBank, block: int = 0) -> int:
    (entry,) = kept(model).fetch(bank.snapshot(), [block])
    return entry.nbytes


# Exactness


def test_kept_blocks_give_the_logits_of_computed_ones_to_the_bit(config: SedemConfig) -> None:
    nothing = build(config, KeptBudget(ram_bytes=0))
    model = build(config)
    bank = model.read(DOCUMENTS)
    expected = logits(nothing, bank)
    assert (kept(nothing).nbytes, kept(nothing).hits) == (0, 0)
    first, again = logits(model, bank), logits(model, bank)
    assert torch.equal(first, expected) and torch.equal(again, expected)
    # Of eight blocks in three rows six are distinct, and each row asks for its own.
    assert (kept(model).misses, kept(model).hits) == (6, 2 + 8)


def test_warmed_and_evicted_blocks_give_the_same_logits(config: SedemConfig) -> None:
    model = build(config)
    bank = model.read(DOCUMENTS)
    expected = logits(model, bank)
    warmed = build(config)
    done: list[tuple[int, int]] = []
    assert warmed.warm(bank, progress=lambda *step: done.append(step)) == len(bank)
    assert done[-1] == (len(bank), len(bank))
    assert torch.equal(logits(warmed, bank), expected)
    assert kept(warmed).misses == len(bank)
    small = build(config, KeptBudget(ram_bytes=2 * entry_bytes(model, bank)))
    for _ in range(2):
        assert torch.equal(logits(small, bank), expected)
        assert kept(small).nbytes <= 2 * entry_bytes(model, bank)
    assert kept(small).misses > 6


# What is kept, and for how long


def test_the_least_recently_used_block_makes_room(model: SeDeM, bank: MemoryBank) -> None:
    level, each = kept(model).levels[0], entry_bytes(model, bank)
    level.limit = 3 * each
    for blocks in ([1, 2], [0], [3]):
        kept(model).fetch(bank.snapshot(), blocks)
    assert [n for n in range(4) if level.get(bank.snapshot(), n) is not None] == [0, 2, 3]
    assert level.nbytes == 3 * each == model.engine.memory()["kept"]
    model.engine.release()
    assert model.engine.memory()["kept"] == 0


def test_blocks_go_with_their_bank_and_when_it_changes(model: SeDeM, bank: MemoryBank) -> None:
    other = model.read(DOCUMENTS[:1])
    first = logits(model, bank)
    logits(model, other, [[0], [1], [2]])
    both = kept(model).nbytes
    gc.disable()  # so that only unreferenced objects are freed
    try:
        del other
        assert 0 < kept(model).nbytes < both
    finally:
        gc.enable()
    bank.remove("lease.txt")
    assert kept(model).nbytes == 0
    misses = kept(model).misses
    changed = logits(model, bank, [[0, 1], [2], [0]])
    assert kept(model).misses == misses + 3
    assert not torch.equal(changed, first)


def test_blocks_move_down_a_level_and_up_again(model: SeDeM, bank: MemoryBank) -> None:
    expected, each = logits(model, bank), entry_bytes(model, bank)
    # As with a GPU, but both levels in RAM.
    first, second = (KeptLevel(torch.device("cpu"), count * each) for count in (2, 3))
    kept(model).levels = [first, second]

    def where() -> list[list[int]]:
        return [
            [b for b in range(7) if level.get(bank.snapshot(), b) is not None]
            for level in (first, second)
        ]

    for block in range(5):
        kept(model).fetch(bank.snapshot(), [block])
    assert where() == [[3, 4], [0, 1, 2]]
    misses = kept(model).misses
    kept(model).fetch(bank.snapshot(), [0])
    # Block 0 stays in the lower level too; 3 makes room for it, and 1 for 3.
    assert where() == [[0, 4], [0, 2, 3]]
    assert kept(model).misses == misses
    kept(model).fetch(bank.snapshot(), [5, 6])
    assert where()[0] == [5, 6]
    assert kept(model).nbytes == 5 * each == first.nbytes + second.nbytes
    assert torch.equal(logits(model, bank), expected)


def test_the_budget_is_a_setting_of_from_pretrained(
    config: SedemConfig, bank: MemoryBank, tmp_path: Path
) -> None:
    build(config).save_pretrained(tmp_path / "model")
    budget = KeptBudget(ram_bytes=123)
    opened = SeDeM.from_pretrained(tmp_path / "model", device="cpu", kept=budget)
    assert kept(opened).budget is budget
    assert [level.limit for level in kept(opened).levels] == [123]


def test_warming_stops_where_the_budget_ends(config: SedemConfig, bank: MemoryBank) -> None:
    model = build(config)
    room = 3 * entry_bytes(model, bank)
    small = build(config, KeptBudget(ram_bytes=room))
    assert small.warm(bank, [4, 2, 0, 1, 3]) == 3
    assert kept(small).nbytes == room
    logits(small, bank, [[4, 2], [0], [2]])
    assert kept(small).misses == 3


def test_models_that_keep_nothing_refuse_to_warm(
    config: SedemConfig, model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(ConfigError, match="block_context of this model is 'joint'"):
        build(config, block_context="joint").warm(bank)
    with pytest.raises(ConfigError, match="block 99 is to be warmed, the bank has"):
        model.warm(bank, [99])
    other = build(config, compressor="mlp")
    with pytest.raises(BankMismatchError):
        other.warm(bank)
    model.engine = open_engine("eager", build(config))
    with pytest.raises(ConfigError, match="engine 'eager' keeps no keys and values"):
        model.warm(bank)

"""Keys are derived data: cached, stored or made again, they select the same blocks."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sedem import Document, MemoryBank, SeDeM
from sedem.bank import keys as bank_keys
from sedem.bank.blocks import SCAN, Blocks
from sedem.bank.file import BankFile
from sedem.bank.keys import (
    CACHE_BYTES,
    cache_dtype,
    cache_limit,
    key_index,
    prepare,
    save_keys,
    stored_bytes,
)
from sedem.errors import BankError, ConfigError
from sedem.method.selector import Selector, block_scores
from sedem.selecting.select import encode_questions
from sedem.tensors import DTYPES, Quantized, vector_bytes

QUESTIONS = ("What is the rent?", "How long does the pie keep, if it is served with plums?")
EXTRA = Document("note.md", "The cellar key hangs behind the door; the meter is read in March.")

STATUS = Path("/proc/self/status")

TOLERANCE = {"bfloat16": 2**-7, "int8": 2**-5, "fp8": 2**-3}
"""How far a question token's score may be off, with keys of that type."""


@pytest.fixture
def bank(model: SeDeM, documents: list[Document]) -> MemoryBank:
    return model.read(documents)


@pytest.fixture
def opened(bank: MemoryBank, tmp_path: Path) -> MemoryBank:
    bank.save(tmp_path / "a.bank")
    return MemoryBank.open(tmp_path / "a.bank")


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of blocks in each call that projects memory to keys."""
    made: list[int] = []
    real = Selector.keys

    def counting(self: Selector, memory_NJD: Tensor) -> Tensor:
        made.append(len(memory_NJD))
        return real(self, memory_NJD)

    monkeypatch.setattr(Selector, "keys", counting)
    return made


def scores(model: SeDeM, bank: MemoryBank) -> Tensor:
    return torch.stack([model.scores(bank, question) for question in QUESTIONS])


def reference(model: SeDeM, bank: MemoryBank) -> Tensor:
    """Scores by the selector's own forward pass over the whole bank."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    everything = range(len(bank))
    memory_BNJD = bank.memory(everything).float().expand(len(QUESTIONS), -1, -1, -1)
    slots_BNJ = (bank.slot_tokens(everything) > 0).expand(len(QUESTIONS), -1, -1)
    with torch.no_grad():
        return model.selector(hidden_BQE, mask_BQ, memory_BNJD, slots_BNJ)


def error(model: SeDeM, found: Tensor, expected: Tensor) -> float:
    """Largest difference of scores per question token."""
    _, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    return float(((found - expected).abs() / mask_BQ.sum(1)[:, None]).max())


# Cached in RAM


def test_keys_are_made_once_and_above_the_limit_only_if_they_are_prepared(
    model: SeDeM, bank: MemoryBank, projections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scores(model, bank)
    assert torch.equal(scores(model, bank), expected)
    assert sum(projections) == len(bank)
    torch.testing.assert_close(expected, reference(model, bank))
    size = key_index(bank, model.selector).cached.nbytes  # type: ignore[union-attr]
    monkeypatch.setattr(bank_keys, "CACHE_BYTES", size - 1)
    for prepared in (False, True):
        again = model.read(bank.documents)
        if prepared:
            prepare(again, model.selector)
        projections.clear()
        assert torch.equal(scores(model, again), expected)
        assert (key_index(again, model.selector).cached is not None) == prepared
        assert sum(projections) == (0 if prepared else 2 * len(bank))


def test_a_gpu_caches_up_to_a_share_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda:1"), torch.device("cpu")
    free = {gpu: 100 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 141 * 10**9))
    assert cache_limit(gpu) == 25 * 2**30
    free[gpu] = 2**30
    assert cache_limit(gpu) == cache_limit(cpu) == CACHE_BYTES == 2**30
    assert (cache_dtype(gpu), cache_dtype(cpu)) == (torch.bfloat16, torch.float32)


def turn(selector: Selector) -> None:
    """Change a selector's weights."""
    with torch.no_grad():
        selector.w_key.weight.neg_()


def test_cached_keys_follow_changes_of_the_bank_and_of_the_selector(
    model: SeDeM, bank: MemoryBank
) -> None:
    before = scores(model, bank)
    for change in (
        lambda: bank.append(model.read([EXTRA])),
        lambda: bank.remove("lease.txt"),
        lambda: turn(model.selector),
    ):
        change()
        after = scores(model, bank)
        assert after.shape != before.shape or not torch.equal(after, before)
        torch.testing.assert_close(after, reference(model, bank))
        before = after


# On disk


@pytest.mark.parametrize("limit", [0, CACHE_BYTES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_keys_replace_the_projection(
    dtype: str,
    limit: int,
    model: SeDeM,
    opened: MemoryBank,
    projections: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bank_keys, "CACHE_BYTES", limit)
    expected, file = scores(model, opened), opened.store
    save_keys(opened, model.selector, dtype)
    assert isinstance(file, BankFile) and file.path is not None
    width = model.selector.w_key.out_features // model.selector.heads
    vectors = len(opened) * opened.meta.slots * model.selector.heads
    assert stored_bytes(file) == vectors * vector_bytes(width, dtype)
    projections.clear()
    for again in (opened, MemoryBank.open(file.path)):
        found = scores(model, again)
        assert 0 < error(model, found, expected) < TOLERANCE[dtype]
        assert torch.equal(scores(model, again), found)
    assert not projections


@pytest.mark.skipif(not STATUS.exists(), reason="Linux alone says how much memory is not a file's")
def test_keys_on_disk_that_exceed_the_limit_are_scored_in_bounded_memory(
    model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, slots = 24_000, 16
    memory = torch.randn(count, slots, model.decoder.width).bfloat16()
    none = np.zeros(count, np.int64)
    blocks = Blocks(none, none, none + 1, np.full((count, slots), 4, np.uint8))
    store = BankFile(tmp_path / "large.bank")
    made = MemoryBank(model.fingerprint(), {}, [Document("one", "-")], blocks, Quantized(memory))
    made.save(tmp_path / "large.bank")
    save_keys(MemoryBank.open_from(store), model.selector)
    size = stored_bytes(store)
    cached = scores(model, MemoryBank.open_from(store))
    parts: list[tuple[int, float]] = []

    def watched(query: Tensor, mask: Tensor, keys: Tensor, *more: Any) -> Tensor:
        parts.append((keys.shape[1], megabytes()))
        return block_scores(query, mask, keys, *more)

    monkeypatch.setattr(bank_keys, "CACHE_BYTES", 0)
    monkeypatch.setattr("sedem.selecting.select.block_scores", watched)
    opened = MemoryBank.open_from(store)
    key_index(opened, model.selector)
    tracemalloc.start()
    found = scores(model, opened)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    torch.testing.assert_close(found, cached)
    assert sum(blocks for blocks, _ in parts) == len(QUESTIONS) * count
    assert max(blocks for blocks, _ in parts) <= SCAN
    now = [place for _, place in parts]
    assert size > 8e6
    assert max(now) - now[0] < size / 2e6
    assert most < 100 * count


def megabytes() -> float:
    """Memory of this process that is no file's."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def test_only_missing_keys_are_made(
    model: SeDeM, opened: MemoryBank, projections: list[int]
) -> None:
    save_keys(opened, model.selector)
    opened.append(model.read([EXTRA]))
    opened.remove("lease.txt")
    new = int((opened.blocks.documents == 1).sum())
    projections.clear()
    found = scores(model, opened)
    assert sum(projections) == new
    assert error(model, found, reference(model, opened)) < TOLERANCE["bfloat16"]
    projections.clear()
    save_keys(opened, model.selector)
    assert sum(projections) == new
    save_keys(opened, model.selector, "fp8")
    assert sum(projections) == new + len(opened)


def test_an_interrupted_run_keeps_its_rows(
    model: SeDeM, opened: MemoryBank, projections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_keys, "ROW_BYTES", 1)  # one block per row
    expected, project = scores(model, opened), bank_keys._project
    projections.clear()

    def stops(selector: Selector, memory_NJD: Quantized) -> Tensor:
        if len(projections) == 2:
            raise KeyboardInterrupt
        return project(selector, memory_NJD)

    with monkeypatch.context() as patched:
        patched.setattr(bank_keys, "_project", stops)
        with pytest.raises(KeyboardInterrupt):
            save_keys(opened, model.selector, "int8")
    save_keys(opened, model.selector, "int8")
    assert sum(projections) == len(opened)
    assert error(model, scores(model, opened), expected) < TOLERANCE["int8"]


def test_stored_keys_of_another_selector_are_made_again_with_a_warning(
    model: SeDeM, opened: MemoryBank, caplog: pytest.LogCaptureFixture
) -> None:
    save_keys(opened, model.selector)
    turn(model.selector)
    with caplog.at_level(logging.WARNING):
        found = scores(model, opened)
    assert "are of another selector" in caplog.text
    torch.testing.assert_close(found, reference(model, opened))


def test_keys_that_cannot_be_stored_or_read_are_an_error(
    model: SeDeM, bank: MemoryBank, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot be stored as 'int4'; use bfloat16, int8, fp8"):
        save_keys(bank, model.selector, "int4")
    with pytest.raises(BankError, match="this one is in memory: save it first"):
        save_keys(bank, model.selector)
    bank.save(tmp_path / "a.bank")
    save_keys(bank, model.selector, "int8")
    assert isinstance(bank.store, BankFile)
    for statement, words in (
        ("UPDATE keys SET vectors = zeroblob(7)", "stored keys of the bank do not fit its blocks"),
        ("DELETE FROM keys", "keys of the bank were replaced; open the bank again"),
    ):
        key_index(bank, model.selector)
        with bank.store.writing() as connection:
            connection.execute(statement)
        with pytest.raises(BankError, match=words):
            scores(model, bank)

"""Keys are derived data: cached, stored or made again, they select the same blocks."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sedem import Document, MemoryBank, SeDeM
from sedem.answering.requests import encode_questions
from sedem.bank import keys as bank_keys
from sedem.bank import search
from sedem.bank.blocks import SCAN, Blocks
from sedem.bank.file import BankFile
from sedem.bank.keys import (
    CACHE_BYTES,
    cache_dtype,
    cache_limit,
    forget_keys,
    key_index,
    prepare,
    save_keys,
)
from sedem.bank.search import score_questions
from sedem.errors import BankError, ConfigError
from sedem.method.selector import Selector
from sedem.quantization import DTYPES, Quantized, vector_bytes

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


# Cached in RAM


def test_a_second_question_projects_nothing_and_scores_the_same(
    model: SeDeM, bank: MemoryBank, projections: list[int]
) -> None:
    first = scores(model, bank)
    assert sum(projections) == len(bank)
    assert torch.equal(scores(model, bank), first)
    assert sum(projections) == len(bank)
    torch.testing.assert_close(first, reference(model, bank))


def test_keys_above_the_limit_are_not_cached(
    model: SeDeM, bank: MemoryBank, projections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = scores(model, bank)
    assert key_index(bank, model.selector).cached is not None
    size = key_index(bank, model.selector).cached.nbytes  # type: ignore[union-attr]
    forget_keys(bank)
    monkeypatch.setattr(bank_keys, "CACHE_BYTES", size - 1)
    projections.clear()
    assert torch.equal(scores(model, bank), cached)
    assert sum(projections) == 2 * len(bank)
    assert key_index(bank, model.selector).cached is None


def test_a_gpu_caches_up_to_a_share_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda:1"), torch.device("cpu")
    free = {gpu: 100 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 141 * 10**9))
    # 8,192 blocks of 32 slots of a 3B model.
    size = 8192 * 32 * 3072 * cache_dtype(gpu).itemsize
    assert CACHE_BYTES < size < cache_limit(gpu) == 25 * 2**30
    free[gpu] = 2**30
    assert cache_limit(gpu) == cache_limit(cpu) == CACHE_BYTES == 2**30
    assert (cache_dtype(gpu), cache_dtype(cpu)) == (torch.bfloat16, torch.float32)


def test_the_limit_is_that_of_the_selectors_device(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def limit(device: torch.device) -> int:
        asked.append(device)
        return 0

    monkeypatch.setattr(bank_keys, "cache_limit", limit)
    scores(model, bank)
    assert set(asked) == {model.selector.w_key.weight.device}
    assert key_index(bank, model.selector).cached is None


def change_by_append(model: SeDeM, bank: MemoryBank) -> None:
    bank.append(model.read([EXTRA]))


def change_by_remove(model: SeDeM, bank: MemoryBank) -> None:
    bank.remove("lease.txt")


@pytest.mark.parametrize("change", [change_by_append, change_by_remove])
@pytest.mark.parametrize("on_disk", [False, True])
def test_cached_keys_follow_appending_and_removing(
    change: Callable[[SeDeM, MemoryBank], None],
    on_disk: bool,
    model: SeDeM,
    bank: MemoryBank,
    tmp_path: Path,
) -> None:
    if on_disk:
        bank.save(tmp_path / "a.bank")
    scores(model, bank)
    change(model, bank)
    torch.testing.assert_close(scores(model, bank), reference(model, bank))


def test_cached_keys_of_another_selector_are_made_again(model: SeDeM, bank: MemoryBank) -> None:
    before = scores(model, bank)
    with torch.no_grad():
        model.selector.w_key.weight.neg_()
    after = scores(model, bank)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, reference(model, bank))


def test_questions_scored_together_score_as_each_alone(model: SeDeM, bank: MemoryBank) -> None:
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    together = score_questions(model.selector, bank, hidden_BQE, mask_BQ)
    torch.testing.assert_close(together, scores(model, bank))


def test_keys_prepared_in_float32_score_exactly(
    model: SeDeM, bank: MemoryBank, projections: list[int]
) -> None:
    expected = scores(model, bank)
    forget_keys(bank)
    prepare(bank, model.selector, "int8")
    prepare(bank, model.selector, None)
    projections.clear()
    assert torch.equal(scores(model, bank), expected)
    assert not projections


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_keys_have_the_type_asked_for_and_score_nearly_the_same(
    dtype: str, model: SeDeM, bank: MemoryBank
) -> None:
    expected = scores(model, bank)
    prepare(bank, model.selector, dtype)
    cached = key_index(bank, model.selector).cached
    assert cached is not None
    assert cached.values.dtype == DTYPES[dtype]
    found = scores(model, bank)
    assert not torch.equal(found, expected)
    _, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    assert ((found - expected).abs() / mask_BQ.sum(1)[:, None]).max() < TOLERANCE[dtype]


def test_an_empty_bank_and_an_unknown_type_are_refused(model: SeDeM, bank: MemoryBank) -> None:
    with pytest.raises(ConfigError, match="cannot be stored as 'int4'; use bfloat16, int8, fp8"):
        prepare(bank, model.selector, "int4")
    with pytest.raises(BankError, match="this one is in memory: save it first"):
        save_keys(bank, model.selector)
    for name in ("lease.txt", "recipe.txt"):
        bank.remove(name)
    with pytest.raises(BankError, match="holds no documents"):
        prepare(bank, model.selector)


# On disk


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_keys_replace_the_projection_and_leave_the_bank_unchanged(
    dtype: str, model: SeDeM, opened: MemoryBank, projections: list[int]
) -> None:
    expected, path = scores(model, opened), opened.path
    assert path is not None
    size = save_keys(opened, model.selector, dtype)
    again = MemoryBank.open(path)
    assert (again.fingerprint, again.memory_bytes) == (opened.fingerprint, opened.memory_bytes)
    vectors = len(opened) * opened.meta.slots * model.selector.heads
    each = model.selector.w_key.out_features // model.selector.heads
    assert size == vectors * vector_bytes(each, dtype)
    projections.clear()
    _, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    off = (scores(model, again) - expected).abs() / mask_BQ.sum(1)[:, None]
    assert 0 < off.max() < TOLERANCE[dtype]
    assert not projections


def test_stored_keys_above_the_limit_are_read_for_every_question(
    model: SeDeM, opened: MemoryBank, projections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_keys, "CACHE_BYTES", 0)
    save_keys(opened, model.selector, "int8")
    projections.clear()
    first = scores(model, opened)
    assert torch.equal(scores(model, opened), first)
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
    size = save_keys(MemoryBank.open_from(store), model.selector)
    cached = scores(model, MemoryBank.open_from(store))
    parts: list[tuple[int, float]] = []
    key_scores = search.key_scores

    def watched(query: Tensor, mask: Tensor, keys: Quantized, padding: Tensor) -> Tensor:
        parts.append((len(keys), megabytes()))
        return key_scores(query, mask, keys, padding)

    monkeypatch.setattr(bank_keys, "CACHE_BYTES", 0)
    monkeypatch.setattr(search, "key_scores", watched)
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


def test_documents_appended_later_are_projected_and_removed_ones_are_not_scored(
    model: SeDeM, opened: MemoryBank, projections: list[int]
) -> None:
    save_keys(opened, model.selector)
    opened.append(model.read([EXTRA]))
    opened.remove("lease.txt")
    assert opened.path is not None
    again = MemoryBank.open(opened.path)
    projections.clear()
    _, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    found = scores(model, again)
    assert sum(projections) == sum(
        again.documents[b.document].name == "note.md" for b in again.blocks
    )
    off = (found - reference(model, again)).abs() / mask_BQ.sum(1)[:, None]
    assert off.max() < TOLERANCE["bfloat16"]


def test_saving_keys_again_makes_only_missing_ones(
    model: SeDeM, opened: MemoryBank, projections: list[int]
) -> None:
    save_keys(opened, model.selector, "int8")
    opened.append(model.read([EXTRA]))
    projections.clear()
    save_keys(opened, model.selector, "int8")
    assert sum(projections) == sum(b.document == 2 for b in opened.blocks)
    save_keys(opened, model.selector, "fp8")
    assert sum(projections) > len(opened)


def test_keys_that_do_not_fit_their_blocks_are_an_error(model: SeDeM, opened: MemoryBank) -> None:
    save_keys(opened, model.selector, "int8")
    assert isinstance(opened.store, BankFile)
    with opened.store.writing() as connection:
        connection.execute("UPDATE keys SET vectors = zeroblob(7)")
    with pytest.raises(BankError, match="stored keys of the bank do not fit its blocks"):
        scores(model, opened)


def test_stored_keys_of_another_selector_are_made_again_with_a_warning(
    model: SeDeM, opened: MemoryBank, caplog: pytest.LogCaptureFixture
) -> None:
    save_keys(opened, model.selector)
    with torch.no_grad():
        model.selector.w_key.weight.neg_()
    with caplog.at_level(logging.WARNING):
        found = scores(model, opened)
    assert "are of another selector" in caplog.text
    torch.testing.assert_close(found, reference(model, opened))


def test_an_interrupted_run_keeps_its_rows_and_loses_nothing(
    model: SeDeM, opened: MemoryBank, projections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_keys, "ROW_BYTES", 1)  # one block per row
    expected, project = scores(model, opened), bank_keys._project

    def stops(selector: Selector, memory_NJD: Quantized) -> Tensor:
        if sum(projections) == len(opened) + 2:
            raise KeyboardInterrupt
        return project(selector, memory_NJD)

    with monkeypatch.context() as patched:
        patched.setattr(bank_keys, "_project", stops)
        with pytest.raises(KeyboardInterrupt):
            save_keys(opened, model.selector, "int8")
    projections.clear()
    save_keys(opened, model.selector, "int8")
    assert sum(projections) == len(opened) - 2
    _, mask_BQ = encode_questions(model, model.engine, QUESTIONS)
    off = (scores(model, opened) - expected).abs() / mask_BQ.sum(1)[:, None]
    assert off.max() < TOLERANCE["int8"]

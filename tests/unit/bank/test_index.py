"""Keys of blocks, cached and stored, codes beside a bank, and scores by words."""

from __future__ import annotations

import logging
import math
import re
import shutil
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sedem import Answer, Document, MemoryBank, SeDeM
from sedem.answering.decoding import Decoding
from sedem.bank import index
from sedem.bank.blocks import SCAN, Blocks
from sedem.bank.care import examine
from sedem.bank.database import _WORDS_BEFORE, connect
from sedem.bank.file import BankFile
from sedem.bank.index import (
    CACHE_BYTES,
    COMMON,
    TELLING,
    cache_dtype,
    cache_limit,
    key_index,
    prepare,
    save_keys,
    score_words,
    stored_bytes,
)
from sedem.bank.memory_bank import copy_to
from sedem.bank.parts import PartFile, Parts
from sedem.errors import BankError, ConfigError
from sedem.folding import asked_words, common_words
from sedem.guidance import UNKNOWN, Confidence
from sedem.method.selector import Selector, block_scores
from sedem.selecting.plan import Request, plan_of
from sedem.selecting.select import CONTEXT, CONTEXT_BESIDE_NAMES, encode_questions, find_words
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
    monkeypatch.setattr(index, "CACHE_BYTES", size - 1)
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
    monkeypatch.setattr(index, "CACHE_BYTES", limit)
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

    monkeypatch.setattr(index, "CACHE_BYTES", 0)
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
    monkeypatch.setattr(index, "ROW_BYTES", 1)  # one block per row
    expected, project = scores(model, opened), index._project
    projections.clear()

    def stops(selector: Selector, memory_NJD: Quantized) -> Tensor:
        if len(projections) == 2:
            raise KeyboardInterrupt
        return project(selector, memory_NJD)

    with monkeypatch.context() as patched:
        patched.setattr(index, "_project", stops)
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


DOCUMENTS = [
    Document("lease", "The tenant pays the rent. The rent is 900 euros, and the flat is cold."),
    Document("garden", "Roses need water. A tenant of the garden waters roses, roses and roses."),
    Document("rent book", "April and May were paid. June was not."),
    Document("empty words", "The and of in is."),
]
ONE = Decoding(max_new_tokens=1)
QUESTION = "What rent do tenants pay for the roses?"
STEMS = {"tenants": "tenant", "pays": "pay", "rents": "rent", "waters": "water"}


def stems(text: str) -> list[str]:
    """The words of a text as the index has them; enough of Porter's rules for these documents."""
    return [STEMS.get(word, word) for word in re.findall(r"\w+", text.lower())]


def bm25(spans: list[tuple[str, str]], question: str) -> list[float]:
    """k1 = 1.2, b = 0.75; names count beside texts; a word is weighed by blocks that have it."""
    columns = [(stems(name), stems(text)) for name, text in spans]
    lengths = [len(name) + len(text) for name, text in columns]
    mean = sum(lengths) / len(lengths)
    totals = [0.0] * len(spans)
    for word in dict.fromkeys(stems(question)):
        count = sum(word in name + text for name, text in columns)
        weight = math.log(1 + (len(spans) - count + 0.5) / (count + 0.5))
        if word in common_words(question):
            weight = min(weight, math.log(2))
        for number, row in enumerate(columns):
            for column in row:
                times = column.count(word)
                length = 1.2 * (1 - 0.75 + 0.75 * lengths[number] / mean)
                totals[number] += weight * times * 2.2 / (times + length)
    return totals


def spans_of(bank: MemoryBank) -> list[tuple[str, str]]:
    """Name and text of each block."""
    names = bank.documents.names
    return [(names[b.document], bank.block_text(n)) for n, b in enumerate(bank.blocks)]


def test_scores_are_bm25_of_names_and_blocks(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    found = score_words(bank, QUESTION)
    expected = torch.tensor(bm25(spans_of(bank), QUESTION))
    torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-4)
    best = int(found.scores.argmax())
    telling = [word for word in found.words if word.text not in common_words(QUESTION)]
    there = [word for word in telling if best in word.blocks]
    least = TELLING * max(word.weight for word in telling if len(word.blocks))
    rarest_first = sorted(there, key=lambda word: -word.weight)
    assert found.matching(best) == tuple(w.text for w in rarest_first if w.weight >= least)
    assert found.matching(best)


@pytest.mark.parametrize(
    ("question", "text", "common"),
    [
        ("Which company was chosen for the pump?", "Aquafix was chosen for the pump.", "the"),
        ("Wann werden die Tonnen geleert?", "Die Tonnen werden dienstags geleert.", "werden"),
        ("Quelle est la capacité de la salle ?", "La salle est de 90 places.", "de"),
    ],
)
def test_words_of_grammar_are_common_whatever_else_the_bank_has(
    question: str, text: str, common: str, model: SeDeM
) -> None:
    numbers = [Document(f"log {n}", f"{n} {n + 1} {n + 2}") for n in range(30)]
    bank = model.read([*numbers, Document("notes", text)])
    weights = {word.text.casefold(): word.weight for word in score_words(bank, question).words}
    assert weights[common] == COMMON
    assert max(weights.values()) > 4 * COMMON


@pytest.mark.parametrize(
    ("question", "least", "most"),
    [
        ("What is the rent?", 0.9, 1.0),
        ("Who is the landlord of Elm Street?", 0.0, 0.1),
        ("What rent does Svensson pay?", 0.15, 0.35),
        ("...", 1.0, 1.0),
    ],
)
def test_words_that_a_small_bank_lacks_do_not_outweigh_those_it_has(
    question: str, least: float, most: float, model: SeDeM
) -> None:
    bank = model.read([Document("a", "The rent is 1,240 crowns a month.")])
    assert least <= score_words(bank, question).covered(0) <= most


def test_the_share_of_words_weighs_them_as_if_there_were_fifteen_more_blocks(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    words, rows = score_words(bank, QUESTION), [name + " " + text for name, text in spans_of(bank)]
    asked = dict.fromkeys(stems(QUESTION))
    held = {word: [word in stems(row) for row in rows] for word in asked}
    squares = {}
    for word, has in held.items():
        weight = math.log(1 + (len(rows) + 15 - sum(has) + 0.5) / (sum(has) + 0.5))
        squares[word] = min(weight, math.log(2) if word in common_words(QUESTION) else weight) ** 2
    for block in range(len(rows)):
        share = sum(squares[word] for word in asked if held[word][block]) / sum(squares.values())
        assert words.covered(block) == pytest.approx(share)
    # A word of what was said before counts for a share, here half.
    added, total = words.beside(score_words(bank, "garden"), 0.5), sum(squares.values())
    has = ["garden" in stems(row) for row in rows]
    square = (0.5 * math.log(1 + (len(rows) + 15 - sum(has) + 0.5) / (sum(has) + 0.5))) ** 2
    for block in range(len(rows)):
        share = (words.covered(block) * total + square * has[block]) / (total + square)
        assert added.covered(block) == pytest.approx(share)


def test_words_among_some_blocks_are_those_of_a_bank_of_them(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    kept = [n for n, b in enumerate(bank.blocks) if b.document != 1]
    found = score_words(bank, QUESTION).among(kept)
    alone = score_words(model.read([DOCUMENTS[0], *DOCUMENTS[2:]]), QUESTION)
    assert [word.weight for word in found.words] == [word.weight for word in alone.words]
    assert [word.blocks.tolist() for word in found.words] == [
        word.blocks.tolist() for word in alone.words
    ]


def test_removed_documents_have_no_words_and_a_part_has_its_own(
    model: SeDeM, tmp_path: Path
) -> None:
    bank = model.read(DOCUMENTS)
    bank.save(tmp_path / "a.bank")
    before = bank.snapshot()
    bank.remove("garden")
    count = sum(b.document != 1 for b in before.blocks)
    found = score_words(bank, "roses rent")
    assert found.count == len(found.scores) == count
    assert [len(word.blocks) > 0 for word in found.words] == [False, True]
    assert len(score_words(before, "roses").words[0].blocks)
    whole = score_words(before, QUESTION)
    rows = range(2, len(before))
    part = score_words(before.part(rows), QUESTION)
    assert torch.equal(part.scores, whole.scores[2:])


def test_a_large_bank_is_asked_for_its_rarest_words_alone(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    every = {word.text: len(word.blocks) for word in score_words(bank, QUESTION).words}
    few = score_words(bank, QUESTION, postings=3)
    assert sum(len(word.blocks) for word in few.words) <= 3
    left_out = every.keys() - {word.text for word in few.words}
    assert min(every[word] for word in left_out) >= max(len(w.blocks) for w in few.words)


@pytest.mark.parametrize(
    ("text", "question", "words"),
    [
        ("该租赁合同于2024年签订。", "租赁合同?", ("租赁", "赁合", "合同")),
        ("Zoë's café", "Who owns Zoe's CAFÉ?", ("Zoe", "s", "CAFÉ")),
    ],
)
def test_scripts_without_spaces_and_diacritics(
    text: str, question: str, words: tuple[str, ...], model: SeDeM
) -> None:
    bank = model.read([Document("a", text), Document("b", "Nothing of it.")])
    found = score_words(bank, question)
    assert set(words) <= {word.text for word in found.words if len(word.blocks)}
    assert found.scores[0] > found.scores[-1]


def make_older(path: Path) -> None:
    """Make a bank as an earlier release did, whose index of words has other forms."""
    with closing(connect(path)) as connection, connection:
        connection.execute(f"DROP TABLE words; {_WORDS_BEFORE}; PRAGMA user_version = 5")
        connection.execute("INSERT INTO words (rowid, name, text) VALUES (1, 'old', '1 240')")


def test_an_older_bank_is_indexed_anew_when_it_is_opened_or_appended(
    model: SeDeM, tmp_path: Path
) -> None:
    documents = [*DOCUMENTS, Document("prices", "Rose trees cost 1 240 euros.")]
    model.read(documents).save(tmp_path / "a.bank")
    make_older(tmp_path / "a.bank")
    shutil.copy(tmp_path / "a.bank", tmp_path / "b.bank")
    bank = MemoryBank.open(tmp_path / "a.bank")
    expected = score_words(model.read(documents), "1240 roses old")
    found = score_words(bank, "1240 roses old")
    assert torch.equal(found.scores, expected.scores) and found.scores.count_nonzero()
    assert bank.has_words and not examine(BankFile(tmp_path / "a.bank")).problems
    BankFile(tmp_path / "b.bank").remove("garden")
    assert not len(score_words(MemoryBank.open(tmp_path / "b.bank"), "old").words[0].blocks)


def test_an_older_part_has_no_words(model: SeDeM, tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    with parts.creating(model.read(DOCUMENTS).meta):
        pass
    [part] = parts.files()
    assert part.meta().words
    older = part.entry.model_copy(update={"format": 5})
    assert not PartFile(part.bucket, older).meta().words


@pytest.mark.parametrize(
    ("question", "best", "other"),
    [
        ("Which is 22 04?", "Row 22-04 is it.", "There are 22 of them and 04 of those."),
        ("HK-2093", "HK2093 came.", "HK is a place. 2093 is far."),
        ("DE89 3704 0044", "DE8937040044", "DE89 is a code. 3704, 0044."),
    ],
)
def test_unrelated_numbers_do_not_outrank_one_that_matches_whole(
    question: str, best: str, other: str, model: SeDeM
) -> None:
    bank = model.read([Document("a", other), Document("b", best), *DOCUMENTS])
    scores = score_words(bank, question).scores
    assert bank.blocks[int(scores.argmax())].document == 1


def test_a_bank_without_words_is_asked_by_states_unless_words_are_wanted(
    model: SeDeM, tmp_path: Path
) -> None:

    whole = model.read(DOCUMENTS)
    file = BankFile(tmp_path / "a.bank")
    copy_to(file, whole.snapshot(), replace(whole.meta, words=False))
    bank = MemoryBank.open(tmp_path / "a.bank")
    model.config = model.config.with_changes(selection="both")
    assert model.answer(bank, QUESTION, decoding=ONE).citations[0].word_score is None
    with pytest.raises(BankError, match="has no index of words, which selection by words needs"):
        model.answer(bank, QUESTION, selection="words")


@pytest.mark.parametrize("by", ["states", "words", "both"])
def test_citations_say_why_they_were_selected(by: str, model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    answer = model.answer(bank, QUESTION, k=3, decoding=ONE, selection=by)
    states, words = model.scores(bank, QUESTION), score_words(bank, QUESTION)
    spans = [(bank.documents.name(b.document), b.start, b.end) for b in bank.blocks]
    for citation in answer.citations:
        block = spans.index((citation.document, citation.start, citation.end))
        state, word = float(states[block]), float(words.scores[block])
        weight = model.config.word_weight
        expected = {"states": state, "words": weight * word, "both": state + weight * word}[by]
        assert citation.score == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert (citation.state_score is None) == (by == "words")
        assert citation.words == (() if by == "states" else words.matching(block))
    scores = [citation.score for citation in answer.citations]
    assert scores == sorted(scores, reverse=True)


def test_a_confidence_comes_from_states_and_from_the_words_of_the_best_block(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    model.confidence = Confidence()
    with torch.no_grad():
        model.confidence.weight[:] = torch.tensor([2.0, 1.0, 3.0])

    def asked(of: MemoryBank = bank, by: str = "both", **more: Any) -> tuple[Answer, float]:
        answer = model.answer(of, QUESTION, decoding=ONE, selection=by, min_confidence=0.0, **more)
        assert answer.confidence is not None
        return answer, math.log(answer.confidence / (1 - answer.confidence))

    by_states = asked(by="states")[1]
    answer, by_both = asked()
    best = spans_of(bank).index((answer.citations[0].document, answer.citations[0].text))
    covered = score_words(bank, QUESTION).covered(best)
    assert by_both - by_states == pytest.approx(3 * (covered - UNKNOWN), abs=1e-4)
    # The states of one document are as in a bank of it; words keep their weights of the whole bank.
    name = DOCUMENTS[1].name
    alone = asked(model.read(DOCUMENTS[1:2]), "states")[1]
    assert asked(by="states", documents=[name])[1] == pytest.approx(alone, abs=1e-4)
    assert model.answer(bank, QUESTION, decoding=ONE, selection="words").confidence is None
    with pytest.raises(ConfigError, match="these would be selected by words alone"):
        model.answer(bank, QUESTION, selection="words", min_confidence=0.5)


def test_scores_are_what_the_model_selects_by(model: SeDeM) -> None:
    bank = model.read(DOCUMENTS)
    states, words = model.scores(bank, QUESTION), score_words(bank, QUESTION)
    model.config = model.config.with_changes(selection="both", word_weight=2.0)
    torch.testing.assert_close(model.scores(bank, QUESTION), states + 2 * words.scores)


@pytest.mark.parametrize(
    ("question", "share"),
    [
        ("And what does he charge?", CONTEXT),
        ("How long is it valid?", CONTEXT),
        ("what about the deposit?", CONTEXT),
        ("When did she meet Anna?", CONTEXT_BESIDE_NAMES),
        ("What was its rent in 2019?", CONTEXT_BESIDE_NAMES),
        ("Und was kostet er?", CONTEXT),
        ("Et combien coûte-t-elle ?", CONTEXT),
        ("¿Y cuánto cuesta?", CONTEXT),
        ("What is the rent?", 0.0),
        ("Gibt es Parkplätze?", 0.0),
        ("Who signed the lease of Mill Lane 4?", 0.0),
    ],
)
def test_the_words_before_a_question_count_if_it_refers_back(
    question: str, share: float, model: SeDeM
) -> None:
    bank, context = model.read(DOCUMENTS), "Who waters the garden roses? A tenant."
    expected = score_words(bank, question).scores
    before = {word.text: word for word in score_words(bank, context).words}
    for word in asked_words(question):
        before.pop(word.text, None)
    for word in before.values():
        expected[word.blocks] += share * torch.from_numpy(word.scores)
    found = find_words(
        plan_of(model, Request(bank, question, selection="words")), question, context
    )
    assert found is not None
    torch.testing.assert_close(found.scores, expected)


@pytest.mark.parametrize(
    ("question", "left"),
    [
        ("List the totals of all invoices.", True),
        ("Which invoice is largest?", True),
        ("invoice 07", False),
    ],
)
def test_a_question_that_many_blocks_match_alike_says_what_was_left_out(
    question: str, left: bool, model: SeDeM
) -> None:
    texts = [f"Invoice {n:02}: total {90 + n} of a supplier." for n in range(1, 9)]
    bank = model.read([Document(f"{n}.txt", text) for n, text in enumerate(texts)])
    answer = model.answer(bank, question, k=2, decoding=ONE, selection="words")
    notes = [note for note in answer.cut if "left out" in note]
    assert bool(notes) == left
    assert not left or "blocks that have the words of the question alike" in notes[0]
    everything = model.answer(bank, question, k="all", decoding=ONE, selection="words")
    assert not [note for note in everything.cut if "left out" in note]

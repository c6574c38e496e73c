"""A bank in RAM and the same bank on disk have equal content, scores and answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import build
from conftest import LEASE, RECIPE
from stored_banks import META, append

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.bank import memory_bank
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.file import BankFile, unknown_document
from sedem.errors import BankError, ConfigError, DataError
from sedem.tensors import quantize

QUESTIONS = ("What is the rent?", "How long does the pie keep?")
SHORT = Decoding(max_new_tokens=12)
EXTRA = Document("note.md", "The cellar key hangs behind the door; the meter is read in March.")


def replies(model: SeDeM, bank: MemoryBank) -> list[tuple[object, ...]]:
    """Everything about the answers to the usual questions but the times."""
    answers = model.answer(bank, QUESTIONS, decoding=SHORT)
    return [(a.text, a.citations, a.k, a.blocks, a.finish_reason, a.cut) for a in answers]


def contents(bank: MemoryBank) -> tuple[object, ...]:
    """What a bank holds besides its memory."""
    return bank.fingerprint, bank.made_by, bank.documents, bank.blocks


def all_memory(bank: MemoryBank) -> torch.Tensor:
    return bank.memory(range(len(bank)))


def assert_same_bank(one: MemoryBank, other: MemoryBank) -> None:
    assert contents(one) == contents(other)
    assert torch.equal(all_memory(one), all_memory(other))


# Round trips


def test_an_opened_bank_has_the_content_scores_and_answers_of_the_saved_one(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    # Neither alphabetical nor by length.
    given = [documents[1], EXTRA, documents[0]]
    bank, path = model.read(given), tmp_path / "deep" / "down" / "a.bank"
    before, scores = replies(model, bank), model.scores(bank, QUESTIONS[0])
    bank.save(path)
    opened = MemoryBank.open(path)
    assert_same_bank(opened, bank)
    assert torch.equal(model.scores(opened, QUESTIONS[0]), scores)
    assert replies(model, opened) == before
    assert opened.path == bank.path == path
    assert opened.documents == given
    opened.save(tmp_path / "second.bank")
    opened.remove(EXTRA.name)
    assert_same_bank(MemoryBank.open(tmp_path / "second.bank"), opened)
    assert_same_bank(MemoryBank.open(path), bank)


def test_texts_are_read_back_unchanged_and_covered(model: SeDeM, tmp_path: Path) -> None:
    texts = ["a\0b", "\ufeffmark in front", "line\r\nline", "é" * 40, "🥧" * 9, RECIPE, "\n\n  x"]
    plain = [LEASE[:size] for size in (1, 3, 4, 5, 15, 16, 17, 32, 33, 100)]
    given = [Document(f"ü / {number}.txt", text) for number, text in enumerate(texts + plain)]
    model.read(given).save(tmp_path / "a.bank")
    bank = MemoryBank.open(tmp_path / "a.bank")
    assert bank.documents == given
    for number, text in enumerate(plain, len(texts)):
        own = [index for index, block in enumerate(bank.blocks) if block.document == number]
        assert "".join(bank.citation(index, 1, 0.0).text for index in own) == text
        assert len(own) == -(-len(text) // 16)
        assert int(bank.slot_tokens(own).sum()) == len(text)


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_the_memory_of_a_document_does_not_depend_on_the_others(
    kind: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, compressor=kind)
    short = Document("a.txt", "Short.")
    appended = model.read([short])
    assert not all_memory(appended)[:, 2:].any(), "padding slots are zero"
    appended.append(model.read(documents))
    at_once = model.read([short, *documents])
    assert contents(appended) == contents(at_once)
    # Kernels may round differently for another number of segments, by one step of bfloat16.
    torch.testing.assert_close(
        all_memory(appended).float(), all_memory(at_once).float(), rtol=2**-7, atol=1e-5
    )


# Refusals


def test_documents_that_cannot_be_read_are_refused(model: SeDeM) -> None:
    with pytest.raises(DataError, match=r"2 documents are named 'a\.txt'"):
        model.read([Document("a.txt", "one text"), Document("a.txt", "another text")])
    with pytest.raises(DataError, match="give at least one document"):
        model.read([])
    names = [f"{number}.txt" for number in range(1_200)]
    sentence = str(unknown_document("the bank", "x", names))
    listed = ", ".join(f"'{name}'" for name in names[:10])
    assert sentence.endswith(f"no document 'x'; it has {listed} and 1,190 more")


def test_blocks_and_memory_of_different_number_are_refused(model: SeDeM) -> None:
    bank = model.read([EXTRA])
    every = bank.stored(range(len(bank)))
    with pytest.raises(
        BankError, match=f"names {len(bank) - 1} blocks but has memory of {len(bank)}"
    ):
        MemoryBank(bank.fingerprint, bank.made_by, bank.documents, bank.blocks[:-1], every)


# Types of slots


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantized_bank_is_smaller_keeps_its_type_and_answers_from_it(
    dtype: str, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    plain, bank = model.read(documents), model.read(documents[:1])
    bank.save(tmp_path / "a.bank", dtype=dtype)
    bank.append(model.read(documents[1:]))
    opened = MemoryBank.open(tmp_path / "a.bank")
    assert opened.dtype == bank.dtype == dtype
    assert_same_bank(opened, plain.cast(dtype))
    assert contents(opened) == contents(plain)
    exact = all_memory(plain).float()
    assert torch.equal(all_memory(opened), quantize(exact, dtype).dequantize())
    slots = exact.shape[0] * exact.shape[1]
    assert (plain.memory_bytes, opened.memory_bytes) == (slots * 64, slots * 36)
    assert opened.stored(range(len(opened))).nbytes == opened.memory_bytes
    assert replies(model, opened) == replies(model, plain.cast(dtype))
    plain.append(bank)
    assert plain.dtype == "bfloat16" and all_memory(plain).dtype == torch.bfloat16


def test_an_unknown_type_is_refused_and_nothing_is_made(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="stored as 'int4'; use bfloat16, int8, fp8"):
        model.read(documents).save(tmp_path / "a.bank", dtype="int4")
    assert not list(tmp_path.iterdir())
    model.read(documents).save(tmp_path / "a.bank", dtype="int8")
    with BankFile(tmp_path / "a.bank").writing() as connection:
        connection.execute("UPDATE bank SET dtype = 'int4'")
    with pytest.raises(BankError, match=r"a\.bank' stores its slots as 'int4', this sedem reads"):
        MemoryBank.open(tmp_path / "a.bank")


def test_a_second_answer_does_not_scan_the_blocks(
    model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = model.read(documents)
    first = replies(model, bank)

    def scanned(*_: object) -> None:
        pytest.fail("all blocks were iterated over")

    monkeypatch.setattr(Blocks, "__iter__", scanned, raising=False)
    assert replies(model, bank) == first


# Blocks


@pytest.mark.parametrize("block_slots", [4, 2, 8])
def test_the_block_size_changes_neither_tokens_nor_slots(
    block_slots: int, config: SedemConfig, backbone: Backbone
) -> None:
    given = [Document("lease.txt", LEASE), Document("a.txt", "Short.")]
    usual = build(config, backbone).read(given)
    bank = build(config, backbone, block_slots=block_slots).read(given)
    # One token a character: the tokenizer knows bytes only and this text is ASCII.
    assert [sum(b.slot_tokens) for b in bank.blocks] == [b.end - b.start for b in bank.blocks]
    assert bank.blocks[-1] == BlockRow(1, 0, 6, (4, 2, 0, 0, 0, 0, 0, 0)[:block_slots])
    assert sum(b.end - b.start for b in bank.blocks if b.document == 0) == len(LEASE)
    assert torch.equal(real_slots(bank), real_slots(usual))


def real_slots(bank: MemoryBank) -> torch.Tensor:
    """The slots without padding, in reading order."""
    return all_memory(bank)[bank.slot_tokens(range(len(bank))) > 0]


def test_opening_and_reloading_read_no_rows_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(rows: Iterator[Any], most: int) -> list[Any]:
        some = list(itertools.islice(rows, most))
        read.append(len(some))
        return some

    monkeypatch.setattr(memory_bank, "islice", counting)
    file = BankFile(tmp_path / "a.bank")
    with file.creating(META):
        append(file, *range(9))
    bank = MemoryBank.open_from(file)
    assert len(bank) == 18 and not read
    assert len(bank.blocks) == sum(read) == 18
    file.remove("3.txt")
    append(file, 9)
    bank.reload()
    bank.reload()
    assert len(bank.blocks) == 18 and sum(read) == 20
    assert bank.blocks == MemoryBank.open_from(file).blocks

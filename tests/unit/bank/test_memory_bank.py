"""A bank in RAM and the same bank on disk have equal content, scores and answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import Answer, Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.file import BankFile, unknown_document
from sedem.errors import BankError, BankMismatchError, ConfigError, DataError
from sedem.quantization import quantize

QUESTIONS = ("What is the rent?", "How long does the pie keep?")
SHORT = Decoding(max_new_tokens=12)
EXTRA = Document("note.md", "The cellar key hangs behind the door; the meter is read in March.")


def other_shape(config: SedemConfig, backbone: Backbone, **changes: object) -> SeDeM:
    """The usual model with some settings changed."""
    torch.manual_seed(1)
    return SeDeM(config.with_changes(**changes), backbone, backbone).eval()


def replies(model: SeDeM, bank: MemoryBank) -> list[tuple[object, ...]]:
    """Everything about the answers to the usual questions but the times."""
    answers: list[Answer] = model.answer(bank, QUESTIONS, decoding=SHORT)
    return [(a.text, a.citations, a.k, a.blocks, a.finish_reason, a.cut) for a in answers]


def contents(bank: MemoryBank) -> tuple[object, ...]:
    """What a bank holds besides its memory."""
    return bank.fingerprint, bank.made_by, bank.documents, bank.blocks


def all_memory(bank: MemoryBank) -> torch.Tensor:
    return bank.memory(range(len(bank)))


def assert_same_bank(one: MemoryBank, other: MemoryBank) -> None:
    assert contents(one) == contents(other)
    assert torch.equal(all_memory(one), all_memory(other))


def bytes_of(place: Path) -> dict[str, bytes]:
    """Every file at a place, and beside it those whose names begin with its."""
    files = place.rglob("*") if place.is_dir() else place.parent.glob(f"{place.name}*")
    return {path.name: path.read_bytes() for path in files if path.is_file()}


# Round trips


def test_an_opened_bank_has_the_content_scores_and_answers_of_the_saved_one(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents)
    before = replies(model, bank)
    scores = model.scores(bank, QUESTIONS[0])
    bank.save(tmp_path / "both.bank")
    opened = MemoryBank.open(tmp_path / "both.bank")
    assert_same_bank(opened, bank)
    assert torch.equal(model.scores(opened, QUESTIONS[0]), scores)
    assert replies(model, opened) == before
    assert opened.path == bank.path == tmp_path / "both.bank"


def test_an_opened_bank_can_be_saved_under_another_name_and_both_are_independent(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    model.read(documents).save(tmp_path / "first.bank")
    copy = MemoryBank.open(tmp_path / "first.bank")
    copy.save(tmp_path / "second.bank")
    copy.append(model.read([EXTRA]))
    assert_same_bank(MemoryBank.open(tmp_path / "second.bank"), copy)
    assert_same_bank(MemoryBank.open(tmp_path / "first.bank"), model.read(documents))


def test_saving_creates_the_folders_above(model: SeDeM, tmp_path: Path) -> None:
    model.read([EXTRA]).save(tmp_path / "deep" / "down" / "a.bank")
    assert len(MemoryBank.open(tmp_path / "deep" / "down" / "a.bank")) > 0


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_documents_read_in_two_steps_make_the_same_bank_as_in_one(
    kind: str, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = other_shape(config, backbone, compressor=kind)
    appended = model.read(documents[:1])
    appended.append(model.read(documents[1:]))
    at_once = model.read(documents)
    assert contents(appended) == contents(at_once)
    # Kernels may round differently for another number of segments, by one step of bfloat16.
    torch.testing.assert_close(
        all_memory(appended).float(), all_memory(at_once).float(), rtol=2**-7, atol=1e-5
    )


def test_appending_in_ram_and_on_disk_is_the_same(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    in_ram, on_disk = model.read(documents), model.read(documents)
    on_disk.save(tmp_path / "a.bank")
    for bank in (in_ram, on_disk):
        bank.append(model.read([EXTRA]))
    assert_same_bank(on_disk, in_ram)
    assert replies(model, on_disk) == replies(model, in_ram)
    assert_same_bank(MemoryBank.open(tmp_path / "a.bank"), in_ram)


@pytest.mark.parametrize("name", ["lease.txt", "recipe.txt"])
def test_removing_in_ram_and_on_disk_is_the_same(
    name: str, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    in_ram, on_disk = model.read(documents), model.read(documents)
    on_disk.save(tmp_path / "a.bank")
    for bank in (in_ram, on_disk):
        bank.remove(name)
    kept = next(d for d in documents if d.name != name)
    assert in_ram.documents == [kept]
    assert {block.document for block in in_ram.blocks} == {0}
    assert_same_bank(on_disk, in_ram)
    assert replies(model, on_disk) == replies(model, in_ram)
    assert_same_bank(MemoryBank.open(tmp_path / "a.bank"), in_ram)


def test_a_removed_document_can_be_appended_again(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents)
    bank.save(tmp_path / "a.bank")
    bank.remove("lease.txt")
    bank.append(model.read(documents[:1]))
    assert [d.name for d in bank.documents] == ["recipe.txt", "lease.txt"]
    torch.testing.assert_close(
        model.scores(bank, QUESTIONS[0]).sort().values,
        model.scores(model.read(documents), QUESTIONS[0]).sort().values,
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_bank_without_documents_is_empty_and_can_be_appended_to(
    on_disk: bool, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents)
    if on_disk:
        bank.save(tmp_path / "a.bank")
    for document in documents:
        bank.remove(document.name)
    assert (len(bank), bank.documents, bank.blocks) == (0, [], [])
    if on_disk:
        bank = MemoryBank.open(tmp_path / "a.bank")
        assert len(bank) == 0
    bank.append(model.read([EXTRA]))
    assert_same_bank(bank, model.read([EXTRA]))


def test_an_empty_bank_can_be_saved_and_appended(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    empty = model.read([EXTRA])
    empty.remove(EXTRA.name)
    full = model.read(documents)
    full.save(tmp_path / "full.bank")
    full.append(empty)
    assert_same_bank(MemoryBank.open(tmp_path / "full.bank"), model.read(documents))
    empty.save(tmp_path / "empty.bank")
    opened = MemoryBank.open(tmp_path / "empty.bank")
    opened.append(model.read([EXTRA]))
    assert_same_bank(opened, model.read([EXTRA]))


# Order and names


def test_documents_keep_their_order(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    # Neither alphabetical nor by length.
    given = [documents[1], EXTRA, documents[0]]
    bank = model.read(given)
    bank.save(tmp_path / "a.bank")
    opened = MemoryBank.open(tmp_path / "a.bank")
    assert bank.documents == opened.documents == given
    order = [block.document for block in opened.blocks]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_appended_document_replaces_the_one_of_its_name_and_comes_last(
    on_disk: bool, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents)
    if on_disk:
        bank.save(tmp_path / "a.bank")
    newer = Document("lease.txt", "The flat in Mill Lane 4 is let from 1 June for 950 euros.")
    bank.append(model.read([newer, EXTRA]))
    assert bank.documents == [documents[1], newer, EXTRA]
    cited = model.answer(bank, QUESTIONS[0], k="all", decoding=SHORT).citations
    assert not any("900 euros" in citation.text for citation in cited)
    assert {c.document for c in cited} == {"recipe.txt", "lease.txt", "note.md"}
    for citation in cited:
        text = next(d.text for d in bank.documents if d.name == citation.document)
        assert text[citation.start : citation.end] == citation.text


def test_two_documents_of_one_name_are_refused(model: SeDeM) -> None:
    twins = [Document("a.txt", "one text"), Document("a.txt", "another text")]
    with pytest.raises(DataError, match=r"2 documents are named 'a\.txt'"):
        model.read(twins)


def test_reading_nothing_is_refused(model: SeDeM) -> None:
    with pytest.raises(DataError, match="give at least one document"):
        model.read([])


@pytest.mark.parametrize("on_disk", [False, True])
def test_removing_an_unknown_document_names_it_and_the_known_ones(
    on_disk: bool, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents)
    if on_disk:
        bank.save(tmp_path / "a.bank")
    with pytest.raises(BankError, match=r"no document 'rent\.txt'; it has lease\.txt, recipe\.txt"):
        bank.remove("rent.txt")
    assert bank.documents == documents


def test_an_unknown_document_does_not_list_a_whole_bank() -> None:
    names = [f"{number}.txt" for number in range(1_200)]
    sentence = str(unknown_document("the bank", "x", names))
    assert sentence.endswith("no document 'x'; it has " + ", ".join(names[:10]) + " and 1,190 more")


@pytest.mark.parametrize("kind", ["folder", "file", "bank"])
def test_saving_over_anything_is_refused_and_leaves_it_unchanged(
    kind: str, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    place = tmp_path / "taken"
    if kind == "folder":
        place.mkdir()
    elif kind == "file":
        place.write_text("mine")
    else:
        model.read([EXTRA]).save(place)
    before = bytes_of(place)
    bank = model.read(documents)
    with pytest.raises(BankError, match=r"'.*taken' exists already; choose another name"):
        bank.save(place)
    assert bytes_of(place) == before
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    assert bank.path is None


# Types of slots


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantized_bank_is_smaller_keeps_its_type_and_answers_from_it(
    dtype: str, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    plain = model.read(documents)
    bank = model.read(documents[:1])
    bank.save(tmp_path / "a.bank", dtype=dtype)
    bank.append(model.read(documents[1:]))
    opened = MemoryBank.open(tmp_path / "a.bank")
    assert opened.dtype == bank.dtype == dtype
    assert_same_bank(bank, opened)
    assert contents(opened) == contents(plain)
    exact = all_memory(plain).float()
    assert torch.equal(all_memory(opened), quantize(exact, dtype).dequantize())
    slots = exact.shape[0] * exact.shape[1]
    assert (plain.memory_bytes, opened.memory_bytes) == (slots * 64, slots * 36)
    stored = [opened.stored(range(len(opened))).nbytes]
    assert sum(stored) == opened.memory_bytes
    assert replies(model, opened) == replies(model, plain.cast(dtype))


def test_a_bank_in_ram_keeps_its_type_when_another_is_appended(
    model: SeDeM, documents: list[Document]
) -> None:
    bank = model.read(documents[:1]).cast("int8")
    bank.append(model.read(documents[1:]))
    assert_same_bank(bank, model.read(documents).cast("int8"))
    plain = model.read(documents[:1])
    plain.append(bank)
    assert plain.dtype == "bfloat16"
    assert all_memory(plain).dtype == torch.bfloat16


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


# Memory


def test_memory_comes_in_the_order_of_the_indices_across_appends(
    model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents[:1])
    bank.save(tmp_path / "a.bank")
    bank.append(model.read(documents[1:]))
    last = len(bank) - 1
    everything = all_memory(bank)
    for indices in ([last, 0, 3, last - 1, 0], [2], [], [last, last]):
        assert torch.equal(bank.memory(indices), everything[indices])


def test_a_bank_whose_blocks_and_memory_differ_in_number_is_refused(
    model: SeDeM, documents: list[Document]
) -> None:
    bank = model.read(documents)
    with pytest.raises(
        BankError, match=f"names {len(bank) - 1} blocks but has memory of {len(bank)}"
    ):
        MemoryBank(
            bank.fingerprint,
            bank.made_by,
            bank.documents,
            bank.blocks[:-1],
            bank.stored(range(len(bank))),
        )


@pytest.mark.parametrize("scan", [1, 5, 1000])
def test_scores_do_not_depend_on_how_many_blocks_are_scanned_at_once(
    scan: int, model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = model.read(documents)
    expected = model.scores(bank, QUESTIONS[0])
    monkeypatch.setattr("sedem.bank.blocks.SCAN", scan)
    torch.testing.assert_close(model.scores(bank, QUESTIONS[0]), expected)


# Sizes


def test_a_second_answer_does_not_scan_the_blocks(
    model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = model.read(documents)
    (first,) = model.answer(bank, QUESTIONS[:1], decoding=SHORT)

    def scanned(*_: object) -> None:
        pytest.fail("all blocks were iterated over")

    monkeypatch.setattr(Blocks, "__iter__", scanned, raising=False)
    (again,) = model.answer(bank, QUESTIONS[:1], decoding=SHORT)
    assert (again.context_tokens, again.stored_bytes) == (first.context_tokens, first.stored_bytes)


@pytest.mark.parametrize("on_disk", [False, True])
def test_sizes_follow_appending_removing_and_quantizing(
    on_disk: bool, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    bank = model.read(documents[:1])

    def check(dtype: str = "bfloat16") -> None:
        slots = sum(len(block.slot_tokens) for block in bank.blocks)
        assert bank.tokens == sum(sum(block.slot_tokens) for block in bank.blocks)
        assert bank.memory_bytes == slots * (64 if dtype == "bfloat16" else 36)

    check()
    if on_disk:
        bank.save(tmp_path / "a.bank")
    bank.append(model.read(documents[1:]))
    check()
    bank.append(model.read([Document(documents[1].name, EXTRA.text)]))
    check()
    bank.remove(documents[0].name)
    check()
    bank.save(tmp_path / "b.bank", "int8")
    check("int8")
    bank.remove(documents[1].name)
    check("int8")
    assert bank.tokens == bank.memory_bytes == 0


# Fingerprints


def test_a_bank_of_another_model_is_refused_with_both_fingerprints_and_unchanged(
    model: SeDeM,
    config: SedemConfig,
    backbone: Backbone,
    documents: list[Document],
    tmp_path: Path,
) -> None:
    other = other_shape(config, backbone, extract_layers=(2,))
    bank = model.read(documents)
    bank.save(tmp_path / "a.bank")
    before = bytes_of(tmp_path / "a.bank")
    ours, theirs = model.fingerprint()[:12], other.fingerprint()[:12]
    assert ours != theirs
    both = f"built by model {ours}, this model is {theirs}.*sedem build"
    with pytest.raises(BankMismatchError, match=both):
        other.answer(bank, QUESTIONS[0])
    with pytest.raises(BankMismatchError, match=both):
        other.scores(bank, QUESTIONS[0])
    with pytest.raises(BankMismatchError, match=f"built by model {theirs}, this model is {ours}"):
        bank.append(other.read([EXTRA]))
    assert bytes_of(tmp_path / "a.bank") == before
    assert bank.documents == documents


# Blocks


@pytest.mark.parametrize("segmentation", ["window", "paragraph"])
@pytest.mark.parametrize("block_slots", [4, 2, 8, 3])
def test_the_spans_of_blocks_cover_each_document_in_order(
    block_slots: int,
    segmentation: str,
    config: SedemConfig,
    backbone: Backbone,
    documents: list[Document],
) -> None:
    model = other_shape(config, backbone, block_slots=block_slots, segmentation=segmentation)
    bank = model.read(documents)
    assert all_memory(bank).shape == (len(bank), block_slots, backbone.width)
    assert [b.document for b in bank.blocks] == sorted(b.document for b in bank.blocks)
    for number, document in enumerate(documents):
        own = [block for block in bank.blocks if block.document == number]
        assert all(len(block.slot_tokens) == block_slots for block in own)
        assert all(0 < sum(block.slot_tokens) <= 4 * block_slots for block in own)
        assert all(0 <= b.start < b.end <= len(document.text) for b in own)
        for earlier, later in itertools.pairwise(own):
            assert earlier.start < later.start
            # A character of several bytes may be split between two blocks; it is in both spans.
            assert later.start >= earlier.end - 1
            assert not document.text[earlier.end : later.start].strip()
        assert not document.text[: own[0].start].strip()
        assert not document.text[own[-1].end :].strip()


@pytest.mark.parametrize("block_slots", [4, 2, 8])
def test_tokens_of_a_block_are_the_tokens_of_its_span(
    block_slots: int, config: SedemConfig, backbone: Backbone
) -> None:
    model = other_shape(config, backbone, block_slots=block_slots)
    bank = model.read([Document("lease.txt", LEASE), Document("a.txt", "Short.")])
    # One token a character: the tokenizer knows bytes only and this text is ASCII.
    assert [sum(b.slot_tokens) for b in bank.blocks] == [b.end - b.start for b in bank.blocks]
    assert bank.blocks[-1] == BlockRow(1, 0, 6, (4, 2, 0, 0, 0, 0, 0, 0)[:block_slots])
    assert sum(b.end - b.start for b in bank.blocks if b.document == 0) == len(LEASE)


@pytest.mark.parametrize("block_slots", [2, 8])
def test_the_block_size_does_not_change_the_slots(
    block_slots: int, config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    usual = other_shape(config, backbone).read(documents)
    bank = other_shape(config, backbone, block_slots=block_slots).read(documents)
    for number in range(len(documents)):
        assert torch.equal(real_slots(bank, number), real_slots(usual, number))


def real_slots(bank: MemoryBank, document: int) -> torch.Tensor:
    """The slots of one document without padding, in reading order."""
    indices = [i for i, block in enumerate(bank.blocks) if block.document == document]
    return bank.memory(indices)[bank.slot_tokens(indices) > 0]


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_the_memory_of_a_document_does_not_depend_on_the_others(
    kind: str, config: SedemConfig, backbone: Backbone
) -> None:
    model = other_shape(config, backbone, compressor=kind)
    short = Document("a.txt", "Short.")
    alone = all_memory(model.read([short]))
    beside = all_memory(model.read([Document("lease.txt", LEASE), short]))[-1:]
    torch.testing.assert_close(alone.float(), beside.float(), rtol=2**-7, atol=1e-5)
    assert not alone[:, 2:].any(), "padding slots are zero"


@pytest.mark.parametrize("size", [1, 3, 4, 5, 15, 16, 17, 32, 33, 100])
def test_texts_of_every_length_are_covered_to_their_last_character(
    size: int, model: SeDeM, tmp_path: Path
) -> None:
    text = LEASE[:size]
    bank = model.read([Document("a.txt", text)])
    bank.save(tmp_path / "a.bank")
    opened = MemoryBank.open(tmp_path / "a.bank")
    assert "".join(opened.citation(i, 1, 0.0).text for i in range(len(opened))) == text
    assert len(opened) == -(-size // 16)
    assert int(opened.slot_tokens(range(len(opened))).sum()) == size


@pytest.mark.parametrize(
    "text",
    ["a\0b", "\ufeffmark in front", "line\r\nline", "é" * 40, "🥧" * 9, RECIPE, "\n\n  indented"],
    ids=["nul", "mark", "crlf", "two bytes", "four bytes", "recipe", "indented"],
)
def test_texts_are_read_back_unchanged(text: str, model: SeDeM, tmp_path: Path) -> None:
    bank = model.read([Document("ü / name.txt", text)])
    bank.save(tmp_path / "a.bank")
    assert MemoryBank.open(tmp_path / "a.bank").documents == [Document("ü / name.txt", text)]

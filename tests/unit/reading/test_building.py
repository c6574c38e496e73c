"""Building a bank from a stream of documents."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import RENT, SHORT, build
from conftest import LEASE, POSITIONS, RECIPE

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.bank.care import Damage, Repaired, examine, repair
from sedem.bank.database import connect
from sedem.bank.file import BankFile
from sedem.bank.index import score_words
from sedem.errors import BankMismatchError, DataError
from sedem.method.segments import Segments, segment_text
from sedem.modules import SedemModules
from sedem.reading import building
from sedem.reading.building import batches, build_bank, compress, reading_again, segments_of

TEXTS = {"lease.txt": LEASE, "recipe.md": RECIPE, "note.txt": "The key hangs behind the door."}
DOCUMENTS = [Document(*entry) for entry in TEXTS.items()]


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    return tmp_path / "a.bank"


def names(bank: Path) -> list[str]:
    return [*MemoryBank.open(bank).documents.names]


def test_documents_are_taken_when_the_ones_before_are_committed(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "COMMIT", 1)
    found: list[list[str]] = []

    def stream() -> Iterator[Document]:
        for document in DOCUMENTS:
            found.append(names(bank) if bank.exists() else [])
            yield document

    report = build_bank(model, model.engine, bank, stream())
    assert (report.added, report.replaced, report.unchanged, report.documents) == (3, 0, 0, 3)
    assert found == [[*TEXTS][:count] for count in range(3)]


def test_what_was_taken_before_an_error_is_committed(model: SeDeM, bank: Path) -> None:
    def stream() -> Iterator[Document]:
        yield from DOCUMENTS[:2]
        raise DataError("the third file is damaged")

    with pytest.raises(DataError, match="there is nothing to read"):
        build_bank(model, model.engine, bank, iter(()))
    assert not bank.exists()
    with pytest.raises(DataError, match="the third file"):
        build_bank(model, model.engine, bank, stream())
    assert names(bank) == [*TEXTS][:2]
    with pytest.raises(DataError, match=r"2 documents are named 'note\.txt'"):
        build_bank(model, model.engine, bank, [*DOCUMENTS, DOCUMENTS[2]])
    assert names(bank) == [*TEXTS]


def test_progress_counts_the_sizes_of_all_documents_and_never_decreases(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_bank(model, model.engine, bank, DOCUMENTS[:1])
    monkeypatch.setattr(building, "COMMIT", 1)
    seen: list[int] = []
    sizes = {"lease.txt": 7, "recipe.md": 500, "note.txt": 30}
    build_bank(model, model.engine, bank, DOCUMENTS, seen.append, size=lambda one: sizes[one.name])
    assert seen == sorted(seen)
    assert (seen[0] > 7, seen[-1]) == (True, 537)


def test_a_text_may_exceed_the_positions_of_the_backbone(model: SeDeM) -> None:
    bank = model.read([Document("long.txt", LEASE * 9)])
    answer = model.answer(bank, RENT, decoding=SHORT)
    assert answer.blocks == -(-9 * len(LEASE) // 16) > POSITIONS / 16


@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_memory_of_padding_is_zero(kind: str, config: SedemConfig, backbone: Backbone) -> None:
    """An MLP maps a pooled zero to something else; the bytes of a bank must not show it."""
    model = build(config, backbone, compressor=kind)
    for parameter in model.compressor.parameters():
        torch.nn.init.normal_(parameter)
    # A full segment of 16 tokens and one of 6, whose third and fourth slots are padding.
    segments = segment_text("x" * 22, backbone, 16, "window")
    memory_SMD = compress(model, model.engine, [segments])
    assert memory_SMD.ne(0).any(-1).tolist() == [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The lamps are V-77.", "V-77"),
        ("Ask me at a@b.org. Bye", "a@b.org"),
        ("It was on 9/11/29", "9/11/29"),
    ],
)
def test_a_model_that_quotes_finds_words_that_a_block_cuts(
    text: str, code: str, config: SedemConfig, backbone: Backbone
) -> None:
    banks = [build(config, backbone, spans=on).read([Document("a", text)]) for on in (False, True)]
    plain, quoted = ([text[row.start : row.end] for row in bank.blocks] for bank in banks)
    assert not any(code in one for one in plain) and all(code in one for one in quoted)
    assert bool((score_words(banks[1], code).scores > 0).all())
    assert torch.equal(*(bank.memory(range(len(bank))) for bank in banks))


class Encoded:
    """Notes the ids of every batch that is encoded."""

    def __init__(self, model: SeDeM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[list[int]]] = []
        encode = model.engine.encode

        def noted(ids_BT: torch.Tensor) -> torch.Tensor:
            self.batches.append(ids_BT.tolist())
            return encode(ids_BT)

        monkeypatch.setattr(model.engine, "encode", noted)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads divide a product of few rows into parts that are summed in other orders."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["linear", "mlp", "query"])
def test_segments_of_one_batch_are_compressed_like_each_alone(
    kind: str, config: SedemConfig, backbone: Backbone
) -> None:
    """Bit for bit at the padded length of the batch; see docs/deviations.md for what is not.

    A shorter row sums in another order in attention and in matrix products of few rows. Learned
    queries are compared with the segments of a batch in one matrix product.
    """
    model = build(config, backbone, compressor=kind)
    lengths_S = torch.tensor([16, 16, 13, 7, 4, 3, 1])
    mask_ST = torch.arange(16) < lengths_S[:, None]
    torch.manual_seed(0)
    ids_ST = torch.randint(2, 250, mask_ST.shape) * mask_ST

    def run(rows: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        states_XSTE = model.engine.encode(ids_ST[rows, :length])
        with torch.no_grad():
            hidden_STE = model.mixture(states_XSTE)
            return hidden_STE, model.compressor(hidden_STE, mask_ST[rows, :length])

    hidden_STE, memory_SMD = run(slice(None), 16)
    for row, length in enumerate(lengths_S.tolist()):
        slots = -(-length // 4)
        one = slice(row, row + 1)
        alone_STE, alone_SMD = run(one, 16)
        assert torch.equal(alone_STE[0, :length], hidden_STE[row, :length])
        near = {"rtol": 1e-5, "atol": 1e-5}
        if kind != "query":
            assert torch.equal(alone_SMD[0, :slots], memory_SMD[row, :slots])
        torch.testing.assert_close(alone_SMD[0, :slots], memory_SMD[row, :slots], **near)
        short_STE, short_SMD = run(one, 4 * slots)
        torch.testing.assert_close(short_STE[0, :length], hidden_STE[row, :length], **near)
        torch.testing.assert_close(short_SMD[0, :slots], memory_SMD[row, :slots], **near)


TALES = [LEASE * 2, "x" * 22, "y" * 16, LEASE * 3 + "z", "w" * 3, LEASE]


def test_which_segments_are_together_does_not_depend_on_when_they_come(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document(f"{n}.txt", text) for n, text in enumerate(TALES)]
    parts = [segments_of(model, document) for document in documents]
    ids_ST, lengths_S = (torch.cat([vars(p)[name] for p in parts]) for name in ("ids", "lengths"))
    expected = []
    for batch_B in batches(lengths_S, model.device):
        longest = -(-int(lengths_S[batch_B].max()) // 4) * 4
        expected.append(ids_ST[batch_B, :longest].tolist())
    encoded = Encoded(model, monkeypatch)
    told: list[tuple[int, int]] = []
    one = model.read(documents)
    other = model.read(documents, progress=lambda done, of: told.append((done, of)))
    assert encoded.batches == [*expected, *expected]
    assert told[-1] == (sum(map(len, TALES)),) * 2 and told == sorted(told)
    assert len(told) <= len(expected) > 10
    assert torch.equal(one.memory(range(len(one))), other.memory(range(len(other))))
    assert one.blocks == other.blocks
    # Full segments alone, which leave nothing for the end.
    full = [Document("full.txt", "u" * 16 * 8)]
    encoded.batches.clear()
    assert len(model.read(full)) == 8 and len(encoded.batches) == 1


def test_documents_are_encoded_while_others_are_cut(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second document is held back until a batch of the first has been encoded."""
    encoded, first = Encoded(model, monkeypatch), threading.Event()
    encode = model.engine.encode

    def told(ids_BT: torch.Tensor) -> torch.Tensor:
        first.set()
        return encode(ids_BT)

    def held(model: SedemModules, document: Document) -> Segments:
        assert document.name == "0.txt" or first.wait(10)
        return segments_of(model, document)

    monkeypatch.setattr(model.engine, "encode", told)
    monkeypatch.setattr(building, "segments_of", held)
    bank = model.read([Document("0.txt", LEASE), Document("1.txt", LEASE[::-1])])
    assert len(bank) == 2 * -(-len(LEASE) // 16) and encoded.batches


def test_a_document_that_cannot_be_cut_is_refused_and_ends_the_thread(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: SedemModules, document: Document) -> Segments:
        if document.name == "b.txt":
            raise DataError("the text has no tokens")
        return segments_of(model, document)

    monkeypatch.setattr(building, "segments_of", failing)
    before = threading.active_count()
    with pytest.raises(DataError, match="no tokens"):
        model.read([Document(f"{name}.txt", LEASE) for name in "abc"])
    assert threading.active_count() == before


def test_an_error_drops_documents_that_have_not_been_cut(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[str] = []
    go_on = threading.Event()

    def held(model: SedemModules, document: Document) -> Segments:
        cut.append(document.name)
        assert document.name == "a.txt" or go_on.wait(10)
        return segments_of(model, document)

    def failing(ids_BT: torch.Tensor) -> torch.Tensor:
        threading.Timer(0.05, go_on.set).start()
        raise ZeroDivisionError

    monkeypatch.setattr(building, "segments_of", held)
    monkeypatch.setattr(model.engine, "encode", failing)
    with pytest.raises(ZeroDivisionError):
        model.read([Document(f"{name}.txt", LEASE) for name in "abc"])
    assert cut[0] == "a.txt" and "c.txt" not in cut


LONG = Document("long.txt", "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()]))
BRIEF = Document("short.txt", "The key hangs behind the door.", (0, 8))


@pytest.fixture
def damaged(model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BankFile:
    """A short document and a long one, whose blocks are all damaged."""
    monkeypatch.setattr(building, "COMMIT", 100)
    monkeypatch.setattr(building, "PART", 64)
    path = tmp_path / "a.bank"
    build_bank(model, model.engine, path, [BRIEF, LONG])
    gc.collect()  # so that no connection is open
    with closing(connect(path)) as connection:
        size = connection.pragma("page_size")
        pages = connection.execute(
            "SELECT pageno FROM dbstat WHERE name = 'blocks' AND pagetype <> 'internal'"
        ).fetchall()
    content = bytearray(path.read_bytes())
    for (page,) in pages:
        content[page * size - 20] ^= 1
    path.write_bytes(content)
    return BankFile(path)


def repaired(model: SeDeM, damaged: BankFile, **options: Any) -> Repaired:
    given: dict[str, Any] = {"sources": [], **options}
    return repair(damaged, reading_again(lambda _: (model, model.engine), **given))


def test_documents_are_read_again_and_are_as_before(
    model: SeDeM, damaged: BankFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    real = building.compress

    def counted(model: Any, engine: Any, parts: Any, *rest: Any) -> Any:
        if isinstance(parts, list):  # short documents come as a stream
            together.append(sum(map(len, parts)))
        return real(model, engine, parts, *rest)

    monkeypatch.setattr(building, "compress", counted)
    seen: list[tuple[int, int]] = []
    texts = {one.name: one.text for one in (BRIEF, LONG)}
    done = repaired(model, damaged, progress=lambda *now: seen.append(now))
    assert (done.read_again, done.dropped) == (["short.txt", "long.txt"], [])
    assert len(together) > 4 and max(together) == building.part_segments(model.config)
    assert seen == sorted(seen) and seen[-1] == (sum(map(len, texts.values())),) * 2
    fresh = damaged.path.with_name("fresh.bank") if damaged.path else None
    assert fresh is not None
    build_bank(model, model.engine, fresh, [BRIEF, LONG])
    wanted, found = MemoryBank.open(fresh), MemoryBank.open_from(damaged)
    assert found.documents == wanted.documents and found.blocks == wanted.blocks
    every = range(len(wanted))
    assert torch.equal(found.memory(every), wanted.memory(every))
    assert examine(damaged) == Damage([], [])


def test_a_source_has_to_have_the_text_that_was_read(model: SeDeM, damaged: BankFile) -> None:
    others = [Document("short.txt", "another text"), Document("other.txt", LONG.text), LONG]
    done = repaired(model, damaged, sources=others)
    assert done.read_again == ["short.txt", "long.txt"]


def test_another_model_reads_nothing(
    model: SeDeM, damaged: BankFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert damaged.path is not None
    before = damaged.path.read_bytes()
    monkeypatch.setattr(type(model), "fingerprint", lambda _: "f" * 64)
    with pytest.raises(BankMismatchError):
        repaired(model, damaged, sources=[BRIEF, LONG])
    assert [path.name for path in damaged.path.parent.iterdir()] == ["a.bank"]
    assert len(damaged.path.read_bytes()) == len(before)

"""Damaged documents of a bank are read again, the long ones in parts."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.care import Damage, Repaired, examine, repair
from sedem.bank.database import connect
from sedem.bank.file import BankFile
from sedem.errors import BankMismatchError
from sedem.reading import building
from sedem.reading.building import build_bank
from sedem.reading.repair import reading_again

LONG = Document("long.txt", "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()]))
SHORT = Document("short.txt", "The key hangs behind the door.", (0, 8))


@pytest.fixture
def bank(model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BankFile:
    """A short document and a long one, whose blocks are all damaged."""
    monkeypatch.setattr(building, "COMMIT", 100)
    monkeypatch.setattr(building, "PART", 64)
    path = tmp_path / "a.bank"
    build_bank(model, model.engine, path, [SHORT, LONG])
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


def repaired(model: SeDeM, bank: BankFile, **options: Any) -> Repaired:
    given: dict[str, Any] = {"sources": [], **options}
    return repair(bank, reading_again(lambda _: (model, model.engine), **given))


def test_documents_are_read_again_and_are_as_before(
    model: SeDeM, bank: BankFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    real = building.compress

    def counted(model: Any, engine: Any, parts: Any, *rest: Any) -> Any:
        together.append(sum(map(len, parts)))
        return real(model, engine, parts, *rest)

    monkeypatch.setattr(building, "compress", counted)
    seen: list[tuple[int, int]] = []
    texts = {one.name: one.text for one in (SHORT, LONG)}
    done = repaired(model, bank, progress=lambda *now: seen.append(now))
    assert (done.read_again, done.dropped) == (["short.txt", "long.txt"], [])
    assert len(together) > 4 and max(together) == building.part_segments(model.config)
    assert seen == sorted(seen) and seen[-1] == (sum(map(len, texts.values())),) * 2
    fresh = bank.path.with_name("fresh.bank") if bank.path else None
    assert fresh is not None
    build_bank(model, model.engine, fresh, [SHORT, LONG])
    wanted, found = MemoryBank.open(fresh), MemoryBank.open_from(bank)
    assert found.documents == wanted.documents and found.blocks == wanted.blocks
    every = range(len(wanted))
    assert torch.equal(found.memory(every), wanted.memory(every))
    assert examine(bank) == Damage([], [])


def test_a_source_has_to_have_the_text_that_was_read(model: SeDeM, bank: BankFile) -> None:
    others = [Document("short.txt", "another text"), Document("other.txt", LONG.text), LONG]
    done = repaired(model, bank, sources=others)
    assert done.read_again == ["short.txt", "long.txt"]


def test_another_model_reads_nothing(
    model: SeDeM, bank: BankFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bank.path is not None
    damaged = bank.path.read_bytes()
    monkeypatch.setattr(type(model), "fingerprint", lambda _: "f" * 64)
    with pytest.raises(BankMismatchError):
        repaired(model, bank, sources=[SHORT, LONG])
    assert [path.name for path in bank.path.parent.iterdir()] == ["a.bank"]
    assert len(bank.path.read_bytes()) == len(damaged)

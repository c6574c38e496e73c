"""Damaged documents of a bank are read again, the long ones in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.store.local import LocalStore
from sedem.bank.store.repair import examine
from sedem.errors import BankMismatchError
from sedem.inference import build, read_parts, repair
from sedem.inference.build import build_bank

LONG = Document("long.txt", "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()]))
SHORT = Document("short.txt", "The key hangs behind the door.")


@pytest.fixture
def bank(model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short document and a long one in several shards, each of which has lost its last byte."""
    monkeypatch.setattr(build, "COMMIT", 100)
    monkeypatch.setattr(read_parts, "PART", 64)
    folder = tmp_path / "a.bank"
    build_bank(model, model.engine, folder, [SHORT, LONG])
    for shard in (folder / "shards").iterdir():
        shard.write_bytes(shard.read_bytes()[:-1])
    return folder


def read_again(model: SeDeM, bank: Path, progress: Any = None) -> repair.Report:
    problems = examine(bank).problems
    lost = repair.texts_at_hand(bank, [])
    repair.read_again(model, model.engine, bank, lost, progress)
    return repair.finish(bank, problems, lost)


def assert_as_built(model: SeDeM, bank: Path) -> None:
    fresh = bank.with_name("fresh.bank")
    build_bank(model, model.engine, fresh, [SHORT, LONG])
    wanted, found = MemoryBank.open(fresh), MemoryBank.open(bank)
    assert LocalStore(bank).verify() == []
    assert found.documents == wanted.documents
    assert list(found.blocks) == list(wanted.blocks)
    every = range(len(wanted))
    assert torch.equal(found.memory(every), wanted.memory(every))


def test_a_long_document_is_read_again_in_parts(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    real = read_parts.compress

    def counted(model: Any, engine: Any, parts: Any, *rest: Any) -> Any:
        together.append(sum(map(len, parts)))
        return real(model, engine, parts, *rest)

    monkeypatch.setattr(read_parts, "compress", counted)
    seen: list[tuple[int, int]] = []
    report = read_again(model, bank, lambda done, of: seen.append((done, of)))
    assert (report.read_again, report.dropped) == (["short.txt", "long.txt"], [])
    assert len(together) > 4
    assert max(together) == read_parts.part_segments(model.config)
    assert seen == sorted(seen)
    characters = len(SHORT.text) + len(LONG.text)
    assert seen[-1] == (characters, characters)
    assert_as_built(model, bank)


def test_a_repair_that_was_stopped_goes_on_with_the_next_part(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        pass

    real, commits = read_parts.append_part, []

    def stopped(*arguments: Any, **options: Any) -> None:
        if len(commits) == 3:
            commits.append(0)
            raise Stop
        real(*arguments, **options)
        commits.append(options["before"])

    monkeypatch.setattr(read_parts, "append_part", stopped)
    with pytest.raises(Stop):
        read_again(model, bank)
    assert [*LocalStore(bank).digests()] == ["long.txt", "short.txt"]
    report = read_again(model, bank)
    assert (report.read_again, report.dropped) == (["long.txt"], [])
    assert commits.count(0) == 2, "the first part is appended once; the stop is the other zero"
    assert_as_built(model, bank)


def test_another_model_reads_nothing(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = repair.texts_at_hand(bank, [])
    monkeypatch.setattr(type(model), "fingerprint", lambda _: "f" * 64)
    monkeypatch.delattr(read_parts, "compress")
    with pytest.raises(BankMismatchError):
        repair.read_again(model, model.engine, bank, lost)

"""What a bank writes is private to its owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored_banks import META, append

from sedem.bank.copies import backup, export_bank, split
from sedem.bank.database import connect
from sedem.bank.file import BankFile
from sedem.bank.parts import store_at


@pytest.fixture(autouse=True)
def open_mask() -> Iterator[None]:
    """A mask that gives files to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_banks_logs_exports_and_parts_are_private(tmp_path: Path) -> None:
    path = tmp_path / "a.bank"
    with BankFile(path).creating(META) as file:
        append(file, 1, 2)
    append(BankFile(path), 3)
    reader = connect(path)
    reader.execute("SELECT * FROM bank").fetchall()
    append(BankFile(path), 4)
    assert path.with_name("a.bank-wal").exists()
    backup(path, tmp_path / "b.bank")
    export_bank(path, tmp_path / "c.bank")
    split(path, tmp_path / "parts", 2)
    store_at(tmp_path / "parts").remove("1.txt")
    reader.close()
    files = [one for one in tmp_path.rglob("*") if one.is_file() and one.suffix != ".lock"]
    assert len(files) >= 6
    assert {mode(one) for one in files} == {0o600}
    # A bank that its owner shares stays shared.
    path.chmod(0o644)
    append(BankFile(path), 2, version=1)
    BankFile(path).remove("1.txt")
    assert mode(path) == 0o644

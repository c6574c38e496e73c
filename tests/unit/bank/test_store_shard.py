"""Rows that were compared once are compared again if their file is another one by then."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from unit.bank.test_store import flip, make_bank, memory_of, rounded, shard_file

from sedem import MemoryBank
from sedem.bank.store import shard
from sedem.bank.store.shard import Check, Shard
from sedem.errors import BankError

pytestmark = pytest.mark.usefixtures("mapped_and_read")


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """Two documents in two shards."""
    return make_bank(tmp_path / "a.bank", 2)


def opened_with_one_map(bank: Path, check: Check = "once") -> MemoryBank:
    """Open a bank that maps one shard at a time, and use a row of each, the first one first."""
    opened = MemoryBank.open(bank, check=check)
    assert all(isinstance(piece, Shard) for piece in opened.pieces)
    opened.pieces[0].maps.limit = 1  # type: ignore[attr-defined]
    for number, row in ((0, 0), (1, 2)):
        assert torch.equal(opened.memory([row]), memory_of(number)[:1])
    return opened


def exchange(path: Path, content: bytes) -> None:
    """Put another file in the place of one; it has another inode, and the same name and times."""
    other = path.with_name("other")
    other.write_bytes(content)
    shutil.copystat(path, other)
    os.replace(other, path)


def damaged(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[-memory_of(0).nbytes] ^= 0x10  # the first value of row 0
    return bytes(content)


def overwrite(path: Path, content: bytes) -> None:
    """Write into a file; its inode and its time of change stay the same."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("check", ["once", "always"])
@pytest.mark.parametrize("change", [exchange, overwrite])
def test_a_row_is_compared_anew_when_its_file_is_another_one(
    change: Callable[[Path, bytes], None], check: Check, bank: Path
) -> None:
    path = shard_file(bank)
    sound, spoilt = path.read_bytes(), damaged(path)
    opened = opened_with_one_map(bank, check)
    for _ in range(2):
        change(path, spoilt)
        with pytest.raises(BankError, match=r"block 0 of '.*000001\.safetensors' is damaged"):
            opened.memory([0])
        assert torch.equal(opened.memory([2]), memory_of(1)[:1])
        change(path, sound)
        assert torch.equal(opened.memory([0, 1]), memory_of(0))
        assert torch.equal(opened.memory([2]), memory_of(1)[:1])


def test_a_row_is_compared_once_while_its_file_is_the_same(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = opened_with_one_map(bank)
    compared = []
    real = shard.checksum
    monkeypatch.setattr(shard, "checksum", lambda row: compared.append(1) or real(row))
    opened.memory([0])
    opened.memory([2])
    assert not compared
    opened.memory([0, 1])
    assert len(compared) == 1


def test_who_has_a_file_open_keeps_it_until_the_bank_is_opened_again(bank: Path) -> None:
    path = shard_file(bank)
    sound, spoilt = path.read_bytes(), damaged(path)
    opened = MemoryBank.open(bank)
    opened.memory([0])
    exchange(path, spoilt)
    assert torch.equal(opened.memory([0, 1]), memory_of(0))
    opened.reload()
    with pytest.raises(BankError, match="is damaged"):
        opened.memory([0])
    exchange(path, sound)
    opened.reload()
    assert torch.equal(opened.memory([0, 1]), memory_of(0))


def test_another_bank_in_the_same_folder_is_read_after_reloading(bank: Path) -> None:
    opened = MemoryBank.open(bank)
    before = opened.snapshot()
    opened.memory([0, 2])
    shutil.rmtree(bank)
    make_bank(bank, 1, "int8")
    opened.reload()
    assert torch.equal(opened.memory([0, 1]), rounded(opened, memory_of(0)))
    assert torch.equal(before.memory([0, 1, 2]), torch.cat([memory_of(0), memory_of(1)[:1]]))


def test_a_file_that_is_exchanged_while_it_is_opened_leaves_nothing_compared(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard_file(bank)
    spoilt = damaged(path)
    opened = opened_with_one_map(bank)
    real = shard.open_tensors

    def exchanged_before(file: Path) -> object:
        exchange(path, spoilt)
        return real(file)

    with monkeypatch.context() as patched:
        patched.setattr(shard, "open_tensors", exchanged_before)
        with pytest.raises(BankError, match=r"block 0 .* is damaged"):
            opened.memory([0])


def test_a_file_that_is_read_while_others_write_into_it_is_compared_anew(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEDEM_READ", "1")
    opened = MemoryBank.open(bank)
    assert torch.equal(opened.memory([0, 1]), memory_of(0))
    flip(shard_file(bank), -1)
    assert torch.equal(opened.memory([0]), memory_of(0)[:1])
    with pytest.raises(BankError, match=r"block 1 .* is damaged"):
        opened.memory([1])
    flip(shard_file(bank), -1)
    assert torch.equal(opened.memory([0, 1]), memory_of(0))

"""A bank on disk survives a crash at any step, detects damage, and lets one process write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import multiprocessing
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sedem import Document, MemoryBank, durable_files
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.store import catalog, catalog_rows, local, shard
from sedem.bank.store.checksums import row_checksum
from sedem.bank.store.interface import Contents, Meta
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError, BankMismatchError
from sedem.quantization import Quantized, quantize

PRINT = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
WIDTH, SLOTS = 8, 4
META = Meta(PRINT, {"width": WIDTH})
NOBODY = 65534

# Banks made without a model


def text_of(number: int) -> str:
    return f"document {number} says {number * 7919}"


def memory_of(number: int, blocks: int = 2) -> Tensor:
    """Random memory, different for each document."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(blocks, SLOTS, WIDTH, generator=generator).to(torch.bfloat16)


def rows_of(number: int, document: int = 0) -> list[BlockRow]:
    half, whole = 9, len(text_of(number))
    return [
        BlockRow(document, 0, half, (4, 4, 1, 0)),
        BlockRow(document, half, whole, (4, 4, 4, 4)),
    ]


def append(bank: Path | LocalStore, number: int, name: str | None = None) -> None:
    """Append document `number` in one commit."""
    store = bank if isinstance(bank, LocalStore) else LocalStore(bank)
    named = [Document(name or f"doc-{number}", text_of(number))]
    store.append(PRINT, named, Blocks.of(rows_of(number)), Quantized(memory_of(number)))


def make_bank(folder: Path, documents: int = 1, dtype: str = "bfloat16") -> Path:
    """Make a bank of documents 0, 1, ..., each appended in a commit of its own."""
    with LocalStore(folder).creating(Meta(PRINT, {"width": WIDTH}, dtype)) as unfinished:
        for number in range(documents):
            append(unfinished, number)
    return folder


def contents(bank: Path) -> Contents:
    return LocalStore(bank).open()


def problems(bank: Path) -> list[str]:
    return LocalStore(bank).verify()


def assert_holds(folder: Path, numbers: list[int]) -> None:
    """Assert that the bank verifies and holds exactly these documents and their memory."""
    assert LocalStore(folder).verify() == []
    bank = MemoryBank.open(folder)
    assert [(d.name, d.text) for d in bank.documents] == [
        (f"doc-{number}", text_of(number)) for number in numbers
    ]
    assert list(bank.blocks) == [
        row for index, number in enumerate(numbers) for row in rows_of(number, index)
    ]
    expected = [memory_of(number) for number in numbers] or [torch.zeros(0, SLOTS, WIDTH)]
    assert torch.equal(bank.memory(range(len(bank))).float(), rounded(bank, *expected).float())


def rounded(bank: MemoryBank, *memory_NJD: Tensor) -> Tensor:
    """Memory as a bank of that type returns it."""
    return quantize(torch.cat(memory_NJD), bank.dtype).dequantize()


def numbers_in(folder: Path) -> list[int]:
    return [int(d.name.removeprefix("doc-")) for d in MemoryBank.open(folder).documents]


def shard_file(folder: Path, number: int = 1) -> Path:
    return folder / shard.SHARDS / f"{number:06d}.safetensors"


@pytest.fixture(params=["bfloat16", "int8"])
def bank(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A bank of two documents in two shards, once without scales and once with them."""
    return make_bank(tmp_path / "two.bank", 2, request.param)


# A crash at every step of a commit


class Crash(BaseException):
    """The library must not catch it."""


def crash() -> None:
    raise Crash


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashBeforeCommit(sqlite3.Connection):
    """Ends before a transaction is committed."""

    end: Callable[[], None] = staticmethod(crash)

    def __exit__(self, *reason: Any) -> Any:
        type(self).end()
        return super().__exit__(*reason)


class CrashWithinTransaction(CrashBeforeCommit):
    """Ends after documents have been added and before their texts are."""

    def __exit__(self, *reason: Any) -> Any:
        return super(CrashBeforeCommit, self).__exit__(*reason)

    def executemany(self, statement: str, rows: Any) -> Any:
        if "INTO texts" in statement:
            type(self).end()
        return super().executemany(statement, rows)


class CrashAfterCommit(CrashBeforeCommit):
    """Ends after a transaction has been committed."""

    def __exit__(self, *reason: Any) -> Any:
        super(CrashBeforeCommit, self).__exit__(*reason)
        type(self).end()


Change = Callable[[object, str, object], None]


def end_at(step: str, end: Callable[[], None], change: Change) -> None:
    """Make one step of the commit protocol end the process.

    Args:
        step: its name, after "before: ", "half of: " or "after: ".
        end: raises an error or kills the process.
        change: `monkeypatch.setattr`; `setattr` in a process that ends anyway.
    """
    when, _, what = step.partition(": ")

    def wrapped(real: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
        calls = 0

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and when == "before":
                end()
            result = real(*arguments, **options)
            if calls == at:
                end()
            return result

        return call

    def half_written(tensors: dict[str, Tensor], path: Path, *about: Any) -> None:
        store_save(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        end()

    store_save = shard.save_tensors
    if step == "half of: the shard's bytes":
        change(shard, "save_tensors", half_written)
    elif what == "the shard's bytes":
        change(shard, "save_tensors", wrapped(shard.save_tensors))
    elif what == "syncing the shard":
        change(durable_files.os, "fsync", wrapped(os.fsync))
    elif what == "naming the shard":
        change(durable_files.Path, "replace", wrapped(Path.replace))
    elif what == "syncing the folder":
        change(durable_files.os, "fsync", wrapped(os.fsync, at=2))
    else:
        kind = {
            "before": CrashBeforeCommit,
            "half of": CrashWithinTransaction,
            "after": CrashAfterCommit,
        }[when]
        kind.end = staticmethod(end)
        change(catalog.sqlite3, "connect", functools.partial(sqlite3.connect, factory=kind))


STEPS = (
    "before: the shard's bytes",
    "half of: the shard's bytes",
    "after: the shard's bytes",
    "before: syncing the shard",
    "after: syncing the shard",
    "before: naming the shard",
    "after: naming the shard",
    "before: syncing the folder",
    "after: syncing the folder",
    "half of: the transaction",
    "before: the commit",
    "after: the commit",
)


@pytest.mark.parametrize("step", STEPS)
def test_an_error_at_any_step_of_an_append_leaves_all_or_nothing(
    step: str, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        end_at(step, crash, broken.setattr)
        with pytest.raises(Crash):
            append(bank, 2)
    survived = [0, 1, 2] if step == "after: the commit" else [0, 1]
    assert_holds(bank, survived)
    append(bank, 3)
    assert_holds(bank, [*survived, 3])


def append_and_get_killed(folder: Path, step: str) -> None:
    end_at(step, kill_this_process, setattr)
    append(folder, 2)


@pytest.fixture(scope="session")
def children() -> Any:
    """Starts processes by forking one that has only imported the store."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sedem.bank.store.local", "sedem.bank.memory_bank", "pytest"])
    return context


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_of_an_append_leaves_all_or_nothing(
    step: str, bank: Path, children: Any
) -> None:
    child = children.Process(target=append_and_get_killed, args=(bank, step))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    survived = [0, 1, 2] if step == "after: the commit" else [0, 1]
    assert_holds(bank, survived)
    append(bank, 3)
    assert_holds(bank, [*survived, 3])


def append_forever(folder: Path, acknowledged: Path, first: int) -> None:
    with acknowledged.open("a", buffering=1) as file:
        for number in range(first, 1_000_000):
            append(folder, number)
            file.write(f"{number}\n")


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_during_appends_loses_no_acknowledged_document(
    seed: int, tmp_path: Path, children: Any
) -> None:
    folder = make_bank(tmp_path / "a.bank")
    acknowledged = tmp_path / "acknowledged"
    acknowledged.write_text("0\n")
    for round_number in range(5):
        before = numbers_in(folder)
        child = children.Process(target=append_forever, args=(folder, acknowledged, len(before)))
        child.start()
        deadline = time.monotonic() + 30
        while len(acknowledged.read_text().split()) <= len(before) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep((seed * 5 + round_number) * 0.0031)
        child.kill()
        child.join()
        promised = len(acknowledged.read_text().split())
        found = numbers_in(folder)
        assert promised > len(before), "the child appended nothing"
        assert found in (list(range(promised)), list(range(promised + 1)))
        assert_holds(folder, found)
        append(folder, len(found))
        acknowledged.write_text("".join(f"{n}\n" for n in range(len(found) + 1)))


def test_a_reader_keeps_its_blocks_while_another_process_removes_and_appends(bank: Path) -> None:
    reader = MemoryBank.open(bank)
    LocalStore(bank).remove("doc-0")
    append(bank, 2)
    assert torch.equal(reader.memory([0, 1]), rounded(reader, memory_of(0)))
    assert numbers_in(bank) == [1, 2]


def test_a_commit_syncs_the_shard_renames_it_and_only_then_runs_the_transaction(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may undo whatever was not synced, so the order matters."""
    happened: list[str] = []
    real_fsync, real_replace, real_save = os.fsync, Path.replace, shard.save_tensors

    def fsync(descriptor: int) -> None:
        happened.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        happened.append(f"rename {self.name} {target.name}")
        return real_replace(self, target)

    def save(tensors: dict[str, Tensor], path: Path, *about: Any) -> None:
        happened.append(f"write {path.name}")
        real_save(tensors, path)

    class Recording(sqlite3.Connection):
        def __exit__(self, *reason: Any) -> Any:
            happened.append("commit")
            return super().__exit__(*reason)

    monkeypatch.setattr(durable_files.os, "fsync", fsync)
    monkeypatch.setattr(durable_files.Path, "replace", replace)
    monkeypatch.setattr(shard, "save_tensors", save)
    monkeypatch.setattr(
        catalog.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Recording)
    )
    append(bank, 2)
    assert happened == [
        "write .000003.safetensors.partial",
        "sync .000003.safetensors.partial",
        "rename .000003.safetensors.partial 000003.safetensors",
        "sync shards",
        "commit",
    ]


def test_the_catalog_syncs_every_commit(bank: Path) -> None:
    with catalog.connect(bank) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
    assert (mode, synchronous) == ("wal", 2), "FULL is 2"


@pytest.mark.parametrize("step", ["before: the commit", "after: the commit"])
def test_an_error_in_a_removal_leaves_all_or_nothing(
    step: str, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        end_at(step, crash, broken.setattr)
        with pytest.raises(Crash):
            LocalStore(bank).remove("doc-0")
    assert_holds(bank, [1] if step.startswith("after") else [0, 1])


def test_a_crash_while_replacing_keeps_the_older_document(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        end_at("before: the commit", crash, broken.setattr)
        with pytest.raises(Crash):
            append(bank, 5, name="doc-0")
    assert_holds(bank, [0, 1])


class FullDisk(sqlite3.Connection):
    """Has no space for texts."""

    def executemany(self, statement: str, rows: Any) -> Any:
        if "INTO texts" in statement:
            raise sqlite3.OperationalError("database or disk is full")
        return super().executemany(statement, rows)


@pytest.mark.parametrize("full", ["save_tensors", "fsync", "connect"])
def test_a_full_disk_is_one_sentence_and_changes_nothing(
    full: str, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        place = {"fsync": durable_files.os, "save_tensors": shard, "connect": catalog.sqlite3}[full]
        connect = functools.partial(sqlite3.connect, factory=FullDisk)
        broken.setattr(place, full, connect if full == "connect" else no_space)
        with pytest.raises(BankError, match=r"two\.bank.*(No space left on device|disk is full)"):
            append(bank, 2)
    assert_holds(bank, [0, 1])
    append(bank, 2)
    assert_holds(bank, [0, 1, 2])


# New banks


def test_a_bank_that_could_not_be_finished_never_appears_under_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "new.bank"
    with (
        pytest.raises(Crash),
        LocalStore(folder).creating(META) as unfinished,
    ):
        append(unfinished, 0)
        crash()
    assert not folder.exists()
    with pytest.raises(BankError, match=r"there is no bank '.*new\.bank'; make one with 'sedem b"):
        LocalStore(folder).open()
    make_bank(folder, documents=2)
    assert_holds(folder, [0, 1])
    assert [p.name for p in tmp_path.iterdir()] == ["new.bank"]


@pytest.mark.parametrize("step", [step for step in STEPS if step != "after: the commit"])
def test_a_crash_in_the_first_commit_of_a_new_bank_leaves_no_bank(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new.bank"
    with monkeypatch.context() as broken:
        end_at(step, crash, broken.setattr)
        with pytest.raises(Crash):
            make_bank(folder)
    assert not folder.exists()
    make_bank(folder)
    assert_holds(folder, [0])


def test_a_crash_before_the_last_rename_leaves_no_bank_and_after_it_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = tmp_path / "new.bank", Path.rename

    def before(self: Path, target: Path) -> None:
        crash()

    def after(self: Path, target: Path) -> None:
        real(self, target)
        crash()

    for rename, numbers in ((before, None), (after, [0])):
        with monkeypatch.context() as broken:
            broken.setattr(local.Path, "rename", rename)
            with pytest.raises(Crash):
                make_bank(folder)
        assert folder.exists() == (numbers is not None)
    assert_holds(folder, [0])


def test_two_processes_cannot_make_the_same_bank_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new.bank"
    with LocalStore(folder).creating(META) as unfinished:
        append(unfinished, 0)
        with (
            pytest.raises(BankError, match=r"new\.bank' is being written by another process"),
            LocalStore(folder).creating(META),
        ):
            pytest.fail("the second one was let in")
        append(unfinished, 1)
    assert_holds(folder, [0, 1])


# Damage


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.usefixtures("mapped_and_read")
def test_a_flipped_byte_is_caught_when_its_block_is_first_used(bank: Path) -> None:
    flip(shard_file(bank, 2), -1)
    opened = MemoryBank.open(bank)
    assert torch.equal(opened.memory([0, 1, 2]), rounded(opened, memory_of(0), memory_of(1)[:1]))
    for _ in range(2):
        with pytest.raises(BankError, match=r"block 1 of '.*000002\.safetensors' is damaged"):
            opened.memory([3])
    with pytest.raises(BankError, match="is damaged"):
        list(opened.scan())
    assert LocalStore(bank).verify() == [
        "shard '000002.safetensors' is damaged (its SHA-256 differs); it affects 'doc-1'"
    ]


def test_a_flipped_byte_anywhere_in_a_shard_is_detected(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank")
    intact = shard_file(bank).read_bytes()
    for offset in range(len(intact)):
        flip(shard_file(bank), offset)
        assert len(LocalStore(bank).verify()) == 1, f"byte {offset}"
        with pytest.raises(BankError, match="damaged"):
            MemoryBank.open(bank).memory([0, 1])
        shard_file(bank).write_bytes(intact)
    assert_holds(bank, [0])


@pytest.mark.parametrize("kept", [0, 1, 8, 100, 207])
def test_a_truncated_shard_is_refused_with_both_sizes(kept: int, bank: Path) -> None:
    size = shard_file(bank, 2).stat().st_size
    assert kept < size
    os.truncate(shard_file(bank, 2), kept)
    with pytest.raises(
        BankError, match=rf"000002\.safetensors' has {kept} bytes, {size} are needed; restore"
    ):
        MemoryBank.open(bank)
    assert LocalStore(bank).verify() == [
        "shard '000002.safetensors' is damaged (its SHA-256 differs); it affects 'doc-1'"
    ]


@pytest.mark.usefixtures("mapped_and_read")
def test_a_shard_truncated_or_deleted_after_opening_is_an_error(bank: Path) -> None:
    opened = MemoryBank.open(bank)
    os.truncate(shard_file(bank, 1), 50)
    shard_file(bank, 2).unlink()
    with pytest.raises(BankError, match=r"000001\.safetensors' has 50 bytes, \d+ are needed"):
        opened.memory([0])
    with pytest.raises(BankError, match=r"000002\.safetensors' is missing"):
        opened.memory([2])


def test_a_missing_shard_is_refused_by_name(bank: Path) -> None:
    shard_file(bank, 1).unlink()
    with pytest.raises(BankError, match=r"shard '.*000001\.safetensors' is missing; restore it"):
        MemoryBank.open(bank)
    assert LocalStore(bank).verify() == [
        "shard '000001.safetensors' is missing; it affects 'doc-0'"
    ]


def test_verify_lists_every_defect(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", documents=3)
    flip(shard_file(bank, 1), -1)
    shard_file(bank, 3).unlink()
    assert LocalStore(bank).verify() == [
        "shard '000001.safetensors' is damaged (its SHA-256 differs); it affects 'doc-0'",
        "shard '000003.safetensors' is missing; it affects 'doc-2'",
    ]


@pytest.mark.parametrize("kept", [0, 10, 100, 1000, 4096, -4096])
def test_a_truncated_catalog_is_refused(kept: int, bank: Path) -> None:
    path = bank / catalog.CATALOG
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    with pytest.raises(BankError, match=r"the catalog of bank '.*two\.bank' cannot be used"):
        MemoryBank.open(bank)
    with pytest.raises(BankError, match="cannot be used"):
        append(bank, 2)


@pytest.mark.parametrize("content", [b"no database", b"\0" * 8192, b"SQLite format 3\0" * 99])
def test_a_catalog_that_is_not_a_database_is_refused(content: bytes, bank: Path) -> None:
    (bank / catalog.CATALOG).write_bytes(content)
    for attempt in (contents, problems, functools.partial(append, number=2)):
        with pytest.raises(BankError, match=r"the catalog of bank '.*two\.bank' cannot be used"):
            attempt(bank)
    assert (bank / catalog.CATALOG).read_bytes() == content


def overwrite_page(bank: Path, page: int) -> None:
    content = bytearray((bank / catalog.CATALOG).read_bytes())
    content[page * 4096 : (page + 1) * 4096] = b"\xa5" * 4096
    (bank / catalog.CATALOG).write_bytes(content)


@pytest.mark.parametrize("page", range(1, 6))
def test_an_overwritten_page_of_the_catalog_is_detected(page: int, bank: Path) -> None:
    overwrite_page(bank, page)
    with contextlib.suppress(BankError):
        MemoryBank.open(bank)
    try:
        problems = LocalStore(bank).verify()
    except BankError:
        return
    assert any("the catalog is damaged" in problem for problem in problems)


@pytest.mark.parametrize("entry", ["fingerprint", "made_by", "schema_version"])
def test_a_catalog_without_one_of_its_entries_is_refused(entry: str, bank: Path) -> None:
    execute(bank, "DELETE FROM meta WHERE key = ?", entry)
    with pytest.raises(BankError, match=r"two\.bank"):
        MemoryBank.open(bank)


def execute(bank: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(bank / catalog.CATALOG)) as connection, connection:
        connection.execute(statement, values)


def set_entry(bank: Path, key: str, value: str | bytes) -> None:
    """Change an entry of a catalog as its own sedem would, with a right checksum."""
    row = (value, row_checksum(key, value), key)
    execute(bank, "UPDATE meta SET value = ?, crc32 = ? WHERE key = ?", *row)


@pytest.mark.parametrize(
    "made_by",
    ["", "{", "null", "3", "[]", '"text"', "{}", '{"width": "8"}', '{"width": 0}', b"\xff"],
    ids=str,
)
def test_a_catalog_whose_made_by_is_malformed_is_refused(made_by: str | bytes, bank: Path) -> None:
    set_entry(bank, "made_by", made_by)
    for attempt in (contents, functools.partial(append, number=2)):
        with pytest.raises(
            BankError, match=r"the catalog of bank '.*two\.bank' is damaged: its made_by (is|has)"
        ) as refused:
            attempt(bank)
        assert "\n" not in str(refused.value)
    assert "its made_by" in problems(bank)[0]


COLUMNS = {
    "meta": ("key", "value", "crc32"),
    "documents": ("id", "name", "characters", "sha256", "removed", "pages", "crc32"),
    "shards": (
        *("id", "file", "blocks", "bytes", "sha256", "crc32"),
        *("documents", "spans", "slot_tokens", "checksums"),
    ),
    "texts": ("document", "start", "crc32", "text"),
}
OTHER_VALUES = {
    "a number": "cast({0} as integer) + 1000",
    "text": "'other'",
    "bytes": "x'0102'",
    "a float": "0.5",
}


@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("kind", OTHER_VALUES)
def test_a_changed_value_anywhere_in_a_catalog_is_found_before_it_is_used(
    table: str, kind: str, tmp_path: Path
) -> None:
    bank = make_bank(tmp_path / "a.bank", 2)
    (bank / "saved").write_bytes((bank / catalog.CATALOG).read_bytes())
    for column in COLUMNS[table]:
        if column == "id" and kind != "a number":
            continue  # SQLite refuses it
        change = f"{column} = {OTHER_VALUES[kind].format(column)}"
        execute(bank, f"UPDATE {table} SET {change} WHERE rowid = 1")
        assert problems(bank), change
        with pytest.raises(BankError, match=r"damaged|has format|any more"):
            list(MemoryBank.open(bank).documents)
        shutil.copyfile(bank / "saved", bank / catalog.CATALOG)


@pytest.mark.parametrize("table", ["documents", "shards"])
def test_a_lost_row_is_found(table: str, bank: Path) -> None:
    execute(bank, f"DELETE FROM {table} WHERE id = 1")
    with pytest.raises(BankError, match=f"rows of its table '{table}' are missing"):
        MemoryBank.open(bank)


def test_a_count_of_shards_that_was_changed_overwrites_no_shard(bank: Path) -> None:
    execute(bank, "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'shards'")
    append(bank, 2)
    assert_holds(bank, [0, 1, 2])


def test_a_row_that_comes_back_is_found(bank: Path) -> None:
    with contextlib.closing(sqlite3.connect(bank / catalog.CATALOG)) as connection:
        before = connection.execute("SELECT * FROM documents WHERE id = 1").fetchone()
    LocalStore(bank).remove("doc-0")
    execute(bank, "DELETE FROM documents WHERE id = 1")
    execute(bank, "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", *before)
    with pytest.raises(BankError, match="or older ones are back"):
        MemoryBank.open(bank)


def rewrite_shard(bank: Path, **changes: object) -> None:
    """Change the row of the first shard as its own sedem would, with right checksums."""
    names = ("id", "file", "blocks", "bytes", "sha256", *COLUMNS["shards"][6:])
    with catalog.connect(bank) as connection, connection:
        _, state = catalog_rows.read_meta(bank, connection)
        columns = ", ".join(names)
        found = connection.execute(f"SELECT {columns}, crc32 FROM shards WHERE id = 1").fetchone()
        row = {**dict(zip(names, found, strict=False)), **changes}
        crc = row_checksum(*row.values())
        connection.execute(
            f"UPDATE shards SET crc32 = ?, {', '.join(f'{n} = ?' for n in names)} WHERE id = 1",
            (crc, *row.values()),
        )
        shards = state.sums["shards"].minus([found[-1]]).plus([crc])
        catalog.write_state(connection, state.with_sums(shards=shards))


def numbers_of(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"file": "../../000001.safetensors"}, "it names a shard '../"),
        ({"file": "/000001.safetensors"}, "it names a shard '/"),
        ({"documents": numbers_of(1, 7)}, "row 1 of '000001.safetensors' has no document"),
        ({"documents": numbers_of(1)}, "has columns of unequal length"),
        ({"blocks": 3}, "has columns of unequal length"),
        ({"blocks": -1}, "has columns of unequal length"),
        ({"spans": numbers_of(-1, 9, 9, 12)}, "a block of document 'doc-0' lies outside"),
        ({"spans": numbers_of(0, 9, 9, 1000)}, "a block of document 'doc-0' lies outside"),
        ({"spans": numbers_of(5, 4, 9, 12)}, "a block of document 'doc-0' lies outside"),
        ({"slot_tokens": b"abc"}, "has columns of unequal length"),
        ({"slot_tokens": b""}, "has columns of unequal length"),
        ({"slot_tokens": bytes(6)}, "its blocks have 3 and 4 slots"),
    ],
)
def test_a_catalog_that_contradicts_itself_is_refused(
    changes: dict[str, object], reason: str, bank: Path
) -> None:
    rewrite_shard(bank, **changes)
    with pytest.raises(BankError, match=rf"two\.bank' is damaged: .*{reason}"):
        MemoryBank.open(bank)


@pytest.mark.parametrize(
    "pages", [b"abc", numbers_of(1), numbers_of(0, 9, 5), numbers_of(0, 1000), numbers_of(-1, 0)]
)
def test_pages_that_contradict_their_text_are_refused(pages: bytes, bank: Path) -> None:
    with catalog.connect(bank) as connection, connection:
        _, state = catalog_rows.read_meta(bank, connection)
        *row, _, old = connection.execute("SELECT * FROM documents WHERE id = 1").fetchone()
        crc = row_checksum(*row, pages)
        connection.execute("UPDATE documents SET pages = ?, crc32 = ? WHERE id = 1", (pages, crc))
        documents = state.sums["documents"].minus([old]).plus([crc])
        catalog.write_state(connection, state.with_sums(documents=documents))
    with pytest.raises(BankError, match="the pages of document 1 lie outside its text"):
        MemoryBank.open(bank)


def test_pages_are_kept_and_cited(tmp_path: Path) -> None:
    paged = Document("lease.pdf", text_of(7), (0, 0, 9))
    store = LocalStore(make_bank(tmp_path / "a.bank", 1))
    store.append(PRINT, [paged], Blocks.of(rows_of(7)), Quantized(memory_of(7)))
    stored = MemoryBank.open(tmp_path / "a.bank")
    cast = stored.cast("int8")
    cast.save(tmp_path / "b.bank")
    for bank in (stored, cast, MemoryBank.open(tmp_path / "b.bank")):
        assert bank.documents[1] == paged
        pages = [bank.citation(index, 1, 0.0).page for index in range(len(bank))]
        assert pages == [None, None, 2, 3]
    store.remove("lease.pdf")
    assert store.verify() == []


def test_a_shard_that_does_not_fit_its_catalog_is_refused(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank")
    set_entry(bank, "made_by", '{"width": 9}')
    with pytest.raises(BankError, match=r"000001\.safetensors' holds torch\..* its catalog needs"):
        MemoryBank.open(bank).memory([0])


@pytest.mark.parametrize("version", ["0", "5", "banana"])
def test_a_bank_of_another_format_is_refused_with_both_versions(version: str, bank: Path) -> None:
    set_entry(bank, "schema_version", version)
    for attempt in (contents, functools.partial(append, number=2)):
        with pytest.raises(
            BankError, match=f"has format '{version}', this sedem reads 3 and 4; use"
        ):
            attempt(bank)


@pytest.mark.parametrize("version", ["1", "2"])
def test_an_old_bank_is_refused_with_the_command_that_builds_it_again(
    version: str, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    execute(tmp_path / "old", "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
    execute(tmp_path / "old", "INSERT INTO meta VALUES ('schema_version', ?)", version)
    with pytest.raises(BankError, match=rf"format '{version}'.*build it again with 'sedem build'"):
        MemoryBank.open(tmp_path / "old")


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    execute(tmp_path / "foreign", "CREATE TABLE recipes (name TEXT)")
    with pytest.raises(BankError, match=r"catalog of bank '.*foreign' cannot be used.*meta"):
        MemoryBank.open(tmp_path / "foreign")


@pytest.mark.parametrize("use", [contents, problems, functools.partial(append, number=2)])
def test_a_folder_or_file_that_is_not_a_bank_is_refused_and_left_alone(
    use: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("folder", "file"):
        with pytest.raises(
            BankError, match=rf"'.*{name}' is not a bank: it holds no catalog\.sqlite"
        ):
            use(tmp_path / name)
    with pytest.raises(BankError, match=r"there is no bank '.*absent'; make one with"):
        use(tmp_path / "absent")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_bank_of_another_model_cannot_be_appended_to(bank: Path) -> None:
    before = (bank / catalog.CATALOG).read_bytes()
    with pytest.raises(BankMismatchError, match=f"model {PRINT[:12]}, this model is {OTHER[:12]}"):
        LocalStore(bank).append(
            OTHER,
            [Document("doc-2", text_of(2))],
            Blocks.of(rows_of(2)),
            Quantized(memory_of(2)),
        )
    assert (bank / catalog.CATALOG).read_bytes() == before
    assert not shard_file(bank, 3).exists()
    assert_holds(bank, [0, 1])


# Readers and writers


def test_a_second_writer_is_refused_while_the_first_holds_the_lock(bank: Path) -> None:
    with (bank / local.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for attempt in (
            functools.partial(append, number=2),
            lambda b: LocalStore(b).remove("doc-0"),
        ):
            with pytest.raises(BankError, match=r"two\.bank' is being written by another process"):
                attempt(bank)
        assert_holds(bank, [0, 1])
    append(bank, 2)
    assert_holds(bank, [0, 1, 2])


def test_the_lock_file_of_a_killed_writer_blocks_nobody(bank: Path, children: Any) -> None:
    child = children.Process(target=append_and_get_killed, args=(bank, "before: the commit"))
    child.start()
    child.join(30)
    assert (bank / local.LOCK).exists()
    append(bank, 2)
    assert_holds(bank, [0, 1, 2])


def test_opening_while_another_process_commits_sees_one_state(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit between two statements of a reader does not change what it reads."""
    real = sqlite3.connect
    pending = [2]

    class Interrupted(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if "FROM shards" in statement and pending:
                with monkeypatch.context() as undisturbed:
                    undisturbed.setattr(catalog.sqlite3, "connect", real)
                    append(bank, pending.pop())
            return super().execute(statement, *values)

    with monkeypatch.context() as watched:
        watched.setattr(
            catalog.sqlite3, "connect", functools.partial(sqlite3.connect, factory=Interrupted)
        )
        assert numbers_in(bank) == [0, 1]
    assert pending == []
    assert_holds(bank, [0, 1, 2])


class Unmapped(sqlite3.Connection):
    """A connection on a file system without maps."""

    alone = False

    def execute(self, statement: str, *values: Any) -> Any:
        self.alone = self.alone or "EXCLUSIVE" in statement
        if not self.alone:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_SHMMAP"
            raise error
        return super().execute(statement, *values)


def test_a_catalog_that_cannot_be_shared_is_used_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = functools.partial(sqlite3.connect, factory=Unmapped)
    monkeypatch.setattr(catalog.sqlite3, "connect", connect)
    bank = make_bank(tmp_path / "a.bank", documents=2)
    assert_holds(bank, [0, 1])
    with catalog.connect(bank):
        assert not (bank / "catalog.sqlite-shm").exists()


def test_accesses_that_exclude_each_other_take_turns(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEDEM_READ", "1")
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: MemoryBank.open(bank), range(12)))
    assert {len(one) for one in opened} == {4}
    monkeypatch.setattr(catalog, "WAIT", 0.05)
    with (
        catalog.connect(bank),
        pytest.raises(BankError, match=r"cannot be used now \(database is locked\)"),
    ):
        MemoryBank.open(bank)


def test_an_open_bank_does_not_change_under_its_reader(bank: Path) -> None:
    opened = MemoryBank.open(bank)
    append(bank, 2)
    LocalStore(bank).remove("doc-1")
    assert [d.name for d in opened.documents] == ["doc-0", "doc-1"]
    assert torch.equal(opened.memory([0, 1, 2, 3]), rounded(opened, memory_of(0), memory_of(1)))


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder for banks, in a process that file modes apply to.

    Root may write anywhere, so a test that runs as root drops root's rights.
    """
    place = Path(tempfile.mkdtemp(prefix="sedem-"))
    place.chmod(0o755)
    root = os.geteuid() == 0
    try:
        if root:
            try:
                os.setresuid(NOBODY, NOBODY, 0)
                os.setresuid(0, 0, 0)
            except (PermissionError, AttributeError):
                pytest.skip("this root cannot drop its rights and may write anywhere")
        yield place
    finally:
        if root:
            os.setresuid(0, 0, 0)
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        shutil.rmtree(place)


def write_protect(folder: Path) -> None:
    """Make a folder read-only, and drop root's rights."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:
        os.setresuid(NOBODY, NOBODY, 0)
    assert not os.access(folder, os.W_OK)


def test_a_read_only_bank_opens_and_verifies_and_refuses_to_be_changed(unprivileged: Path) -> None:
    bank = make_bank(unprivileged / "shared.bank", documents=2)
    write_protect(bank)
    assert_holds(bank, [0, 1])
    for attempt in (functools.partial(append, number=2), lambda b: LocalStore(b).remove("doc-0")):
        with pytest.raises(BankError, match=r"shared\.bank' cannot be written.*Permission denied"):
            attempt(bank)
    assert_holds(bank, [0, 1])


@pytest.mark.parametrize("read", ["0", "1"])
def test_a_read_only_bank_with_a_log_says_what_to_do(
    read: str, unprivileged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank(unprivileged / "shared.bank")
    (bank / "catalog.sqlite-wal").touch()
    write_protect(bank)
    monkeypatch.setenv("SEDEM_READ", read)
    with pytest.raises(BankError, match=r"cannot be used now \(.*\); copy it to a local disk"):
        MemoryBank.open(bank)


def test_a_new_bank_in_a_folder_that_cannot_be_written_is_refused(unprivileged: Path) -> None:
    (unprivileged / "shared").mkdir()
    write_protect(unprivileged / "shared")
    with pytest.raises(BankError, match=r"new\.bank' cannot be written.*Permission denied"):
        make_bank(unprivileged / "shared" / "new.bank")


def test_a_bank_may_have_any_name_that_a_folder_may_have(tmp_path: Path) -> None:
    for name in ("with space.bank", "a?b#c%20&mode=ro.bank", "Görlitz 🥧", "-rf", "'; DROP TABLE"):
        assert_holds(make_bank(tmp_path / name, documents=2), [0, 1])

"""Compacting gives space back and changes nothing that a bank returns, wherever it is stopped."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from unit.bank.crashes import Machine, every_stop
from unit.bank.test_store import (
    PRINT,
    WIDTH,
    append,
    assert_holds,
    flip,
    make_bank,
    memory_of,
    rows_of,
    shard_file,
    text_of,
)

from sedem import Document, MemoryBank
from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog, rewriting, shard
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import Identity, check_size
from sedem.errors import BankError
from sedem.quantization import Quantized

TWO_BLOCKS = 2 * 4 * WIDTH * 2


def shards_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "shards").iterdir())


def removed(folder: Path, *names: str) -> Path:
    for name in names:
        LocalStore(folder).remove(name)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_compacting_merges_shards_and_forgets_removed_documents(tmp_path: Path, dtype: str) -> None:
    bank = removed(make_bank(tmp_path / "a.bank", 5, dtype), "doc-1", "doc-3")
    before = MemoryBank.open(bank).stored(range(6))
    report = LocalStore(bank).compact()
    assert_holds(bank, [0, 2, 4])
    after = MemoryBank.open(bank).stored(range(6))
    assert torch.equal(before.values.view(torch.uint8), after.values.view(torch.uint8))
    assert (report.shards_before, report.shards_after) == (5, 1)
    assert shards_of(bank) == ["000006.safetensors"]
    assert report.bytes_after == sum(p.stat().st_size for p in bank.rglob("*") if p.is_file())
    for file in bank.glob("catalog.sqlite*"):
        assert text_of(1).encode() not in file.read_bytes(), "the removed text is still there"
    append(bank, 5)
    assert_holds(bank, [0, 2, 4, 5])


def test_the_space_of_a_large_document_comes_back(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 1)
    long = [Document("l", "x" * 3_000_000)]
    LocalStore(bank).append(PRINT, long, Blocks.of(rows_of(0)), Quantized(memory_of(0)))
    report = LocalStore(removed(bank, "l")).compact()
    assert report.bytes_before - report.bytes_after > 2_900_000
    assert_holds(bank, [0])


def test_compacting_twice_changes_nothing_the_second_time(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 3)
    LocalStore(bank).compact()
    files = shards_of(bank)
    report = LocalStore(bank).compact()
    assert (report.shards_before, report.shards_after) == (1, 1)
    assert shards_of(bank) == files


def test_an_empty_bank_can_be_compacted(tmp_path: Path) -> None:
    bank = removed(make_bank(tmp_path / "a.bank", 1), "doc-0")
    assert LocalStore(bank).compact().shards_after == 0
    empty = MemoryBank.open(bank)
    assert list(empty.documents) == [] and len(empty.memory([])) == 0
    append(bank, 2)
    assert_holds(bank, [2])


@pytest.mark.parametrize("seed", range(3))
def test_compacting_never_changes_what_a_bank_returns(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small shards, so that documents are split and some shards stay as they are."""
    monkeypatch.setattr(
        rewriting, "SHARD_BYTES", TWO_BLOCKS // 2 * random.Random(seed).choice((1, 3))
    )
    chance = random.Random(seed)
    bank = MemoryBank.open(make_bank(tmp_path / "a.bank", 2))
    folder = tmp_path / "a.bank"
    for number in range(2, 12):
        names = list(bank.documents.names)
        if len(names) > 1 and chance.random() < 0.4:
            bank.remove(chance.choice(names))
        else:
            append(folder, number, name=chance.choice([*names, None]))  # replaces some
        bank.reload()
        if chance.random() < 0.6:
            before = bank.snapshot()
            documents, memory = list(before.documents), before.memory(range(len(before)))
            bank.compact()
            for after in (bank, MemoryBank.open(folder)):
                assert list(after.documents) == documents
                assert list(after.blocks) == list(before.blocks)
                assert torch.equal(after.memory(range(len(after))), memory)
                assert after.fingerprint == before.fingerprint
    assert LocalStore(folder).verify() == []


def test_a_stop_at_any_call_leaves_a_bank_that_holds_the_same(tmp_path: Path) -> None:
    whole = removed(make_bank(tmp_path / "whole.bank", 2), "doc-0")
    bank = tmp_path / "a.bank"

    def compact(machine: Machine) -> None:
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        with machine.running():
            LocalStore(bank).compact()

    for machine in every_stop(compact):
        assert_holds(bank, [1])
        with LocalStore(bank).writing():  # it clears what was left
            named = {piece.path.name for piece in LocalStore(bank).open().pieces}  # type: ignore[attr-defined]
            assert set(shards_of(bank)) == named
        if machine.after:
            append(bank, 2)
            assert_holds(bank, [1, 2])


@pytest.mark.usefixtures("mapped_and_read")
def test_readers_keep_what_is_open_and_are_told_to_open_again_for_the_rest(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 3)
    reader = MemoryBank.open(bank)
    seen = reader.memory([0, 1])
    removed(bank, "doc-1")
    LocalStore(bank).compact()
    assert torch.equal(reader.memory([0, 1]), seen)
    assert reader.documents[0].text == text_of(0)
    with pytest.raises(BankError, match=r"000002\.safetensors' is missing.*open the bank again"):
        reader.memory([2])
    with pytest.raises(BankError, match="open the bank again"):
        _ = reader.documents[1].text
    reader.reload()
    assert list(reader.documents.names) == ["doc-0", "doc-2"]
    assert torch.equal(reader.memory([2, 3]), memory_of(2))


def test_a_damaged_block_is_named_and_nothing_is_compacted(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 3)
    flip(shard_file(bank, 2), -1)
    files = shards_of(bank)
    with pytest.raises(BankError, match=r"block 1 of '.*000002\.safetensors' is damaged.*--repair"):
        LocalStore(bank).compact()
    assert shards_of(bank) == files
    assert list(MemoryBank.open(bank).documents.names) == ["doc-0", "doc-1", "doc-2"]


def test_a_bank_that_is_compacted_while_it_is_opened_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, real = make_bank(tmp_path / "a.bank", 2), check_size

    def compacted_first(path: Path, size: int) -> Identity:
        monkeypatch.setattr(shard, "check_size", real)
        LocalStore(bank).compact()
        return real(path, size)

    monkeypatch.setattr(shard, "check_size", compacted_first)
    assert torch.equal(MemoryBank.open(bank).memory([0, 1]), memory_of(0))


def test_only_a_bank_in_a_folder_is_compacted(tmp_path: Path) -> None:
    bank = MemoryBank.open(make_bank(tmp_path / "a.bank")).cast("bfloat16")
    with pytest.raises(
        BankError, match="only a bank in a folder or an object store can be compacted; save it"
    ):
        bank.compact()


# Leftovers


def test_the_next_writer_clears_what_no_table_names_and_nothing_else(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 2)
    gone = ["shards/000009.safetensors", "shards/.000010.safetensors.partial"]
    gone += ["keys/000009.safetensors", "kept/.000001.safetensors.partial"]
    kept = ["keys/000001.safetensors", "shards/000003.safetensors.damaged", "shards/notes.txt"]
    for name in (*gone, *kept):
        (bank / name).parent.mkdir(exist_ok=True)
        (bank / name).touch()
    removed(bank, "doc-0")
    assert not [name for name in gone if (bank / name).exists()]
    assert all((bank / name).exists() for name in kept)
    assert_holds(bank, [1])


def test_a_linked_folder_is_never_cleared(tmp_path: Path) -> None:
    other = make_bank(tmp_path / "other.bank", 3)
    bank = make_bank(tmp_path / "a.bank", 2)
    (bank / "keys").symlink_to(other / "shards")
    removed(bank, "doc-0")
    assert_holds(other, [0, 1, 2])


def test_a_damaged_index_of_the_catalog_condemns_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank(tmp_path / "a.bank", 2)
    (bank / "shards" / "000009.safetensors").write_bytes(b"left by a crash")
    monkeypatch.setattr(catalog, "shard_files", lambda _: {"000002.safetensors"})
    with LocalStore(bank).writing():
        assert shards_of(bank) == ["000001.safetensors", "000002.safetensors"]
    assert_holds(bank, [0, 1])

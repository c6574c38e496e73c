"""A repair keeps every whole document, drops exactly what lost something, and deletes no file."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch
from unit.bank.crashes import Machine, every_stop
from unit.bank.test_store import (
    PRINT,
    append,
    assert_holds,
    flip,
    make_bank,
    memory_of,
    numbers_in,
    rows_of,
    shard_file,
    text_of,
)

from sedem import Document
from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog, repair
from sedem.bank.store.local import LocalStore
from sedem.quantization import Quantized


@pytest.fixture(params=["bfloat16", "int8"])
def bank(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Documents 0, 1 and 2 in one shard, 000004, and 3 in another, 000005."""
    folder = make_bank(tmp_path / "a.bank", 3, request.param)
    LocalStore(folder).compact()
    append(folder, 3)
    return folder


def damage_text(bank: Path, name: str) -> None:
    with sqlite3.connect(bank / catalog.CATALOG) as connection:
        connection.execute(
            "UPDATE texts SET text = replace(text, 'says', 'Says') "
            "WHERE document = (SELECT id FROM documents WHERE name = ?)",
            (name,),
        )


def test_a_sound_bank_is_left_as_it_is(bank: Path) -> None:
    before = sorted(path.name for path in (bank / "shards").iterdir())
    assert LocalStore(bank).repair() == repair.Repaired([], [], [], [])
    assert sorted(path.name for path in (bank / "shards").iterdir()) == before


@pytest.mark.usefixtures("mapped_and_read")
def test_a_damaged_block_costs_its_document_alone(bank: Path) -> None:
    flip(shard_file(bank, 4), -1)  # the last value of the last block, which is document 2's
    damaged = shard_file(bank, 4).read_bytes()
    done = LocalStore(bank).repair()
    assert done.problems == [
        "shard '000004.safetensors' is damaged (its SHA-256 differs); it affects 'doc-2'"
    ]
    assert (done.repaired, done.dropped) == (["doc-0", "doc-1"], ["doc-2"])
    assert done.set_aside == ["shards/000004.safetensors.damaged"]
    assert (bank / done.set_aside[0]).read_bytes() == damaged
    assert not shard_file(bank, 4).exists()
    assert_holds(bank, [0, 1, 3])
    append(bank, 2)  # the writer clears leftovers, but nothing that was set aside
    assert (bank / done.set_aside[0]).exists()
    assert_holds(bank, [0, 1, 3, 2])


@pytest.mark.parametrize("offset", [0, 9, 60])
def test_a_damaged_header_costs_nothing(offset: int, bank: Path) -> None:
    flip(shard_file(bank, 4), offset)
    assert LocalStore(bank).repair().dropped == []
    assert_holds(bank, [0, 1, 2, 3])


def test_a_longer_file_costs_nothing_and_a_shorter_one_what_it_lacks(bank: Path) -> None:
    with shard_file(bank, 4).open("ab") as file:
        file.write(b"more")
    assert LocalStore(bank).repair().dropped == []
    assert_holds(bank, [0, 1, 2, 3])
    newest = shard_file(bank, 6)
    os.truncate(newest, newest.stat().st_size - 1)
    assert LocalStore(bank).repair().dropped == ["doc-2"]
    assert_holds(bank, [0, 1, 3])


def test_a_missing_shard_costs_its_documents(bank: Path) -> None:
    shard_file(bank, 4).unlink()
    done = LocalStore(bank).repair()
    assert (done.set_aside, done.dropped) == ([], ["doc-0", "doc-1", "doc-2"])
    assert_holds(bank, [3])
    shutil.rmtree(bank / "shards")
    assert LocalStore(bank).repair().dropped == ["doc-3"]
    assert LocalStore(bank).verify() == []


def test_a_damaged_text_costs_its_document(bank: Path) -> None:
    damage_text(bank, "doc-1")
    done = LocalStore(bank).repair()
    assert (done.dropped, done.set_aside) == (["doc-1"], [])
    assert_holds(bank, [0, 2, 3])
    LocalStore(bank).compact()
    assert_holds(bank, [0, 2, 3])


def test_rows_of_removed_documents_are_not_missed(bank: Path) -> None:
    LocalStore(bank).remove("doc-2")
    flip(shard_file(bank, 4), -1)
    done = LocalStore(bank).repair()
    assert (done.repaired, done.dropped) == (["doc-0", "doc-1"], [])
    assert_holds(bank, [0, 1, 3])


def test_a_document_in_several_shards_keeps_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = make_bank(tmp_path / "a.bank", 3)
    LocalStore(bank).compact()
    LocalStore(bank).remove("doc-2")
    monkeypatch.setattr("sedem.bank.store.rewriting.SHARD_BYTES", 64)  # one block in each
    assert LocalStore(bank).compact().shards_after == 4
    flip(shard_file(bank, 5), 5)  # the first half of document 0
    assert LocalStore(bank).repair().repaired == ["doc-0"]
    assert_holds(bank, [0, 1])


def test_a_damaged_catalog_and_a_damaged_shard_are_repaired_together(bank: Path) -> None:
    with sqlite3.connect(bank / catalog.CATALOG) as connection:
        connection.execute("UPDATE shards SET blocks = 9 WHERE id = 5")
    connection.close()
    flip(shard_file(bank, 4), -1)
    done = LocalStore(bank).repair()
    assert (done.repaired, done.dropped) == (["doc-0", "doc-1"], ["doc-2", "doc-3"])
    assert done.set_aside == [
        "catalog.sqlite.damaged",
        "shards/000005.safetensors.damaged",
        "shards/000004.safetensors.damaged",
    ]
    assert_holds(bank, [0, 1])


def test_lost_documents_come_with_their_texts_where_these_are_whole(bank: Path) -> None:
    flip(shard_file(bank, 5), -1)
    damage_text(bank, "doc-1")
    lost = {one.name: one.text for one in repair.lost_documents(bank)}
    assert lost == {"doc-1": None, "doc-3": text_of(3)}


def test_a_document_that_is_appended_again_replaces_its_damaged_memory(bank: Path) -> None:
    flip(shard_file(bank, 5), -1)
    named = [Document("doc-3", text_of(3))]
    memory = Quantized(memory_of(3))
    for again in (False, True):
        LocalStore(bank).append(PRINT, named, Blocks.of(rows_of(3)), memory, again=again)
    assert LocalStore(bank).repair().dropped == []
    assert_holds(bank, [0, 1, 2, 3])


def test_a_stop_at_any_call_leaves_a_bank_that_can_be_repaired(tmp_path: Path) -> None:
    whole = make_bank(tmp_path / "whole.bank", 2)
    LocalStore(whole).compact()
    flip(shard_file(whole, 3), -1)
    bank = tmp_path / "a.bank"

    def run(machine: Machine) -> None:
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        with machine.running():
            LocalStore(bank).repair()

    for _ in every_stop(run):
        assert numbers_in(bank) in ([0, 1], [0])
        LocalStore(bank).repair()
        assert_holds(bank, [0])
        assert (bank / "shards" / "000003.safetensors.damaged").exists()


def test_random_flips_cost_exactly_the_documents_that_verify_names(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = make_bank(tmp_path / "whole.bank", 3, "fp8")
    LocalStore(whole).compact()
    size = shard_file(whole, 4).stat().st_size
    for _ in range(6):
        bank = tmp_path / "a.bank"
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        flip(shard_file(bank, 4), int(torch.randint(size, (1,), generator=generator)))
        dropped = LocalStore(bank).repair().dropped
        assert len(dropped) <= 1
        assert_holds(bank, [n for n in range(3) if f"doc-{n}" not in dropped])

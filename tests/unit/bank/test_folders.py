"""Banks of earlier formats, made by the release that wrote them, and imported."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from sedem import MemoryBank
from sedem.bank.care import examine
from sedem.bank.copies import import_bank
from sedem.bank.file import BankFile
from sedem.errors import BankError, NoTextError

BANKS = Path(__file__).parents[2] / "fixtures" / "banks"


@pytest.mark.parametrize("name", ["format-3", "format-4"])
def test_an_old_bank_is_imported_unchanged(name: str, tmp_path: Path) -> None:
    old, target = old_bank(tmp_path, name), tmp_path / "new.bank"
    files = sorted(old.rglob("*"))
    assert import_bank(old, target) == target.stat().st_size
    assert sorted(old.rglob("*")) == files, "the old bank stays as it is"
    expected = json.loads((BANKS / f"{name}.json").read_text(encoding="utf-8"))
    bank = MemoryBank.open(target)
    assert bank.documents.names == expected["names"]
    blocks = [[b.document, b.start, b.end, list(b.slot_tokens)] for b in bank.blocks]
    assert blocks == expected["blocks"]
    memory = torch.tensor(expected["memory"]).view(len(bank), 4, 8)
    assert torch.equal(bank.memory(range(len(bank))).float(), memory)
    assert examine(BankFile(target)).problems == []
    assert bank.made_by["model"] == "made up"
    if expected["texts"] is None:
        with pytest.raises(NoTextError):
            _ = bank.documents[0]
    else:
        assert [document.text for document in bank.documents] == expected["texts"]
        assert bank.documents[0].pages == (0, 4)


def old_bank(tmp_path: Path, name: str = "format-3") -> Path:
    folder = Path(shutil.copytree(BANKS / name, tmp_path / "old"))
    # SQLite's index of an empty log, which a release left beside its catalog.
    (folder / "catalog.sqlite-shm").write_bytes(bytes(2**15))
    return folder


def test_a_folder_names_the_command_that_imports_it(tmp_path: Path) -> None:
    with pytest.raises(BankError, match=r"earlier release; convert it with 'sedem bank import"):
        MemoryBank.open(old_bank(tmp_path))


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE meta SET value = '2' WHERE key = 'schema_version'", "has format '2', formats 3"),
        ("UPDATE shards SET file = '../../x.safetensors' WHERE id = 1", "names a file"),
        ("UPDATE texts SET text = 'another'", "the text of document 3 of .* is damaged"),
        ("UPDATE shards SET spans = x'00'", "is damaged"),
        ("DELETE FROM meta", "has format None"),
    ],
)
def test_a_damaged_or_hostile_folder_is_refused(
    statement: str, message: str, tmp_path: Path
) -> None:
    folder = old_bank(tmp_path)
    with sqlite3.connect(folder / "catalog.sqlite") as catalog:
        catalog.execute(statement)
    with pytest.raises(BankError, match=message):
        import_bank(folder, tmp_path / "new.bank")
    assert not (tmp_path / "new.bank").exists() or not BankFile(tmp_path / "new.bank").exists()


def test_damaged_memory_and_links_are_refused(tmp_path: Path) -> None:
    folder = old_bank(tmp_path)
    for path in (folder / "shards").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(BankError, match=r"block \d of .* is damaged"):
        import_bank(folder, tmp_path / "new.bank")
    for path in (folder / "shards").iterdir():
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    with pytest.raises(BankError, match="is a link, which could lead anywhere"):
        import_bank(folder, tmp_path / "new.bank")

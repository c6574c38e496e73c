"""Banks of a server are compacted in the background; who reads one keeps what it has begun with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import SeDeM
from sedem.errors import BankError
from sedem.serve import compacting
from sedem.serve.building import Builder
from sedem.serve.compacting import stored_blocks
from sedem.serve.file_records import new_file
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.settings import Settings

TEXTS = {"lease": LEASE, "recipe": RECIPE, "long": 4 * LEASE}


def upload(library: Library, **texts: str) -> None:
    files = []
    for name, text in texts.items():
        path = library.files.new_path()
        path.write_text(text, encoding="utf-8")
        files.append(new_file(path, "admin", name, "assistants"))
    library.upload("flat", files)


@pytest.fixture
def library(settings: Settings, model: SeDeM) -> Iterator[Library]:
    """A bank of three documents, the last of which is more than half of it."""
    library = Library(settings, model)
    upload(library, **{f"{name}.txt": text for name, text in TEXTS.items()})
    yield library
    library.close()


@pytest.fixture
def builder(library: Library, model: SeDeM) -> Iterator[Builder]:
    builder = Builder(library, model, Metrics())
    finish(builder)
    yield builder
    builder.close()


def finish(builder: Builder) -> None:
    while builder.turn():
        pass


def folders(settings: Settings) -> list[Path]:
    return sorted((settings.folder / "banks").iterdir())


def test_a_bank_that_is_mostly_removed_documents_gives_their_space_back(
    settings: Settings, model: SeDeM, library: Library, builder: Builder
) -> None:
    entry = library.get("flat")
    library.remove_document("flat", "lease.txt")
    finish(builder)
    assert entry.bank is not None
    assert stored_blocks(entry.bank)[1] > 0, "less than half is removed"
    old, kept = entry.path, entry.bank.memory(range(len(entry.bank)))
    library.remove_document("flat", "long.txt")
    finish(builder)
    assert entry.path != old and folders(settings) == [entry.path]
    assert entry.bank is not None and stored_blocks(entry.bank) == (len(entry.bank), 0)
    assert entry.bank.store is not None and entry.bank.store.verify() == []
    assert entry.bank.documents[0].text == RECIPE
    assert torch.equal(entry.bank.memory(range(len(entry.bank))), kept[: len(entry.bank)])
    # It is written on in its new folder, by this server and by the next.
    upload(library, **{"lease.txt": LEASE})
    finish(builder)
    library.close()
    again = Library(settings, model)
    assert again.get("flat").bank is not None
    assert {one.name: one.text for one in again.get("flat").bank.documents} == {  # type: ignore[union-attr]
        "recipe.txt": RECIPE,
        "lease.txt": LEASE,
    }
    again.close()


def test_readers_keep_their_commit_and_the_old_folder_goes_after_them(
    settings: Settings, library: Library, builder: Builder
) -> None:
    entry = library.get("flat")
    assert entry.bank is not None
    snapshot, old = entry.bank.snapshot(), entry.path
    library.remove_document("flat", "long.txt")
    finish(builder)
    assert entry.path != old and sorted(folders(settings)) == sorted([old, entry.path])
    assert len(entry.bank.documents) == 2
    # Nothing of the snapshot was read before.
    assert {one.name: one.text for one in snapshot.documents} == {
        f"{name}.txt": text for name, text in TEXTS.items()
    }
    assert snapshot.memory(range(len(snapshot))).isfinite().all()
    del snapshot
    finish(builder)
    assert folders(settings) == [entry.path]


def test_it_can_be_turned_off(settings: Settings, model: SeDeM) -> None:
    library = Library(settings.with_changes(max_removed_share=1.0), model)
    upload(library, **{"lease.txt": LEASE})
    builder = Builder(library, model, Metrics())
    finish(builder)
    library.remove_document("flat", "lease.txt")
    finish(builder)
    bank = library.get("flat").bank
    assert bank is not None and stored_blocks(bank)[1] == stored_blocks(bank)[0] > 0
    builder.close()
    library.close()


@pytest.mark.parametrize("how", ["a document is removed", "the bank is deleted"])
def test_a_bank_that_changes_meanwhile_is_not_moved(
    how: str, library: Library, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, copy = library.get("flat"), compacting.compacted_copy
    old, copies = entry.path, []

    def changed_after(folder: Path, target: Path) -> object:
        state = copy(folder, target)
        copies.append(target)
        if len(copies) == 1:
            if how == "the bank is deleted":
                library.delete("flat")
            else:
                library.remove_document("flat", "lease.txt")
        return state

    monkeypatch.setattr(compacting, "compacted_copy", changed_after)
    library.remove_document("flat", "long.txt")
    finish(builder)
    assert not copies[0].exists() and not old.exists()
    if how == "the bank is deleted":
        assert len(copies) == 1 and "flat" not in {one.name for one in library.entries()}
    else:
        # It was copied again, as it is now.
        assert entry.path == copies[1] and entry.bank is not None
        assert list(entry.bank.documents.names) == ["recipe.txt"]


def test_a_bank_that_cannot_be_compacted_stays_and_is_not_tried_again_and_again(
    settings: Settings, library: Library, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, tries = library.get("flat"), []

    def refused(folder: Path, target: Path) -> None:
        tries.append(target)
        raise BankError("the disk is full")

    monkeypatch.setattr(compacting, "compacted_copy", refused)
    old = entry.path
    library.remove_document("flat", "long.txt")
    finish(builder)
    finish(builder)
    assert len(tries) == 1 and entry.path == old and folders(settings) == [old]
    library.remove_document("flat", "lease.txt")
    finish(builder)
    assert len(tries) == 2 and entry.bank is not None
    assert entry.bank.documents[0].text == RECIPE


def test_a_kill_between_copy_and_move_leaves_the_bank_as_it_was(
    settings: Settings, model: SeDeM, library: Library, builder: Builder
) -> None:
    entry = library.get("flat")
    with library.database.writing() as connection:
        library.trash.note(connection, copied := library.place.bank("flat-00000000.bank"))
    compacting.compacted_copy(entry.path, copied)
    library.close()
    again = Library(settings, model)
    assert folders(settings) == [entry.path] and not copied.exists()
    bank = again.get("flat").bank
    assert bank is not None and bank.store is not None and bank.store.verify() == []
    assert len(bank.documents) == 3
    again.close()

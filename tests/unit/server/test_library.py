"""The server's folder: one server at a time, and what it goes on with when it is opened again."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import LEASE, RECIPE
from unit.server.conftest import finish, opened, upload

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import append_to, copy_to
from sedem.bank.parts import Parts
from sedem.errors import BankMismatchError, ConfigError
from sedem.reading import building as build_module
from sedem_serve.server.library import Library
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.settings import ServerSettings


def test_one_server_uses_a_folder(settings: ServerSettings, model: SeDeM) -> None:
    library = Library(settings, model, Metrics())
    assert settings.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another server uses the folder"):
        Library(settings, model, Metrics())
    thread = threading.Thread(target=library.close)
    thread.start()
    thread.join()
    Library(settings, model, Metrics()).close()


def test_the_folder_of_an_earlier_release_is_refused_and_left_as_it_is(
    settings: ServerSettings, model: SeDeM
) -> None:
    (settings.folder / "banks").mkdir(parents=True)
    for name in ("server.sqlite", "banks/flat-00000000.bank"):
        (settings.folder / name).write_bytes(b"of an earlier release")
    with pytest.raises(ConfigError, match="give another folder, and upload their files again"):
        Library(settings, model, Metrics())
    assert (settings.folder / "banks" / "flat-00000000.bank").exists()


def test_a_stopped_build_goes_on_within_a_long_document(
    settings: ServerSettings, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "COMMIT", 500)
    monkeypatch.setattr(build_module, "PART", 100)
    append, parts = BankFile.append_part, []
    with opened(settings, model) as library:
        upload(library, "flat", {"long.txt": LEASE * 10, "short.txt": RECIPE})

        def counted(*args: Any, **kwargs: Any) -> None:
            append(*args, **kwargs)
            parts.append(kwargs["before"])
            if len(parts) == 3:
                threading.Thread(target=library.stop).start()
                assert library._ended.wait(10)

        monkeypatch.setattr(BankFile, "append_part", counted)
        library.start()
        library._thread.join(30)
        assert len(parts) == 3
    with opened(settings, model) as library:
        entry = library.get("flat")
        assert entry.progress().status == "building"
        finish(library)
        # No part was read twice, and the document is as if it had been read in one go.
        assert len(set(parts)) == len(parts) > 3
        assert entry.bank is not None and entry.progress().status == "ready"
        assert set(entry.bank.documents.names) == {"long.txt", "short.txt"}
        index = entry.bank.documents.names.index("long.txt")
        spans = [(b.start, b.end) for b in entry.bank.blocks if b.document == index]
        whole = model.read([Document("long.txt", LEASE * 10)])
        assert spans == [(b.start, b.end) for b in whole.blocks]


@pytest.mark.parametrize("held", [True, False])
def test_a_document_that_is_deleted_while_it_is_read_is_never_seen(
    settings: ServerSettings, model: SeDeM, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    with opened(settings, model) as library:
        if held:
            upload(library, "flat", {"lease.txt": LEASE})
            finish(library)
        upload(library, "flat", {"lease.txt": RECIPE, "other.txt": "The dog sleeps."})
        bank, add = library.writable("flat"), build_module.add_documents

        def late(*given: Any) -> None:
            bank.discard("lease.txt")
            add(*given)

        with monkeypatch.context() as patch:
            patch.setattr(build_module, "add_documents", late)
            bank.catch_up(library.read)
        snapshot = bank.newest()
        assert snapshot is not None and snapshot.documents.names == ["other.txt"]
        assert bank.progress().status == "ready" and "lease.txt" not in bank.record.files


@pytest.mark.parametrize("when", ["its bank holds it", "it waits", "it was read"])
def test_a_deletion_survives_a_kill(settings: ServerSettings, model: SeDeM, when: str) -> None:
    with opened(settings, model) as library:
        upload(library, "flat", {"lease.txt": LEASE, "recipe.txt": RECIPE})
        bank = library.writable("flat")
        if when != "it waits":
            finish(library)
        if when == "it was read":
            bank.record.files.clear()
            bank.record.save()
        bank.record.save()
        # The kill comes after the file is gone, before the bank has changed.
        bank._unlink("recipe.txt") if when == "its bank holds it" else bank.discard("recipe.txt")
    with opened(settings, model) as library:
        finish(library)
        assert library.get("flat").newest().documents.names == ["lease.txt"]


def test_banks_of_another_model_are_refused(
    settings: ServerSettings, model: SeDeM, bank: MemoryBank, tmp_path: Path
) -> None:
    with opened(settings, model) as library:
        upload(library, "flat", {"lease.txt": LEASE})
        finish(library)
    bank.save(tmp_path / "given")
    model.compressor.requires_grad_(False)
    for parameter in model.compressor.parameters():
        parameter.add_(1.0)
    with pytest.raises(BankMismatchError):
        Library(settings.with_changes(banks={"given": tmp_path / "given"}), model, Metrics())
    with opened(settings, model) as library:
        assert "another model" in (library.get("flat").error or "")
        upload(library, "flat", {"recipe.txt": RECIPE})
        finish(library)
        [failed] = library.get("flat").progress().failed
        assert "was built by another model" in failed["error"]


def test_names_are_not_shared(settings: ServerSettings, model: SeDeM) -> None:
    with opened(settings, model) as library:
        library.upload("kept", {})
    for _ in range(2):  # the lock is given back
        with pytest.raises(ConfigError, match="a client already created bank 'kept'"):
            Library(
                settings.with_changes(banks={"kept": settings.folder / "given"}), model, Metrics()
            )


def test_a_bank_of_the_operator_may_be_replaced_or_lost(
    settings: ServerSettings, model: SeDeM, bank: MemoryBank, tmp_path: Path
) -> None:
    path, other = tmp_path / "given.bank", tmp_path / "other.bank"
    bank.save(path)
    model.read([Document("other.txt", RECIPE)]).save(other)
    with opened(settings.with_changes(banks={"given": path}), model) as library:
        entry = library.get("given")
        assert entry.bank is not None
        before, texts = entry.bank.snapshot(), [one.text for one in bank.documents]
        assert before.documents[0].text == texts[0]
        other.replace(path)
        entry.refresh()
        assert entry.bank.documents.names == ["other.txt"]
        # An answer that runs sees the former bank, or an error, but never the wrong one.
        assert [one.text for one in before.documents] == texts
        path.rename(other)
        for _ in range(2):
            entry.refresh()
            assert entry.error and entry.error.startswith("the bank cannot be read now; the log")
            assert (entry.progress().status, entry.bank.documents.names) == ("ready", ["other.txt"])
        other.rename(path)
        entry.refresh()
        assert entry.error is None


def test_a_bank_of_the_operator_may_be_in_parts(
    settings: ServerSettings,
    model: SeDeM,
    bank: MemoryBank,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "parts"
    copy_to(Parts(place), bank.snapshot(), bank.meta)
    manifest, before = (place / "bank.json").read_bytes(), [one.name for one in bank.documents]
    with opened(settings.with_changes(banks={"given": place}), model) as library:
        entry = library.get("given")

        def wait_until(names: list[str], failed: bool) -> None:
            until = time.monotonic() + 20
            while True:
                assert entry.bank is not None
                if (entry.bank.documents.names, entry.error is not None) == (names, failed):
                    return
                assert time.monotonic() < until, (entry.bank.documents.names, entry.error)
                entry.refresh()
                time.sleep(0.01)

        wait_until(before, False)
        (place / "bank.json").write_bytes(b"damaged")
        wait_until(before, True)
        (place / "bank.json").write_bytes(manifest)
        wait_until(before, False)
        append_to(Parts(place), model.read([Document("new.txt", RECIPE)]).snapshot())
        wait_until([*before, "new.txt"], False)

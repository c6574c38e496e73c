"""Kills in the middle of uploads, builds and compaction lose nothing that was acknowledged."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from faults.crashes import full, kill
from faults.tracing import WORKS, Decide, Fate, Trace, go_on, trace
from unit.server.conftest import finish, opened, upload
from unit.server.test_served import stored_names

from sedem import SeDeM
from sedem.bank.file import BankFile
from sedem_serve.server.settings import ServerSettings

pytestmark = pytest.mark.slow
traced = pytest.mark.skipif(not WORKS, reason="processes are traced on Linux on x86-64 alone")

TEXTS = {"lease.txt": LEASE, "recipe.txt": RECIPE, "long.txt": LEASE * 3}
KILLS = 6
"""Points that a run samples."""


def session(folder: Path, model: SeDeM, promise: Callable[[str], object]) -> None:
    """A server's life: two uploads, their building, a deletion; each promise is told."""
    with opened(ServerSettings(folder=folder), model) as library:
        upload(library, "one", {name: TEXTS[name] for name in ("lease.txt", "recipe.txt")})
        promise("lease.txt recipe.txt")
        library.turn()
        upload(library, "one", {"long.txt": TEXTS["long.txt"]})
        promise("lease.txt recipe.txt long.txt")
        library.turn()
        promise("lease.txt ?recipe.txt long.txt")
        library.remove_document("one", "recipe.txt")
        promise("lease.txt long.txt")
        library.turn()


def check(folder: Path, model: SeDeM, promised: str, where: str) -> None:
    """Reopen the folder: what was promised is read in the end, and nothing is half there."""
    needed = {name for name in promised.split() if not name.startswith("?")}
    allowed = {name.removeprefix("?") for name in promised.split()}
    with opened(ServerSettings(folder=folder), model) as library:
        finish(library)
        library.turn()
        entry = next(iter(library.uploads()), None)
        if promised:
            assert entry is not None and entry.bank is not None, where
            assert entry.progress().failed == (), where
        found: set[str] = set()
        if entry is not None and entry.bank is not None:
            found = set(entry.bank.documents.names)
            assert all(d.text == TEXTS[d.name] for d in entry.bank.documents), where
            with BankFile(entry.path).reading() as connection:
                assert connection.pragma("integrity_check") == "ok", where
        assert needed <= found, where
        # An upload whose answer was on its way may be there, each file as a whole.
        assert found - allowed <= ({"long.txt"} if "lease.txt" in allowed else {*TEXTS}), where
        assert not [*(folder / "uploads").iterdir()], where


def run(model: SeDeM, folder: Path, decide: Decide) -> tuple[Trace, str]:
    """Trace a session in a new folder; what it promised last."""
    shutil.rmtree(folder, ignore_errors=True)
    promises = folder.with_name("promises")
    promises.write_text("")
    done = trace(lambda: session(folder, model, promises.write_text), folder, decide)
    return done, promises.read_text()


@traced
def test_kills_lose_nothing_that_was_acknowledged(model: SeDeM, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    whole, promised = run(model, folder, go_on)
    assert (whole.error, promised) == ("", "lease.txt long.txt")
    check(folder, model, promised, "no kill")
    count = len(whole.changes)
    for at in range(0, count, max(1, count // KILLS)):
        change = whole.changes[at]
        for half in (False, True)[: 2 if change.kind == "write" else 1]:
            done, promised = run(model, folder, kill(at, half))
            assert done.error == ""
            where = f"killed {'within' if half else 'before'} change {at}, {change.kind} of "
            check(folder, model, promised, f"{where}{change.path.name}")


@traced
def test_a_full_disk_is_told_and_leaves_nothing_half_written(model: SeDeM, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    whole, _ = run(model, folder, go_on)
    takes = [at for at, c in enumerate(whole.changes) if c.kind in ("create", "write")]
    told = Counter[str]()
    for at in takes[:: max(1, len(takes) // KILLS)]:
        done, promised = run(model, folder, full(at, once=False, half=False))
        told[done.error.partition(":")[0]] += 1
        with opened(ServerSettings(folder=folder), model) as library:
            finish(library)
            assert not [*(folder / "uploads").iterdir()]
            if promised:
                entry = library.get("one")
                assert entry.bank is not None
                needed = {name for name in promised.split() if name[0] != "?"}
                assert needed <= {*entry.bank.documents.names}
    # At the start it is an error of the command, afterwards one of the request; a build notes it.
    # Of a bank, SQLite may say no more than that it cannot be opened.
    assert set(told) <= {"ConfigError", "FullDiskError", "BankError", ""}
    assert told["ConfigError"] and told["FullDiskError"]


@traced
def test_a_server_killed_while_it_compacts_loses_nothing(
    settings: ServerSettings, model: SeDeM, tmp_path: Path
) -> None:
    with opened(settings, model) as library:
        upload(library, "flat", TEXTS | {"long.txt": 16 * LEASE})
        finish(library)
        library.remove_document("flat", "lease.txt")
        library.remove_document("flat", "long.txt")
        file = library.writable("flat").path
    work = tmp_path / "work"

    def compact() -> None:
        with opened(settings.with_changes(folder=work), model) as library:
            finish(library)

    def run(kill_at: int | None) -> int:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(settings.folder, work)
        kill = Fate(kill=True)
        done = trace(compact, work, lambda at, _: kill if at == kill_at else go_on(at, _))
        assert not done.error and done.killed == (kill_at is not None)
        return len(done.changes)

    count = run(None)
    for at in range(0, count, max(1, count // KILLS)):
        run(at)
        with opened(settings.with_changes(folder=work), model) as again:
            bank = again.get("flat").bank
            assert bank is not None and [one.text for one in bank.documents] == [RECIPE]
            assert bank.memory(range(len(bank))).isfinite().all()
            finish(again)
            assert stored_names(again.writable("flat").path) == ["recipe.txt"]
            with BankFile(work / "banks" / file.name).reading() as connection:
                assert connection.pragma("integrity_check") == "ok"

"""Kills in the middle of uploads and builds: what was acknowledged is there afterwards."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from faults.crashes import Full, Kill
from faults.tracing import WORKS, Decide, Trace, go_on, trace

from sedem import SeDeM, types
from sedem.bank.file import BankFile
from sedem.errors import DataError
from sedem.serve import parsing
from sedem.serve.building import Builder
from sedem.serve.file_records import new_file
from sedem.serve.keys import Key
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.settings import Settings
from sedem.serve.uploads import Upload

traced = pytest.mark.skipif(not WORKS, reason="processes are traced on Linux on x86-64 alone")

TEXTS = {"lease.txt": LEASE, "recipe.txt": RECIPE, "long.txt": LEASE * 3}
KILLS = 6
"""Points that a run samples."""


class HereParser(parsing.ParserProcess):
    """Parses in the process itself."""

    def parse(
        self, path: Path, name: str, stopped: Callable[[], bool] = lambda: False
    ) -> types.Document:
        answer = parsing._parsed(path, name)
        if "error" in answer:
            raise DataError(str(answer["error"]))
        return types.Document(name, str(answer["text"]))


@contextmanager
def opened(folder: Path, model: SeDeM) -> Iterator[tuple[Library, Builder]]:
    library = Library(Settings(folder=folder), model)
    try:
        yield library, Builder(library, model, Metrics(), HereParser())
    finally:
        library.close()


def body_of(*names: str) -> bytes:
    parts = [
        f'--edge\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        f"{TEXTS[name]}\r\n"
        for name in names
    ]
    return ("".join(parts) + "--edge--\r\n").encode()


def upload(library: Library, bank: str, *names: str) -> None:
    """What the route does, in one thread."""
    received = Upload(library.files, 10**6, 10)
    try:
        parser, body = received.parser(b"edge"), body_of(*names)
        for start in range(0, len(body), 100):
            parser.write(body[start : start + 100])
        received.check_complete()
        files = [new_file(r.path, "admin", r.name, "assistants") for r in received.received]
        received.keep(lambda: library.upload(bank, files))
    finally:
        received.discard()


def session(folder: Path, model: SeDeM, promise: Callable[[str], object]) -> None:
    """A server's life: two uploads, their building, a deletion; each promise is told."""
    with opened(folder, model) as (library, builder):
        upload(library, "one", "lease.txt", "recipe.txt")
        promise("lease.txt recipe.txt")
        builder.turn()
        upload(library, "one", "long.txt")
        promise("lease.txt recipe.txt long.txt")
        builder.turn()
        promise("lease.txt ?recipe.txt long.txt")
        library.remove_document("one", "recipe.txt")
        promise("lease.txt long.txt")
        builder.turn()


def check(folder: Path, model: SeDeM, promised: str, where: str) -> None:
    """Reopen the folder: what was promised is read in the end, and nothing is half there."""
    needed = {name for name in promised.split() if not name.startswith("?")}
    allowed = {name.removeprefix("?") for name in promised.split()}
    with opened(folder, model) as (library, builder):
        while builder.turn():
            pass
        library.remove_deleted()
        names = library.names(Key("admin", ""))
        entry = library.get("one") if names else None
        if promised:
            assert entry is not None and entry.bank is not None, where
            assert entry.progress().failed == (), where
        found: set[str] = set()
        if entry is not None and entry.bank is not None:
            found = set(entry.bank.documents.names)
            assert all(d.text == TEXTS[d.name] for d in entry.bank.documents), where
            with BankFile(entry.file).reading() as connection:
                assert connection.pragma("integrity_check") == "ok", where
        assert needed <= found, where
        # An upload whose answer was on its way may be there, but only as a whole.
        extra = found - allowed
        assert not extra or extra in ({"lease.txt", "recipe.txt"}, {"long.txt"}), where
        rows = {row["id"] for row in library.database.rows("SELECT id FROM files")}
        assert {path.name for path in library.files.folder.iterdir()} == rows, where


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
            done, promised = run(model, folder, Kill(at, half))
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
        done, promised = run(model, folder, Full(at, once=False, half=False))
        told[done.error.partition(":")[0]] += 1
        with opened(folder, model) as (library, builder):
            while builder.turn():
                pass
            rows = {row["id"] for row in library.database.rows("SELECT id FROM files")}
            assert {path.name for path in library.files.folder.iterdir()} == rows
            if promised:
                entry = library.get("one")
                files = {file.name: file for file in library.reading.of(entry.id or 0)}
                for name in promised.split():
                    assert name.startswith("?") or files[name].status in ("completed", "failed")
    # At the start it is an error of the command, afterwards one of the request; a build notes it.
    # Of a bank, SQLite may say no more than that it cannot be opened.
    assert set(told) <= {"ConfigError", "FullDiskError", "BankError", ""}
    assert told["ConfigError"] and told["FullDiskError"]

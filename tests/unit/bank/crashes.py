"""A machine that stops at one of the calls that change its disk."""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sedem.bank.store import catalog, shard

CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "link")


class Stop(BaseException):
    """The library must not catch it."""


class Machine:
    """Counts the calls that change the disk, and stops before or after one of them.

    A machine that has stopped changes nothing more, whatever the library tries to clean up.

    Args:
        at: number of the call, from 1; None never stops.
        after: whether that call is still made.
    """

    def __init__(self, at: int | None = None, after: bool = False) -> None:
        self.at = at
        self.after = after
        self.calls = 0

    @property
    def stopped(self) -> bool:
        return self.at is not None and self.calls >= self.at

    def watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.stopped:
                raise Stop
            self.calls += 1
            if self.stopped and not self.after:
                raise Stop
            result = real(*arguments, **options)
            if self.stopped:
                raise Stop
            return result

        return call

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the library on this machine."""
        machine = self

        class Watched(sqlite3.Connection):
            def __exit__(self, *reason: Any) -> Any:
                if machine.stopped or reason[0]:
                    return super().__exit__(*reason)
                try:
                    return machine.watched(super().__exit__)(*reason)
                except Stop:
                    self.rollback()
                    raise

            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                run = super().execute
                changes = statement.startswith(("VACUUM", "PRAGMA wal"))
                return (machine.watched(run) if changes else run)(statement, *values)

        with pytest.MonkeyPatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, self.watched(getattr(os, name)))
            patched.setattr(shard, "save_tensors", self.watched(shard.save_tensors))
            connect = functools.partial(sqlite3.connect, factory=Watched)
            patched.setattr(catalog.sqlite3, "connect", connect)
            with contextlib.suppress(Stop):
                yield


def every_stop(run: Callable[[Machine], None]) -> Iterator[Machine]:
    """Machines that stop before and after each call of an operation.

    Args:
        run: runs the operation once on a machine, on a new bank each time.

    Yields:
        Each machine, after the operation ran on it.
    """
    whole = Machine()
    run(whole)
    assert whole.calls
    for at in range(1, whole.calls + 1):
        for after in (False, True):
            machine = Machine(at, after)
            run(machine)
            assert machine.stopped
            yield machine

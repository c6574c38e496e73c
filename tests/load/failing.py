"""`sedem`, with an engine that fails when a signal says so: `python -m load.failing serve ...`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from load.target import SIGNALS
from torch import Tensor

from sedem import SeDeM
from sedem.cli.main import app
from sedem.engine.interface import Engine, Rows


class Fuse:
    """What is to fail next; nothing at first."""

    def __init__(self) -> None:
        self.armed: set[str] = set()

    def fail(self, what: str) -> None:
        """Let the next "step" or "prefill" fail."""
        self.armed.add(what)

    def check(self, what: str) -> None:
        """Fail if this is what was to fail.

        Raises:
            RuntimeError: it was.
        """
        if what in self.armed:
            self.armed.remove(what)
            raise RuntimeError(f"this {what} was made to fail")


class FailingRows:
    """Rows of an engine that fail once the fuse is armed."""

    def __init__(self, rows: Rows, fuse: Fuse) -> None:
        self._rows, self._fuse = rows, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def join(self, *arguments: Any) -> Tensor:
        self._fuse.check("prefill")
        return self._rows.join(*arguments)

    def step(self, ids_B: Tensor) -> Tensor:
        self._fuse.check("step")
        return self._rows.step(ids_B)


def make_failing(engine: Engine, fuse: Fuse) -> None:
    """Let an engine fail as a fuse says."""
    opened = engine.open_rows

    @contextmanager
    def open_rows(count: int) -> Iterator[FailingRows]:
        with opened(count) as rows:
            yield FailingRows(rows, fuse)

    engine.open_rows = open_rows  # type: ignore[method-assign]


def main() -> None:
    """Run the command line; every model that it opens can fail."""
    fuse, opened = Fuse(), SeDeM.from_pretrained

    def open_failing(*arguments: Any, **settings: Any) -> SeDeM:
        model = opened(*arguments, **settings)
        make_failing(model.engine, fuse)
        return model

    SeDeM.from_pretrained = open_failing  # type: ignore[method-assign, assignment]
    for what, number in SIGNALS.items():
        signal.signal(number, lambda *_, what=what: fuse.fail(what))  # type: ignore[misc]
    app()


if __name__ == "__main__":
    main()

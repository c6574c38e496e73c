"""What the commands write: results on stdout, notes, errors and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import typer

from sedem.errors import DataError, printable
from sedem.untrusted import json_text

Cell = str | tuple[str, ...]
"""One cell of a table: a line, or several lines below each other."""

GAP = 2
"""Spaces between two columns."""

QUESTION_BYTES = 2**20
"""Limit of a line on stdin; no model reads a question as long."""


def write(text: str = "") -> None:
    """Write one line to stdout, with unsafe characters escaped."""
    typer.echo(printable(text))


def note(text: str) -> None:
    """Write one line of information to stderr."""
    typer.echo(printable(f"note: {text}"), err=True)


def error(text: str) -> None:
    """Write one line about a failure to stderr."""
    typer.echo(printable(f"error: {text}"), err=True)


def print_json(value: object) -> None:
    r"""Write a JSON value in one line; unsafe characters become `\u` escapes of JSON."""
    typer.echo(json_text(value))


def report(as_json: bool, value: object, *lines: str) -> None:
    """Write a result: as JSON, or as the lines that say the same."""
    if as_json:
        print_json(value)
        return
    for line in lines:
        write(line)


# Tables


def print_table(
    rows: Sequence[Sequence[Cell]], headings: Sequence[str] = (), left: Collection[int] = (0,)
) -> None:
    """Write rows as columns; a line of a row is one line, whatever its length.

    Args:
        rows: cells, as many in each row.
        headings: of the columns; none for a list of names and values.
        left: columns of text, aligned left; the others hold numbers and are aligned right.
    """
    from rich.cells import cell_len

    lines = [
        [printable(part) for part in line]
        for row in ([headings] if headings else []) + [*rows]
        for line in zip_longest(*([c] if isinstance(c, str) else c for c in row), fillvalue="")
    ]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = []
        for index, (part, width) in enumerate(zip(line, widths, strict=True)):
            spaces = " " * (width - cell_len(part))
            padded.append(part + spaces if index in left else spaces + part)
        typer.echo((" " * GAP).join(padded).rstrip())


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Write names with their values; numbers are aligned right among each other."""
    shown = [(name.replace("_", " "), value) for name, value in facts]
    numbers = [f"{value:,}" for _, value in shown if isinstance(value, int | float)]
    width = max(map(len, numbers), default=0)
    print_table(
        [
            (name, f"{value:,}".rjust(width) if isinstance(value, int | float) else str(value))
            for name, value in shown
        ],
        left=(0, 1),
    )


def terminal_width() -> int | None:
    """Return the columns of the terminal that stdout is, or None where it is none."""
    from rich.console import Console

    return Console(force_terminal=True).width if sys.stdout.isatty() else None


def questions_from_stdin() -> Iterator[str]:
    """Yield the questions on stdin, one a line; at a terminal, say how to end.

    Bytes that are not UTF-8 become halves of surrogate pairs, which no question may have.

    Raises:
        DataError: a line is so long that nothing tells where it ends.
    """
    if sys.stdin.isatty():
        typer.echo("one question a line; end with Ctrl-D", err=True)
    while line := sys.stdin.buffer.readline(QUESTION_BYTES + 1):
        if len(line) > QUESTION_BYTES:
            raise DataError(
                f"a line on stdin has more than {QUESTION_BYTES:,} bytes; give one question a line"
            )
        if question := line.decode("utf-8", "surrogateescape").strip():
            yield question


# Progress


@contextmanager
def progress(
    what: str, *, of_bytes: bool = False, speed: str = ""
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr.

    Args:
        what: names the work in front of the bar.
        of_bytes: whether the steps are bytes, shown as kB, MB or GB.
        speed: unit of a number behind the bar, such as "tokens/s"; empty shows none.

    Yields:
        A callback that takes the steps done and the steps in all, and the number.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        *([TextColumn("{task.fields[speed]:,.0f} " + speed)] if speed else []),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(what, total=None, speed=0.0)

    def show(done: int, total: int, speed: float = 0.0, /) -> None:
        # The bar starts with the first step, so an error before it stays a single line.
        bar.start()
        bar.update(task, completed=done, total=total, speed=speed)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 block", "1,200 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

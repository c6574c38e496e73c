"""What a person sees: progress on stderr; answers, sources and tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from sedem.bank import MemoryBank
    from sedem.contracts import Answer
    from sedem.model import SeDeM


def print_answer(
    model: SeDeM, bank: MemoryBank, question: str, k: int | str | None, decoding: Any = None
) -> None:
    """The answer as it comes, then its sources."""
    options = {} if decoding is None else {"decoding": decoding}
    stream = model.stream(bank, question, k=k, **options)
    for piece in stream:
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    assert stream.answer is not None
    typer.echo("")
    print_sources(stream.answer)


def print_sources(answer: Answer) -> None:
    """The spans that an answer was conditioned on, best first, and what was cut."""
    for citation in answer.citations:
        snippet = " ".join(citation.text.split())
        shown = snippet if len(snippet) <= 100 else f"{snippet[:97]}..."
        typer.echo(
            f"  [{citation.rank}] {citation.document}:{citation.start}-{citation.end} "
            f"({citation.score:.1f})  {shown}"
        )
    for sentence in answer.cut:
        typer.echo(f"  note: {sentence}")
    typer.echo("")


def questions_from_stdin() -> Iterator[str]:
    """Questions, one a line; a person is told how to end."""
    if sys.stdin.isatty():
        typer.echo("one question a line; end with Ctrl-D", err=True)
    for line in sys.stdin:
        if line.strip():
            yield line.strip()


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, as a callback of done and total."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(what, total=None)

    def show(done: int, total: int) -> None:
        # Begun with the first step: an error before it is one line and nothing else.
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 block", "1,200 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_metrics(metrics: dict[str, Any]) -> None:
    """Means with their intervals, a line each, then the counts."""
    for name, value in metrics.items():
        if isinstance(value, dict) and "mean" in value:
            low, high = value["interval"]
            typer.echo(
                f"{name:<10} {value['mean']:6.2f}   [{low:.2f}, {high:.2f}]   n={value['n']}"
            )
    for name, value in metrics["counts"].items():
        typer.echo(f"{name.replace('_', ' '):<16} {value}")


def print_cost(result: dict[str, Any]) -> None:
    """Parameters and FLOPs by part, and what they assume."""
    parameters, flops = dict(result["parameters"]), dict(result["flops"])
    assumptions = flops.pop("assumptions")
    percent = parameters.pop("percent")
    for name, value in parameters.items():
        typer.echo(f"{name:<20} {value / 1e6:10.2f} M parameters")
    typer.echo(f"{'added':<20} {percent:10.2f} % of the backbone\n")
    for name, value in flops.items():
        typer.echo(f"{name:<20} {value / 1e9:10.1f} GFLOPs")
    typer.echo("for " + ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in assumptions.items()))

"""What a person sees: progress on stderr; answers, sources and tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from sedem.bank.memory_bank import MemoryBank
    from sedem.model import SeDeM
    from sedem.types import Answer


def printable(text: str) -> str:
    """A text on one line, with escapes in place of what would steer the terminal.

    Names of documents and models come with a bank, and anybody may have written it.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
        score = "" if citation.score is None else f" ({citation.score:.1f})"
        place = f"{printable(citation.document)}:{citation.start}-{citation.end}"
        typer.echo(f"  [{citation.rank}] {place}{score}  {shown}")
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
    """Means with their intervals, a line each, then the counts and what could not be answered."""
    for name, value in metrics.items():
        if isinstance(value, dict) and "mean" in value:
            low, high = value["interval"]
            typer.echo(
                f"{name:<28} {value['mean']:9.2f}   [{low:.2f}, {high:.2f}]   n={value['n']}"
            )
    counts = metrics["counts"]
    for name, value in counts.items():
        typer.echo(f"{name.replace('_', ' '):<28} {value}")
    if counts["not_answered"]:
        typer.echo(
            f"{counts['not_answered']:,} of {counts['examples']:,} could not be answered and count "
            f"as wrong; the first, {metrics['first_error']}"
        )


HEADINGS = {
    "em": "EM",
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "string_match": "match",
    "recall": "recall@K",
    "mrr": "MRR",
    "conditioning": "positions",
    "bytes_per_token": "B/token",
    "ttft_ms": "TTFT ms",
}


def print_report(report: dict[str, Any]) -> None:
    """Runs side by side, means above intervals; then differences to the first; then notes."""
    lines = [["", *HEADINGS.values()]]
    for number, run in enumerate(report["runs"], start=1):
        lines += _run_lines(number, run)
    print_columns(lines)
    if report["differences"]:
        typer.echo("")
        numbers = {run["run"]: number for number, run in enumerate(report["runs"], start=1)}
        names = report["differences"][0]["metrics"]
        lines = [["less run 1, paired", *(HEADINGS[name] for name in names)]]
        for entry in report["differences"]:
            lines += _difference_lines(numbers[entry["run"]], entry)
        print_columns(lines)
    for run in report["runs"]:
        if run["not_answered"]:
            typer.echo(f"note: '{run['run']}' has {run['not_answered']:,} not answered", err=True)
    for problem in report["problems"]:
        typer.echo(f"note: {problem}", err=True)


def _run_lines(number: int, run: dict[str, Any]) -> list[list[str]]:
    k, control, batch = run["k"], run["control"], run["batch"]
    about = [run["method"], f"K={k}" if k else None, None if control == "selected" else control]
    about += [f"batch={batch}" if batch > 1 else None, f"n={run['n']:,}"]
    found = run["metrics"]
    means = {name: f"{metric['mean']:.1f}" for name, metric in found.items()}
    if "recall" in means:
        means["recall"] += f" @{run['recall_at']}"
    bounds = [_bounds(found[name]) if name in found else "" for name in HEADINGS]
    return [
        [f"{number}  {run['run']}", *(means.get(name, "-") for name in HEADINGS)],
        [f"   {' '.join(filter(None, about))}", *bounds],
    ]


def _difference_lines(number: int, entry: dict[str, Any]) -> list[list[str]]:
    found = list(entry["metrics"].values())
    return [
        [f"{number}  {entry['run']}", *(f"{metric['mean']:+.1f}" for metric in found)],
        ["   95 % interval", *map(_bounds, found)],
        ["   resamples below zero", *(f"{100 * metric['below_zero']:.1f} %" for metric in found)],
    ]


def _bounds(metric: dict[str, Any]) -> str:
    low, high = metric["interval"]
    return f"{low:.1f}..{high:.1f}"


def print_columns(lines: list[list[str]]) -> None:
    """Rows of cells in columns: the first one left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        typer.echo("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def print_cost(result: dict[str, Any]) -> None:
    """Print parameters and FLOPs by part, and what they assume."""
    parameters = dict(result["parameters"])
    _print_parameters(parameters, parameters.pop("percent"))
    _print_flops(dict(result["flops"]))


def print_baseline_cost(result: dict[str, Any]) -> None:
    """Print parameters and FLOPs of a trained baseline, and what they assume."""
    parameters = dict(result["parameters"])
    _print_parameters(parameters, parameters.pop("percent_without_lora"))
    _print_flops(dict(result["flops"]))


def _print_parameters(parameters: dict[str, int], percent: float) -> None:
    for name, value in parameters.items():
        typer.echo(f"{name.replace('_', ' '):<20} {value / 1e6:10.2f} M parameters")
    typer.echo(f"{'added':<20} {percent:10.2f} % of the backbone\n")


def _print_flops(flops: dict[str, Any]) -> None:
    assumptions = flops.pop("assumptions")
    for name, value in flops.items():
        typer.echo(f"{name:<20} {value / 1e9:10.1f} GFLOPs")
    typer.echo("for " + ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in assumptions.items()))

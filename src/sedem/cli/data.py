"""The verbs of `sedem data`: look at a set before training on it or measuring with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sedem.cli import output
from sedem.cli.options import Json, OptionEntries, parse_options
from sedem.errors import ConfigError

if TYPE_CHECKING:
    from sedem.data.inspection import Inspection

WIDTH = 40
"""Characters of the longest bar of a histogram."""

data_app = typer.Typer(no_args_is_help=True, help="Look at questions and texts before using them.")


@data_app.callback()
def _group() -> None:
    """Keeps the one verb a verb."""


@data_app.command("inspect")
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A public name, a file or a folder.")
    ],
    schema: Annotated[str | None, typer.Option(help="Its schema, if not found out.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a public set: train, validation.")] = None,
    records: Annotated[str | None, typer.Option(help="Records to read, as start:stop.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Measure only the first N.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id. [default: sedem-nano's]")
    ] = None,
    options: OptionEntries = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read no further than --records, keep no copy.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the histograms.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a set holds: examples, what was left out and why, lengths in tokens and blocks."""
    from sedem.data.inspection import plot

    chosen = parse_options(options)
    with output.progress("counting") as report_progress:
        if schema is None and _is_text(source):
            unused = {"split": split, "records": records, "option": chosen or None}
            for name, value in unused.items():
                if value is not None:
                    raise ConfigError(f"--{name} is for questions; '{source}' is plain text")
            found = _texts(source, tokenizer, limit, report_progress)
        else:
            chosen.update(records=records, split=split, streaming=streaming)
            found = _examples(source, schema, chosen, tokenizer, limit, report_progress)
    if picture is not None:
        plot(found, picture)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        print_inspection(found)


def print_inspection(found: Inspection) -> None:
    """Counts, then every measure with its histogram."""
    from sedem.data.inspection import bins, summary

    typer.echo(f"{found.name}, tokens of {found.tokenizer}\n")
    for name, value in found.counts.items():
        typer.echo(f"{name:<22} {value:>13,}")
    for title, reasons in (("left out", found.dropped), ("repaired or odd", found.noted)):
        typer.echo(f"{title:<22} {sum(reasons.values()):>13,}")
        for reason, value in reasons.items():
            named = ", ".join(found.dropped_ids.get(reason, ()))
            typer.echo(f"  {value:>8,}  {reason}" + (f" (such as {named})" if named else ""))
    for name, values in found.measures.items():
        told = summary(values)
        typer.echo(
            f"\n{name}: mean {told['mean']:,.1f}, median {told['median']:,.0f}, "
            f"{told['min']:,} to {told['max']:,}"
        )
        bars = bins(values)
        most = max(number for *_, number in bars)
        for low, high, number in bars:
            label = f"{low:,}" if low == high else f"{low:,}-{high:,}"
            bar = "█" * round(WIDTH * number / most) or ("▏" if number else "")
            typer.echo(f"{label:>19}  {bar:<{WIDTH}} {number:>9,}")


def _is_text(source: str) -> bool:
    from sedem.data.corpus import holds_texts

    return holds_texts(source)


def _texts(source: str, tokenizer: str | None, limit: int | None, progress: Any) -> Inspection:
    from sedem.data.corpus import read_texts
    from sedem.data.inspection import inspect_texts
    from sedem.data.tokenizer import open_tokenizer

    counter = open_tokenizer(tokenizer)
    return inspect_texts(source, read_texts(source), counter, limit=limit, progress=progress)


def _examples(
    source: str,
    schema: str | None,
    options: dict[str, Any],
    tokenizer: str | None,
    limit: int | None,
    progress: Any,
) -> Inspection:
    from sedem.data.inspection import inspect_examples
    from sedem.data.question_sets import counts_tokens, open_examples, sniff
    from sedem.data.tokenizer import open_tokenizer

    name = schema or sniff(source)
    if tokenizer is not None and counts_tokens(name):
        options.setdefault("tokenizer", tokenizer)
    examples = open_examples(source, name, **options)
    counter = open_tokenizer(tokenizer)
    return inspect_examples(examples, counter, limit=limit, progress=progress)

"""The command `sedem data inspect`: look at data before training or evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import Json, OptionEntries, data_options
from sedem.errors import ConfigError

LONGEST_BAR = 40
"""Characters of the longest bar of a histogram."""

data_app = typer.Typer(no_args_is_help=True, help="Look at data before training or evaluation.")


@data_app.callback()
def _group() -> None:
    """Keep `inspect` a subcommand: typer would merge a single command into its group."""


@data_app.command("inspect")
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A public name, a file or a folder.")
    ],
    schema: Annotated[
        str | None, typer.Option(metavar="NAME", help="Schema. [default: detected]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Measure only the first N.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or hub id. [default: sedem-nano's]"),
    ] = None,
    options: OptionEntries = None,
    streaming: Annotated[
        bool,
        typer.Option("--streaming", help="Stop after the records, and keep no copy."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the histograms (.svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count and measure the examples of a set.

    Shows what was left out and why, and lengths in tokens and blocks.
    """
    from sedem_lab.data.corpus import holds_texts, read_texts
    from sedem_lab.data.inspection import bins, inspect_examples, inspect_texts, plot, summary
    from sedem_lab.data.question_sets import counts_tokens, open_examples, sniff
    from sedem_lab.data.tokenizer import open_tokenizer

    chosen = data_options(options)
    with output.progress("counting") as report_progress:
        if schema is None and holds_texts(source):
            if chosen:
                raise ConfigError(f"--option is for questions; '{source}' is plain text")
            counter, texts = open_tokenizer(tokenizer), read_texts(source)
            found = inspect_texts(source, texts, counter, limit=limit, progress=report_progress)
        else:
            name = schema or sniff(source)
            if tokenizer is not None and counts_tokens(name):
                chosen.setdefault("tokenizer", tokenizer)
            examples = open_examples(source, name, streaming=streaming, **chosen)
            counter = open_tokenizer(tokenizer)
            found = inspect_examples(examples, counter, limit=limit, progress=report_progress)
    if picture is not None:
        plot(found, picture)
    if as_json:
        output.print_json(found.to_dict())
        return
    # The counts, what was left out or repaired, and a histogram of each measure.
    output.write(f"{found.name}, tokens of {found.tokenizer}")
    output.write()
    reasons = {"left out": found.dropped, "repaired or odd": found.noted}
    totals = {title: sum(counts.values()) for title, counts in reasons.items()}
    output.print_facts({**found.counts, **totals}.items())
    for title, counts in reasons.items():
        rows = [
            (f"{number:,}", reason, ", ".join(found.dropped_ids.get(reason, ())))
            for reason, number in counts.items()
        ]
        if rows:
            output.write()
            output.print_table(rows, (title, "reason", "such as"), left=(1, 2))
    for name, values in found.measures.items():
        told = summary(values)
        output.write()
        output.write(
            f"{name}: mean {told['mean']:,.1f}, median {told['median']:,.0f}, "
            f"{told['min']:,} to {told['max']:,}"
        )
        # For each bin its first and last number, how many values, and a bar, unless it is empty.
        bars = bins(values)
        labels = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high, _ in bars]
        width, mark = LONGEST_BAR, "#"
        if (columns := output.terminal_width()) is not None:
            taken = max(map(len, labels)) + max(len(f"{number:,}") for *_, number in bars)
            width, mark = max(1, min(width, columns - taken - 2 * output.GAP)), "█"
        most = max(number for *_, number in bars)
        rows = [
            (label, f"{number:,}", mark * (max(1, round(width * number / most)) if number else 0))
            for label, (*_, number) in zip(labels, bars, strict=True)
        ]
        output.print_table(rows, left=(2,))

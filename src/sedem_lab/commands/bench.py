"""The command `sedem bench`: times of methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import BudgetOption, Json, Model
from sedem.config import parse_k
from sedem.errors import ConfigError


def bench(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD",
            help="Names of 'sedem eval --list'. [default: all but trained baselines]",
        ),
    ] = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option(
            "--context", metavar="N", help="Context in tokens; repeatable. [default: 1024, 8192]"
        ),
    ] = None,
    k: BudgetOption = None,
    model: Model = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Use a shape with random weights instead: llama-3.2-1b, llama-3.2-3b, or the "
            "folder of a backbone.",
        ),
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Measured runs of each method.")] = 20,
    picture: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw times here, as .svg or .png."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast methods read and answer, on a GPU if there is one."""
    chosen_k = parse_k(k)
    if picture is not None and (
        picture.suffix not in (".svg", ".png") or not picture.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"no picture can be drawn as '{picture}'; name a .svg or .png file in a folder"
        )
    from sedem_lab.bench.measure import notes, run_bench
    from sedem_lab.bench.report import HEADINGS, draw, lines
    from sedem_lab.bench.subjects import plan_of

    given = {
        "methods": tuple(methods or ()), "contexts": tuple(contexts or ()), "k": chosen_k,
        "checkpoint": model, "backbone": backbone, "runs": runs,
    }  # fmt: skip
    plan = plan_of({name: value for name, value in given.items() if value not in (None, ())})
    for caveat in notes(plan):
        output.note(caveat)
    with output.progress("measuring") as report_progress:
        document = run_bench(plan, progress=report_progress)
    if picture is not None:
        draw(document, picture)
    for name, why in document["left_out"].items():
        output.note(f"{name} is left out: {why}")
    if as_json:
        output.print_json(document)
    else:
        output.print_table(lines(document), HEADINGS, left=(1, 2))

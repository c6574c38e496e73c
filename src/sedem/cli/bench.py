"""The command `sedem bench`: speed and memory of methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import BudgetOption, EngineOption, Json, Model, budget
from sedem.config import DEFAULT_MODEL


def bench(
    context: typer.Context,
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
    batches: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            metavar="N",
            help="Also answer N questions over one memory at once; repeatable.",
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE",
            help="How SeDeM stores slots: bfloat16, int8 or fp8; repeatable. [default: bfloat16]",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Weights of SeDeM's decoding steps: full, or int8 on a CPU; repeatable. "
            "[default: full]",
        ),
    ] = None,
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
    answer_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer.")] = 33,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text of the contexts. [default: the demo's]"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cpu or cuda. [default: cuda if there is a GPU]"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="float32 or bfloat16. [default: bfloat16 on a GPU, else float32]",
        ),
    ] = None,
    engine: EngineOption = "auto",
    kept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="Keys and values of SeDeM's independent blocks: cold (none is kept) or warm (all "
            "are kept ahead); repeatable. [default: cold]",
        ),
    ] = None,
    block_context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run SeDeM with joint, separate or independent blocks. [default: the model's own]",
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(help="Read the documents in every run, or once to time answers only."),
    ] = True,
    cold_start: Annotated[
        bool,
        typer.Option("--cold-start", help="Also time a question in fresh processes."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for bench.json and a plot; resumable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the speed and memory of methods."""
    chosen_k = budget(k)
    from sedem.backbone.loading import hide_bars
    from sedem.bench.command import notes, run_bench
    from sedem.bench.plan import Plan

    given = context.params | {"k": chosen_k, "checkpoint": model or DEFAULT_MODEL}
    empty = (None, ())  # an option that was not given, or a repeatable one
    entries = {n: v for n, v in given.items() if n in Plan.model_fields and v not in empty}
    plan = Plan.from_entries(entries, "sedem bench")
    for caveat in notes(plan):
        output.note(caveat)
    hide_bars()
    with output.progress("measuring") as report_progress:
        document = run_bench(plan, out, report_progress)
    if out is not None:
        from sedem.bench.report import draw

        for ending in (".svg", ".png"):
            draw(document, out / f"ttft{ending}")
    for name, why in document["left_out"].items():
        output.note(f"{name} is left out: {why}")
    if as_json:
        output.print_json(document)
        return
    if (seconds := document["cold_start"]) is not None:
        parts = (f"{part.replace('_', ' ')} {spent:.2f}" for part, spent in seconds.items())
        output.note(f"cold start, processor seconds: {', '.join(parts)}")
    from sedem.bench.report import lines

    headings, *rows = lines(document)
    # The method, how much it reads, and the batches, which are a text of any length.
    output.print_table(rows, headings, left=(1, 2, len(headings) - 1))

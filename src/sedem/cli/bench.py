"""The verb that measures speed and memory: bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sedem.cli import output
from sedem.cli.options import BudgetOption, EngineOption, Json, Model, budget
from sedem.config import DEFAULT_MODEL


def bench(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[METHOD...]",
            help="Methods of 'sedem eval --list', hf, hf-compiled, hf-prefix. "
            "[default: all but trained baselines]",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Context length in tokens; repeatable. [default: 1024, 8192]"),
    ] = None,
    k: BudgetOption = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Throughput of so many questions over one memory; repeatable."),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="What sedem stores slots as: bfloat16, int8 or fp8; repeatable. "
            "[default: bfloat16]"
        ),
    ] = None,
    model: Model = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="A shape on random weights instead: llama-3.2-1b, llama-3.2-3b."),
    ] = None,
    runs: Annotated[int, typer.Option(help="Counted turns of each method.")] = 20,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of every answer.")] = 33,
    blocks: Annotated[
        list[int] | None,
        typer.Option(help="Score a synthetic bank of so many blocks too; repeatable."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File that contexts are cut from. [default: the demo's]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. [default: a GPU if there is one]")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16. [default: bfloat16 on a GPU, else float32]"),
    ] = None,
    engine: EngineOption = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json and the plot; resumable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure times, memory and their floors of methods side by side."""
    chosen_k = budget(k)
    from transformers.utils.logging import disable_progress_bar

    from sedem.bench.command import notes, run_bench
    from sedem.bench.plan import Plan

    given = {
        "methods": methods,
        "contexts": context,
        "k": chosen_k,
        "batches": batch,
        "memory": memory,
        "checkpoint": model or DEFAULT_MODEL,
        "backbone": backbone,
        "runs": runs,
        "answer_tokens": answer_tokens,
        "device": device,
        "dtype": dtype,
        "engine": engine,
        "text": text,
        "blocks": blocks,
    }
    entries = {name: value for name, value in given.items() if value not in (None, [])}
    plan = Plan.from_entries(entries, "sedem bench")
    for note in notes(plan):
        typer.echo(f"note: {note}", err=True)
    disable_progress_bar()
    with output.progress("measuring") as report_progress:
        document = run_bench(plan, out, report_progress)
    if out is not None:
        from sedem.bench.plot import draw

        for ending in (".svg", ".png"):
            draw(document, out / f"ttft{ending}")
    for name, reason in document["left_out"].items():
        typer.echo(f"note: {name} is left out: {reason}", err=True)
    if as_json:
        typer.echo(json.dumps(document))
        return
    from sedem.bench.table import lines

    output.print_columns(lines(document))

"""The commands `sedem eval` and `sedem eval report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sedem.cli import output
from sedem.cli.options import (
    BudgetOption,
    EngineOption,
    Json,
    Model,
    OptionEntries,
    WeightsOption,
    budget,
    parse_options,
)
from sedem.cli.report import print_metrics, print_report
from sedem.evaluation.config import EvaluationConfig

METHOD = "METHOD"
DEFAULTS: dict[str, Any] = {
    name: field.default for name, field in EvaluationConfig.model_fields.items()
}


class MethodOrVerb(TyperGroup):
    """A group whose first word is a command or else the method to evaluate."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Resolve the first word to a command, or to the evaluation of that method."""
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return args[0], self.commands[METHOD], args[1:]


eval_app = typer.Typer(
    cls=MethodOrVerb,
    rich_markup_mode=None,
    subcommand_metavar="METHOD|report ...",
    help="Evaluate a method, or compare finished runs.",
    epilog="'sedem eval sedem --help' shows the options of a method.",
)


@eval_app.callback(invoke_without_command=True)
def evaluations(
    context: typer.Context,
    list_methods: Annotated[bool, typer.Option("--list", help="List the methods.")] = False,
) -> None:
    """Evaluate a method, or compare finished runs."""
    if list_methods:
        from sedem.evaluation.registry import METHODS

        rows = [(name, what) for name, (_, what) in METHODS.items()]
        output.print_table(rows, ("method", "what it does"), left=(0, 1))
    elif context.invoked_subcommand is None:
        raise typer.BadParameter("give a METHOD and --data, or 'report' and folders, or --list")


def _flag(setting: str, metavar: str) -> Any:
    """Return an option whose help is the docstring of a setting."""
    return typer.Option(metavar=metavar, help=EvaluationConfig.model_fields[setting].description)


@eval_app.command(METHOD)
def evaluate(
    context: typer.Context,
    data: Annotated[str, _flag("data", "NAME|FILE")],
    schema: Annotated[str | None, _flag("schema_name", "NAME")] = None,
    records: Annotated[str | None, _flag("records", "START:STOP")] = None,
    split: Annotated[str | None, _flag("split", "NAME")] = None,
    option: OptionEntries = None,
    limit: Annotated[int | None, _flag("limit", "N")] = None,
    k: BudgetOption = None,
    control: Annotated[str, _flag("control", "NAME")] = DEFAULTS["control"],
    condition: Annotated[str | None, _flag("condition", "NAME")] = None,
    model: Model = None,
    max_new_tokens: Annotated[int | None, _flag("max_new_tokens", "N")] = None,
    batch: Annotated[int, _flag("batch", "N")] = DEFAULTS["batch"],
    shift: Annotated[int, _flag("shift", "N")] = DEFAULTS["shift"],
    memory: Annotated[str, _flag("memory", "TYPE")] = DEFAULTS["memory"],
    kept_dtype: Annotated[str | None, _flag("kept_dtype", "TYPE")] = None,
    dtype: Annotated[str, _flag("dtype", "TYPE")] = DEFAULTS["dtype"],
    engine: EngineOption = DEFAULTS["engine"],
    weights: WeightsOption = DEFAULTS["weights"],
    seed: Annotated[int, _flag("seed", "N")] = DEFAULTS["seed"],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for predictions and metrics; resumable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a method on a set of questions."""
    from sedem.evaluation.registry import default_checkpoint

    method = str(context.info_name)
    entries = {
        "method": method,
        "data": data,
        "schema_name": schema,
        "records": records,
        "split": split,
        "options": parse_options(option),
        "limit": limit,
        "k": budget(k),
        "control": control,
        "condition": condition,
        "checkpoint": model or default_checkpoint(method),
        "max_new_tokens": max_new_tokens,
        "batch": batch,
        "shift": shift,
        "memory": memory,
        "kept_dtype": kept_dtype,
        "dtype": dtype,
        "engine": engine,
        "weights": weights,
        "seed": seed,
    }
    config = EvaluationConfig.from_entries(entries, "sedem eval")
    from sedem.backbone.loading import hide_bars
    from sedem.evaluation.command import run_evaluation

    hide_bars()
    with output.progress("answering") as report_progress:
        metrics = run_evaluation(config, out, report_progress)
    if as_json:
        output.print_json(metrics)
    else:
        print_metrics(metrics)


@eval_app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders that --out named.")],
    as_json: Json = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the runs (.svg, .png or .pdf)."),
    ] = None,
) -> None:
    """Compare finished runs side by side.

    Each run over the same examples as the first is also compared with it example by example.
    """
    from sedem.evaluation.report import draw
    from sedem.evaluation.report import report as compare_runs

    result = compare_runs(folders)
    if plot is not None:
        draw(result, plot)
    if as_json:
        output.print_json(result)
    else:
        print_report(result)

"""The commands `sedem eval` and `sedem eval report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sedem.cli import output
from sedem.cli.options import (
    AS_TEXT,
    AnswerOption,
    BudgetOption,
    ConditionOption,
    EngineOption,
    HopsOption,
    Json,
    Model,
    OptionEntries,
    SelectionOption,
    data_options,
    option_of,
    settings_of,
)
from sedem.config import DEFAULT_MODEL, parse_hops, parse_k
from sedem.errors import ConfigError
from sedem_lab.evaluation.config import EvaluationConfig

METHOD = "METHOD"
SETTINGS = ("batch", "device", "dtype", "memory", "seed", "shift")
"""Settings that --set changes."""
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
_flag = partial(option_of, EvaluationConfig)
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
        from sedem_lab.baselines.registry import methods

        rows = [(name, method.what) for name, method in methods().items()]
        output.print_table(rows, ("method", "what it does"), left=(0, 1))
    elif context.invoked_subcommand is None:
        raise typer.BadParameter("give a METHOD and --data, or 'report' and folders, or --list")


@eval_app.command(METHOD)
def evaluate(
    context: typer.Context,
    data: Annotated[str, _flag("data", "NAME|FILE")],
    schema_name: Annotated[str | None, _flag("schema_name", "NAME", "--schema")] = None,
    option: OptionEntries = None,
    limit: Annotated[int | None, _flag("limit", "N")] = None,
    k: BudgetOption = None,
    control: Annotated[str, _flag("control", "NAME")] = DEFAULTS["control"],
    condition: ConditionOption = None,
    selection: SelectionOption = None,
    hops: HopsOption = None,
    answer: AnswerOption = None,
    model: Model = None,
    max_new_tokens: Annotated[int | None, _flag("max_new_tokens", "N")] = None,
    engine: EngineOption = DEFAULTS["engine"],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=f"Change another setting; repeatable. The names: {', '.join(SETTINGS)}.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for predictions and metrics; resumable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a method on a set of questions."""
    from sedem_lab.baselines.registry import find

    method = str(context.info_name)
    if model is None and find(method).trained:
        raise ConfigError(
            f"{method} has no shipped checkpoint; train one with 'sedem train' and name it with -m"
        )
    given = {n: v for n, v in context.params.items() if n in EvaluationConfig.model_fields}
    options = data_options(option)
    given |= {name: options.pop(name, None) for name in AS_TEXT}
    entries = given | settings_of(changes, "setting", SETTINGS)
    entries |= {
        "method": method,
        "options": options,
        "k": parse_k(k),
        "hops": parse_hops(hops),
        "checkpoint": model or DEFAULT_MODEL,
    }
    config = EvaluationConfig.from_entries(entries, "sedem eval")
    from sedem_lab.evaluation.command import run_evaluation

    with output.progress("answering") as report_progress:
        metrics = run_evaluation(config, out, report_progress)
    if as_json:
        output.print_json(metrics)
        return
    # Means with their intervals, then the counts, then the first failure if there is one.
    rows = []
    for name, value in metrics.items():
        if isinstance(value, dict) and "mean" in value:
            low, high = value["interval"]
            rows.append((name, f"{value['mean']:.2f}", f"[{low:.2f}, {high:.2f}]", f"{value['n']}"))
    output.print_table(rows, ("metric", "mean", "95 % interval", "n"))
    output.write()
    counts = metrics["counts"]
    output.print_facts(counts.items())
    if counts["not_answered"]:
        output.write(
            f"{counts['not_answered']:,} of {counts['examples']:,} could not be answered and count "
            f"as wrong; the first, {metrics['first_error']}"
        )


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
    from sedem_lab.evaluation.report import draw
    from sedem_lab.evaluation.report import report as compare_runs

    result = compare_runs(folders)
    if plot is not None:
        draw(result, plot)
    if as_json:
        output.print_json(result)
    else:
        print_report(result)


def print_report(report: dict[str, Any]) -> None:
    """Write runs side by side, means above intervals; then differences to the first; then notes."""
    runs = report["runs"]
    rows: list[list[output.Cell]] = []
    for number, run in enumerate(runs, start=1):
        k, control, batch, metrics = run["k"], run["control"], run["batch"], run["metrics"]
        about = [run["method"], f"K={k}" if k else None, None if control == "selected" else control]
        about += [f"batch={batch}" if batch > 1 else None, f"n={run['n']:,}"]
        means = {name: f"{metric['mean']:.1f}" for name, metric in metrics.items()}
        if "recall" in means:
            means["recall"] += f" @{run['recall_at']}"
        cells = [(means[n], _bounds(metrics[n])) if n in means else "-" for n in HEADINGS]
        rows.append([(f"{number}  {run['run']}", f"   {' '.join(filter(None, about))}"), *cells])
    output.print_table(rows, ("", *HEADINGS.values()))
    if report["differences"]:
        output.write()
        numbers = {run["run"]: number for number, run in enumerate(runs, start=1)}
        names = report["differences"][0]["metrics"]
        rows = []
        for entry in report["differences"]:
            shown = f"{numbers[entry['run']]}  {entry['run']}"
            rows.append([(shown, "   95 % interval", "   resamples below zero")])
            for metric in entry["metrics"].values():
                below = f"{100 * metric['below_zero']:.1f} %"
                rows[-1].append((f"{metric['mean']:+.1f}", _bounds(metric), below))
        output.print_table(rows, ("vs. run 1, paired", *(HEADINGS[name] for name in names)))
    for run in runs:
        if run["not_answered"]:
            output.note(f"'{run['run']}' has {run['not_answered']:,} not answered")
    for problem in report["problems"]:
        output.note(problem)


def _bounds(metric: dict[str, Any]) -> str:
    low, high = metric["interval"]
    return f"{low:.1f}..{high:.1f}"

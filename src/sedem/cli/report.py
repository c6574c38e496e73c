"""How results of eval, eval report and cost are written for a reader."""

from __future__ import annotations

from typing import Any

from sedem.cli.output import Cell, note, print_facts, print_table, write
from sedem.durable_files import bytes_text

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


def print_metrics(metrics: dict[str, Any]) -> None:
    """Write means with their intervals, then the counts, then the first failure if there is one."""
    rows = []
    for name, value in metrics.items():
        if isinstance(value, dict) and "mean" in value:
            low, high = value["interval"]
            rows.append((name, f"{value['mean']:.2f}", f"[{low:.2f}, {high:.2f}]", f"{value['n']}"))
    print_table(rows, ("metric", "mean", "95 % interval", "n"))
    write()
    counts = metrics["counts"]
    print_facts(counts.items())
    if counts["not_answered"]:
        write(
            f"{counts['not_answered']:,} of {counts['examples']:,} could not be answered and count "
            f"as wrong; the first, {metrics['first_error']}"
        )


def print_report(report: dict[str, Any]) -> None:
    """Write runs side by side, means above intervals; then differences to the first; then notes."""
    runs = report["runs"]
    rows = [_run_row(number, run) for number, run in enumerate(runs, start=1)]
    print_table(rows, ("", *HEADINGS.values()))
    if report["differences"]:
        write()
        numbers = {run["run"]: number for number, run in enumerate(runs, start=1)}
        names = report["differences"][0]["metrics"]
        rows = [_difference_row(numbers[entry["run"]], entry) for entry in report["differences"]]
        print_table(rows, ("vs. run 1, paired", *(HEADINGS[name] for name in names)))
    for run in runs:
        if run["not_answered"]:
            note(f"'{run['run']}' has {run['not_answered']:,} not answered")
    for problem in report["problems"]:
        note(problem)


def _run_row(number: int, run: dict[str, Any]) -> list[Cell]:
    k, control, batch = run["k"], run["control"], run["batch"]
    about = [run["method"], f"K={k}" if k else None, None if control == "selected" else control]
    about += [f"batch={batch}" if batch > 1 else None, f"n={run['n']:,}"]
    metrics = run["metrics"]
    means = {name: f"{metric['mean']:.1f}" for name, metric in metrics.items()}
    if "recall" in means:
        means["recall"] += f" @{run['recall_at']}"
    cells = [(means[name], _bounds(metrics[name])) if name in means else "-" for name in HEADINGS]
    return [(f"{number}  {run['run']}", f"   {' '.join(filter(None, about))}"), *cells]


def _difference_row(number: int, entry: dict[str, Any]) -> list[Cell]:
    name = (f"{number}  {entry['run']}", "   95 % interval", "   resamples below zero")
    return [
        name,
        *(
            (f"{metric['mean']:+.1f}", _bounds(metric), f"{100 * metric['below_zero']:.1f} %")
            for metric in entry["metrics"].values()
        ),
    ]


def _bounds(metric: dict[str, Any]) -> str:
    low, high = metric["interval"]
    return f"{low:.1f}..{high:.1f}"


def print_cost(result: dict[str, Any]) -> None:
    """Write parameters and FLOPs of SeDeM or of a trained baseline, and what they assume."""
    parameters = dict(result["parameters"])
    percent = parameters.pop("percent" if "percent" in parameters else "percent_without_lora")
    flops = dict(result["flops"])
    assumptions = flops.pop("assumptions")
    added = ("added", f"{percent:.2f}", "% of the backbone")
    rows = [
        (name.replace("_", " "), f"{value / 1e6:.2f}", "M parameters")
        for name, value in parameters.items()
    ]
    print_table([*rows, added], left=(0, 2))
    write()
    rows = [(name, f"{value / 1e9:.1f}", "GFLOPs") for name, value in flops.items()]
    print_table(rows, left=(0, 2))
    write("for " + ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in assumptions.items()))


def print_training_cost(result: dict[str, Any]) -> None:
    """Write what a training run will take, and what that assumes."""
    output: dict[str, int] = result["bytes"]
    tokens = result["tokens"]
    rows = [
        ("steps", f"{result['steps']:,}", f"of {result['examples_per_step']:,} examples"),
        ("examples", f"{result['examples']:,}", ""),
        ("tokens read frozen", f"{tokens['frozen'] / 1e9:.3f}", "billion"),
        ("positions with gradient", f"{tokens['with_gradient'] / 1e9:.3f}", "billion"),
        ("hours", f"{result['hours']:.3g}", ""),
    ]
    print_table(rows, left=(0, 2))
    write()
    rows = [(name, f"{value / 1e15:.4g}", "PFLOPs") for name, value in result["flops"].items()]
    print_table(rows, left=(0, 2))
    write()
    names = {"memory": "memory of a GPU", "cache_on_disk": "cache on disk"}
    print_table([(str(names.get(n, n)), bytes_text(value)) for n, value in output.items()])
    told = ", ".join(f"{n.replace('_', ' ')} {v:g}" for n, v in result["assumptions"].items())
    write(f"for {told}; activations and logits are estimates")

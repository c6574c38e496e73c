"""Every study at once: `python -m experiments run --scale smoke`, and the page of nano results."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import typer

from experiments import performance
from experiments.scales import NANO, ROOT, Scale
from experiments.study import DataOption, OnlyOption, ScaleOption, Study, fill, named

STUDIES = (
    "main_qa",
    "selection_budget",
    "operating_points",
    "controls",
    "ruler",
    "decompression",
    "learned_queries",
    "depth",
    "mixed_layers",
    "lora",
    "granularity",
    "transfer",
    "effective_rank",
    "decoder_length",
    "parameters",
    "parameter_overhead",
    "flops",
    "efficiency",
    "method_costs",
    "learning_rates",
    "shipped",
)
PAGE = ROOT / "docs" / "results-nano.md"
PICTURES = ("main_qa", "selection_budget", "decompression", "granularity")

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def study(name: str) -> Study:
    """A study by the name of its module."""
    found: Study = importlib.import_module(f"experiments.{name}").STUDY
    return found


@app.command()
def run(
    scale: ScaleOption = "nano", data: DataOption = Path("data"), only: OnlyOption = None
) -> None:
    """Measure every cell that is missing, of every study."""
    fill([study(name) for name in STUDIES], named(scale), data, only)


@app.command()
def page() -> None:
    """Write the tables and pictures of docs/results-nano.md and docs/performance.md."""
    from experiments import curves
    from experiments.figures import draw

    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), NANO), encoding="utf-8")
    for name in PICTURES:
        draw(study(name), NANO, PAGE.parent / f"nano-{name}.svg")
    curves.draw(NANO, PAGE.parent / "nano-curves.svg")
    performance.page()


def rendered(text: str, scale: Scale) -> str:
    """A page with the tables between its `<!-- study NAME -->` and `<!-- end -->` marks renewed."""

    def renewed(match: re.Match[str]) -> str:
        return f"{match[1]}\n{study(match[2]).markdown(scale)}\n<!-- end -->"

    return re.sub(r"(<!-- study (\w+) -->)\n.*?<!-- end -->", renewed, text, flags=re.DOTALL)


if __name__ == "__main__":
    app()

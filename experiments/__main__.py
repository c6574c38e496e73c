"""Every study at once: `run` measures what is missing, `page` writes the tables and pictures."""

from __future__ import annotations

from pathlib import Path

import typer

from experiments import STUDIES
from experiments.system import pages
from experiments.system.study import (
    DataOption,
    OnlyOption,
    ScaleOption,
    find,
    measure_missing,
    scale_named,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.command()
def run(
    scale: ScaleOption = "nano", data: DataOption = Path("data"), only: OnlyOption = None
) -> None:
    """Measure every missing cell of every study."""
    measure_missing([find(name) for name in STUDIES], scale_named(scale), data, only)


@app.command()
def page() -> None:
    """Write the tables and pictures of README.md, the model card and docs/."""
    for path in pages.PAGES:
        pages.write(path)


if __name__ == "__main__":
    app()

"""A table or figure of the paper: which cells it needs, and how it is shown beside the paper's.

Every module of a study has three commands: `run` fills missing cells, `table` prints, `plot` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cells import Cell, measure
from experiments.scales import SCALES, Scale

NOT_RUN = "not run"


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        row: what is compared.
        column: set and metric.
        paper: what the paper prints; None where it prints nothing.
        cell: where ours is; None for what is not in the code.
        metric: its name in the result; dots go into nested entries. Empty: the paper's alone is
            shown.
        per: ours is divided by it (1e6 for millions).
        digits: after the point.
    """

    row: str
    column: str
    paper: float | None = None
    cell: Cell | None = None
    metric: str = "f1"
    per: float = 1.0
    digits: int = 1

    def ours(self, scale: Scale) -> tuple[float, tuple[float, float] | None] | None:
        """Mean and interval, None if it was not measured."""
        value: Any = self.cell.read(scale) if self.cell else None
        for name in self.metric.split(".") if value is not None else ():
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return None
        if isinstance(value, dict):
            low, high = value["interval"]
            return value["mean"] / self.per, (low / self.per, high / self.per)
        return value / self.per, None


@dataclass(frozen=True)
class Study:
    """One table or figure.

    Attributes:
        name: of the module.
        title: what it shows, and where the paper has it.
        numbers: of a scale.
        note: what must be known to read it.
        drawn: columns whose name holds this are in the picture; empty means all.
    """

    name: str
    title: str
    numbers: Callable[[Scale], list[Number]]
    note: str = ""
    drawn: str = ""

    def cells(self, scale: Scale) -> list[Cell]:
        """What must be measured, each once."""
        return list(dict.fromkeys(n.cell for n in self.numbers(scale) if n.cell is not None))

    def rows(self, scale: Scale) -> tuple[list[str], list[tuple[str, list[list[str]]]]]:
        """Columns, and rows of cells; a cell is one line of ours and one of the paper's."""
        numbers = self.numbers(scale)
        columns = list(dict.fromkeys(n.column for n in numbers))
        shown = []
        for row in dict.fromkeys(n.row for n in numbers):
            found = {n.column: n for n in numbers if n.row == row}
            shown.append((row, [_lines(found.get(column), scale) for column in columns]))
        return columns, shown

    def markdown(self, scale: Scale) -> str:
        """The table for a page."""
        columns, rows = self.rows(scale)
        lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
        for label, cells in rows:
            lines.append(f"| {label} | " + " | ".join("<br>".join(cell) for cell in cells) + " |")
        return "\n".join(lines)


ScaleOption = Annotated[str, typer.Option(help=f"One of {', '.join(SCALES)}.")]
DataOption = Annotated[Path, typer.Option(help="Folder of the data files.")]
OnlyOption = Annotated[str | None, typer.Option(help="Cells whose name holds this.")]


def command(study: Study) -> typer.Typer:
    """The three commands of a study's module."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=study.title)

    @app.command()
    def run(
        scale: ScaleOption = "nano", data: DataOption = Path("data"), only: OnlyOption = None
    ) -> None:
        """Measure what is not measured yet; models that are needed are trained first."""
        fill([study], named(scale), data, only)

    @app.command()
    def table(scale: ScaleOption = "nano") -> None:
        """Print the table: ours, and under it the paper's value and the difference."""
        from rich.console import Console
        from rich.table import Table

        columns, rows = study.rows(named(scale))
        shown = Table("", *columns, title=f"{study.title}, {scale} scale", caption=study.note)
        for label, cells in rows:
            shown.add_row(label, *("\n".join(cell) for cell in cells))
        Console(width=max(100, 24 + 22 * len(columns))).print(shown)

    @app.command()
    def plot(
        scale: ScaleOption = "nano",
        out: Annotated[Path | None, typer.Option(help="The picture, .svg or .png.")] = None,
    ) -> None:
        """Draw the table."""
        from experiments.figures import draw

        path = out or Path(f"{study.name}-{scale}.svg")
        draw(study, named(scale), path)
        typer.echo(str(path))

    return app


def fill(studies: Iterable[Study], scale: Scale, data: Path, only: str | None = None) -> None:
    """Measure the missing cells of some studies, each once."""
    cells = dict.fromkeys(cell for study in studies for cell in study.cells(scale))
    for number, cell in enumerate(cells, start=1):
        if only and only not in cell.name:
            continue
        known = cell.path(scale).is_file()
        typer.echo(f"{number}/{len(cells)} {cell.name}{': there' if known else ''}", err=True)
        if not known:
            measure(cell, scale, data)


def named(scale: str) -> Scale:
    """A scale by name."""
    if scale not in SCALES:
        raise typer.BadParameter(f"scale is '{scale}'; it can be {', '.join(SCALES)}")
    return SCALES[scale]


def _lines(number: Number | None, scale: Scale) -> list[str]:
    """Ours with its interval; below it the paper's value and how far ours is from it."""
    if number is None:
        return []
    if not number.metric:
        return [f"paper {number.paper:g}"] if number.paper is not None else []
    ours = number.ours(scale)
    if ours is None:
        shown = NOT_RUN
    else:
        mean, interval = ours
        shown = f"{mean:,.{number.digits}f}"
        if interval is not None:
            shown += f" ({interval[0]:.{number.digits}f}-{interval[1]:.{number.digits}f})"
    if number.paper is None:
        return [shown]
    difference = "" if ours is None else f", {ours[0] - number.paper:+.{number.digits}f}"
    return [shown, f"paper {number.paper:g}{difference}"]

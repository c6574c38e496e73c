"""A study: one table or figure, the cells that it needs, and how it is shown.

The module of a study has three commands: `run` measures missing cells, `table` prints the table,
`plot` draws the picture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.system import figures
from experiments.system.cells import Cell
from experiments.system.gpu_scale import GPU
from experiments.system.measured import load_of, made_on
from experiments.system.measures import measure
from experiments.system.scales import SCALES, Scale

NOT_RUN = "not run"
SCORES = {
    "f1": "F1",
    "em": "EM",
    "rouge_l": "ROUGE-L",
    "recall@1": "recall@1",
    "recall@2": "recall@2",
}
"""Metrics of answers, with their names in tables."""


@dataclass(frozen=True)
class Number:
    """One number of a table.

    Attributes:
        row: label of what is compared.
        column: set and metric.
        paper: the number that the paper prints; None if it prints none.
        cell: the cell that holds our number; None if sedem lacks the method.
        metric: name of our number in the result; dots separate nested names. If it is empty, only
            the paper's number is shown.
        per: divisor of our number, for example 1e6 for millions.
        digits: number of decimals.
    """

    row: str
    column: str
    paper: float | None = None
    cell: Cell | None = None
    metric: str = "f1"
    per: float = 1.0
    digits: int = 1

    def value(self, scale: Scale) -> Any:
        """The entry of the result, unformatted; None if it was not measured."""
        entry: Any = self.cell.read(scale) if self.cell else None
        for name in self.metric.split("."):
            entry = entry.get(name) if isinstance(entry, dict) else None
        return entry

    def ours(self, scale: Scale) -> tuple[float, tuple[float, float] | None] | None:
        """Our mean and its interval; None if it was not measured or is a text."""
        value = self.value(scale)
        if value is None or isinstance(value, str):
            return None
        if not isinstance(value, dict):
            return value / self.per, None
        if "interval" not in value:  # counts by part
            return sum(value.values()) / self.per, None
        low, high = value["interval"]
        return value["mean"] / self.per, (low / self.per, high / self.per)

    def lines(self, scale: Scale) -> list[str]:
        """Our number with its interval, then the paper's number and the difference."""
        if not self.metric:
            return [f"paper {self.paper:g}"] if self.paper is not None else []
        shown, ours = self.value(scale), self.ours(scale)
        if ours is None:
            shown = NOT_RUN if shown is None else shown
        else:
            mean, interval = ours
            shown = f"{mean:,.{self.digits}f}"
            if interval is not None:
                shown += f" ({interval[0]:.{self.digits}f}-{interval[1]:.{self.digits}f})"
        if self.paper is None:
            return [shown]
        difference = "" if ours is None else f", {ours[0] - self.paper:+.{self.digits}f}"
        return [shown, f"paper {self.paper:g}{difference}"]


def scores(
    row: str,
    title: str,
    cell: Cell | None,
    metrics: Sequence[str] = ("f1",),
    paper: Mapping[str, float | None] | None = None,
) -> list[Number]:
    """Scores of the answers to one set, one column per metric.

    Args:
        row: label of the row.
        title: title of the set; the metric's name follows it. If empty, the metric stands alone.
        cell: the answers.
        metrics: keys of `SCORES`.
        paper: the paper's numbers by metric.
    """
    printed = paper or {}
    return [
        Number(row, f"{title} {SCORES[metric]}".strip(), printed.get(metric), cell, metric)
        for metric in metrics
    ]


@dataclass(frozen=True)
class Study:
    """One table or figure.

    Attributes:
        name: name of the module.
        title: what it shows, and which table or figure of the paper it is.
        numbers: its numbers at a scale.
        note: what a reader must know.
        about: describes what was measured, from the one result of a study of times. It is shown
            with the machine above the table.
        drawn: a column is drawn if its name contains one of these; empty means all columns.
        render: writes the block of a page, if it is more than the table of the numbers.
        draw: draws the picture, if it differs from that of the numbers.
    """

    name: str
    title: str
    numbers: Callable[[Scale], list[Number]]
    note: str = ""
    about: Callable[[Mapping[str, Any]], str] | None = None
    drawn: tuple[str, ...] = ()
    render: Callable[[Scale], str] | None = None
    draw: Callable[[Scale, Path], None] | None = None

    def cells(self, scale: Scale) -> list[Cell]:
        """The cells that must be measured, without duplicates."""
        return list(dict.fromkeys(n.cell for n in self.numbers(scale) if n.cell is not None))

    def rows(self, scale: Scale) -> tuple[list[str], list[tuple[str, list[list[str]]]]]:
        """Columns, and rows with the lines of each of their entries."""
        numbers = self.numbers(scale)
        columns = list(dict.fromkeys(n.column for n in numbers))
        shown = []
        for row in dict.fromkeys(n.row for n in numbers):
            found = {n.column: n for n in numbers if n.row == row}
            places = [found[c].lines(scale) if c in found else [] for c in columns]
            shown.append((row, places))
        return columns, shown

    def markdown(self, scale: Scale) -> str:
        """The block of a page."""
        if self.render is not None:
            return self.render(scale)
        columns, rows = self.rows(scale)
        joined = [["", *columns]]
        joined += [[label, *("<br>".join(place) for place in places)] for label, places in rows]
        return "\n\n".join(filter(None, [self.measured(scale), markdown_table(joined)]))

    def measured(self, scale: Scale) -> str:
        """Where and what was measured; empty if the study does not state it, or was not run."""
        if self.about is None:
            return ""
        (cell,) = self.cells(scale)
        result = cell.read(scale)
        if result is None:
            return ""
        return f"{made_on(result)}. {self.about(result)} {load_of(result)}".rstrip()

    def plot(self, scale: Scale, path: Path) -> None:
        """Draw the picture."""
        if self.draw is not None:
            self.draw(scale, path)
            return
        numbers = [n for n in self.numbers(scale) if n.metric and self._draws(n.column)]
        figures.draw(numbers, scale, self.title, path)

    def _draws(self, column: str) -> bool:
        return not self.drawn or any(part in column for part in self.drawn)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    head = head.replace("|  |", "| |", 1) if not rows[0][0] else head
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


CHOICES = {**SCALES, GPU.name: GPU}
ScaleOption = Annotated[str, typer.Option(help=f"One of {', '.join(CHOICES)}.")]
DataOption = Annotated[Path, typer.Option(help="Folder of the data files.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Measure what is measured already.")]
OnlyOption = Annotated[str | None, typer.Option(help="Only cells whose name holds this.")]


def command(study: Study) -> typer.Typer:
    """The three commands of a study's module."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=study.title)

    @app.command()
    def run(
        scale: ScaleOption = "nano",
        data: DataOption = Path("data"),
        only: OnlyOption = None,
        again: AgainOption = False,
    ) -> None:
        """Measure every missing cell; train the models that it needs first."""
        measure_missing([study], scale_named(scale), data, only, again)

    @app.command()
    def table(scale: ScaleOption = "nano") -> None:
        """Print our numbers, and below them the paper's and the difference."""
        from rich.console import Console
        from rich.table import Table

        columns, rows = study.rows(scale_named(scale))
        caption = " ".join(filter(None, [study.note, study.measured(scale_named(scale))]))
        shown = Table("", *columns, title=f"{study.title}, {scale} scale", caption=caption)
        for label, places in rows:
            shown.add_row(label, *("\n".join(place) for place in places))
        Console(width=max(100, 24 + 22 * len(columns))).print(shown)

    @app.command()
    def plot(
        scale: ScaleOption = "nano",
        out: Annotated[Path | None, typer.Option(help="The picture, .svg or .png.")] = None,
    ) -> None:
        """Draw the picture."""
        path = out or Path(f"{scale}-{study.name}.svg")
        study.plot(scale_named(scale), path)
        typer.echo(str(path))

    return app


def find(name: str) -> Study:
    """The study of a module."""
    found: Study = importlib.import_module(f"experiments.{name}").STUDY
    return found


def measure_missing(
    studies: Iterable[Study],
    scale: Scale,
    data: Path,
    only: str | None = None,
    again: bool = False,
) -> None:
    """Measure the missing cells of some studies.

    A cell shared by several studies is kept in the folder of the first of them.

    Args:
        studies: the studies.
        scale: the scale.
        data: folder of the data files.
        only: measure only cells whose name contains this.
        again: also measure cells that have a result, and replace it in its place.
    """
    owners: dict[Cell, str] = {}
    for study in studies:
        for cell in study.cells(scale):
            owners.setdefault(cell, study.name)
    for number, (cell, owner) in enumerate(owners.items(), start=1):
        if only and only not in cell.name:
            continue
        path = cell.path(scale)
        done = path is not None and not again
        state = "measured already" if done else "measuring"
        typer.echo(f"{number}/{len(owners)} {cell.name}: {state}", err=True)
        if not done:
            measure(cell, scale, data, path.parent.name if path else owner)


def scale_named(name: str) -> Scale:
    """A scale by name."""
    if name not in CHOICES:
        raise typer.BadParameter(f"scale is '{name}'; it can be {', '.join(CHOICES)}")
    return CHOICES[name]

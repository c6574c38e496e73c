"""Studies: each is one table or figure, made from numbers of the paper and numbers of cells."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from sedem_lab.pictures import pyplot_module, save

NOT_RUN = "not run"
NOTHING = "-"
"""Shown for what a method does not have."""
COLOUR = "#1b6ca8"
STAND_IN = "stand-in:"
"""Stands before every number that was measured on stand-ins."""
SCORES = {"f1": "F1", "em": "EM", "rouge_l": "ROUGE-L"}
SCORES |= {f"recall@{k}": f"recall@{k}" for k in (1, 2, 4)}
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
        digits: number of decimals.
        per: divisor of our number, for example 1e6 for millions.
        parts: numbers that our number is computed from; it is shown if all of them are measured.
        computed: computes it from theirs, in their order; it has no interval.
    """

    row: str
    column: str
    paper: float | None = None
    cell: Cell | None = None
    metric: str = "f1"
    digits: int = 1
    per: float = 1.0
    parts: tuple[Number, ...] = ()
    computed: Callable[[Sequence[float]], float | str] | None = None

    def value(self, scale: Scale) -> Any:
        """The entry of the result, unformatted; None if it was not measured, `NOTHING` if empty."""
        if self.computed is not None:
            found = [part.ours(scale) for part in self.parts]
            means = [one[0] for one in found if one is not None]
            return self.computed(means) if len(means) == len(found) else None
        entry: Any = self.cell.read(scale) if self.cell else None
        for name in self.metric.split("."):
            if not isinstance(entry, dict) or name not in entry:
                return None
            entry = entry[name]
            if entry is None:
                return NOTHING
        return entry

    def ours(self, scale: Scale) -> tuple[float, tuple[float, float] | None] | None:
        """Our mean and its interval; None if it was not measured or is a text."""
        value = self.value(scale)
        if value is None or isinstance(value, str):
            return None
        if not isinstance(value, dict):
            return value / self.per, None
        if "median" in value:  # of a bench, with its quartiles
            middle, low, high = value["median"], value["q1"], value["q3"]
        elif "interval" in value:
            middle, (low, high) = value["mean"], value["interval"]
        else:  # counts by part
            return sum(value.values()) / self.per, None
        return middle / self.per, (low / self.per, high / self.per)

    def lines(self, scale: Scale) -> list[str]:
        """Our number with its interval, then the paper's number and the difference."""
        if not self.metric:
            return [f"paper {self.paper:g}"] if self.paper is not None else []
        shown, ours, difference = self.value(scale), self.ours(scale), ""
        if ours is not None:
            mean, *spread = (f"{value:,.{self.digits}f}" for value in (ours[0], *(ours[1] or ())))
            shown = f"{mean} ({'-'.join(spread)})" if spread else mean
            if self.paper is not None and not scale.stand_in:
                difference = f", {ours[0] - self.paper:+.{self.digits}f}"
        shown = NOT_RUN if shown is None else f"{STAND_IN} {shown}" if scale.stand_in else shown
        return [shown] if self.paper is None else [shown, f"paper {self.paper:g}{difference}"]


def mean_of(row: str, column: str, paper: float | None, parts: Sequence[Number]) -> Number:
    """The mean of numbers."""
    return Number(row, column, paper, parts=tuple(parts), computed=fmean)


def ratio_of(
    row: str, column: str, paper: float | None, parts: Sequence[Number], digits: int = 2
) -> Number:
    """The ratio of two numbers."""
    given = tuple(parts)
    return Number(row, column, paper, None, "f1", digits, 1.0, given, lambda two: two[0] / two[1])


def entries(row: str, cell: Cell | None, *columns: tuple[Any, ...], at: str = "") -> list[Number]:
    """Several entries of one result, in one row.

    Args:
        columns: the column and the metric; then, if they are not the defaults, decimals and
            divisor.
        at: where in the result the metrics are.
    """
    place = f"{at}." if at else ""
    return [Number(row, name, None, cell, place + metric, *more) for name, metric, *more in columns]


def scores(
    row: str,
    title: str,
    cell: Cell | None,
    metrics: Sequence[str] = ("f1",),
    paper: Mapping[str, float | None] | None = None,
) -> list[Number]:
    """Scores of the answers to one set, one column per metric.

    Args:
        title: title of the set; the metric's name follows it. If empty, the metric stands alone.
    """
    printed = paper or {}
    return [
        Number(row, f"{title} {SCORES[metric]}".strip(), printed.get(metric), cell, metric)
        for metric in metrics
    ]


def metric_of(questions: str) -> str:
    """The score of a set: exact facts have short answers, which are right or wrong."""
    return "em" if questions == "exact-facts" else "f1"


@dataclass(frozen=True)
class Study:
    """One table or figure.

    Attributes:
        name: its name in marks of pages, and the folder of its results.
        title: what it shows, and which table or figure of the paper it is.
        numbers: its numbers at a scale.
        note: what a reader must know.
        about: describes what was measured, with entries of the result of a study of times in
            braces. It is shown above the table, with the machine and the notes of the result.
        drawn: a column is in the picture if its name contains one of these.
        render: writes the block of a page, if it is more than the table of the numbers.
    """

    name: str
    title: str
    numbers: Callable[[Scale], list[Number]]
    note: str = ""
    about: str = ""
    drawn: tuple[str, ...] = ()
    render: Callable[[Scale], str] | None = None

    def cells(self, scale: Scale) -> list[Cell]:
        """The cells that must be measured, without duplicates."""
        every = (one for n in self.numbers(scale) for one in (n, *n.parts))
        return list(dict.fromkeys(n.cell for n in every if n.cell is not None))

    def markdown(self, scale: Scale) -> str:
        """The block of a page."""
        return self.table(scale) if self.render is None else self.render(scale)

    def table(self, scale: Scale) -> str:
        """The table of the numbers; above it, where and how they were measured if that is said."""
        above = []
        for cell in self.cells(scale) if self.about else ():
            if (result := cell.read(scale)) is not None:
                about = f"{made_on(result)}. {self.about.format(**result)} {load_of(result)}"
                left_out = [f"{name}: {why}" for name, why in result.get("left_out", {}).items()]
                notes = (f"- {note}" for note in (*result.get("notes", ()), *left_out))
                above += [about.rstrip(), *notes]
        numbers = self.numbers(scale)
        columns = dict.fromkeys(n.column for n in numbers)
        rows: dict[str, dict[str, str]] = {}
        for n in numbers:
            rows.setdefault(n.row, {})[n.column] = "<br>".join(n.lines(scale))
        shown = [[row, *(of_row.get(name, "") for name in columns)] for row, of_row in rows.items()]
        table = markdown_table([["", *columns], *shown])
        return "\n\n".join(filter(None, ["\n".join(above), table]))

    def plot(self, scale: Scale, path: Path) -> None:
        """Draw one panel for each of the drawn columns: a row has our number with its interval."""
        pyplot = pyplot_module()
        shown = [n for n in self.numbers(scale) if any(part in n.column for part in self.drawn)]
        rows = list(dict.fromkeys(n.row for n in shown))
        columns = list(dict.fromkeys(n.column for n in shown))
        size = (2.6 + 2.5 * len(columns), 1.4 + 0.3 * len(rows))
        figure, (axes,) = pyplot.subplots(1, len(columns), figsize=size, squeeze=False)
        for axis, column in zip(axes, columns, strict=True):
            for number in shown:
                if number.column == column and (ours := number.ours(scale)) is not None:
                    mean, (low, high) = ours[0], ours[1] or (ours[0], ours[0])
                    spread = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
                    place = -rows.index(number.row)
                    style = {"color": COLOUR, "markersize": 5, "capsize": 2}
                    axis.errorbar(mean, place, xerr=spread, fmt="o", **style)
            axis.set_title(column, fontsize=9)
            # All panels have the same rows, so only the first one names them.
            names = rows if column == columns[0] else [""] * len(rows)
            axis.set_yticks([-place for place in range(len(rows))], names, fontsize=8)
            axis.set_ylim(-len(rows) + 0.4, 0.6)
            axis.grid(axis="x", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.title}, {scale.name} scale, 95 %", fontsize=10)
        figure.tight_layout()
        save(figure, path)


def study(note: str = "", **fields: Any) -> Callable[[Callable[[Scale], Any]], Study]:
    """A study of the numbers that a function yields, with the function's name.

    The title is the first paragraph of its docstring. The note is `note`, and the second one.
    """

    def made(numbers: Callable[[Scale], Any]) -> Study:
        title, _, below = inspect.cleandoc(numbers.__doc__ or "").partition("\n\n")
        notes = " ".join([*note.split(), *below.split()])
        own = " ".join(title.split()).removesuffix(".")
        return Study(numbers.__name__, own, lambda scale: [*numbers(scale)], notes, **fields)

    return made


def ours(**fields: Any) -> Callable[[Callable[[Scale], Any]], Study]:
    """A study like `study`, of which the paper has no numbers."""
    return study("The paper gives no numbers.", **fields)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    head = head.replace("|  |", "| |", 1) if not rows[0][0] else head
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def made_on(result: Mapping[str, Any]) -> str:
    """Machine and versions of a result: the processor, or the device that was asked for."""
    machine, settings, versions = result["machine"], result.get("settings", {}), result["versions"]
    on_gpu = settings.get("device", "cpu") != "cpu"
    parts = [machine["device" if on_gpu else "processor"], f"{machine['cores']} cores"]
    parts += [f"{machine['threads']} threads", settings.get("dtype", "")]
    made = ("torch", "transformers", "llama-cpp-python")
    shown = ", ".join(f"{name} {versions[name]}" for name in made if name in versions)
    return f"{', '.join(filter(None, parts))}; {shown}"


def load_of(result: Mapping[str, Any]) -> str:
    """A sentence about the load of the machine; empty if it is not known."""
    load = result.get("load_average")
    if load is None or isinstance(load, float):
        return "" if load is None else f"Load of the machine: {load:.1f}."
    return f"Load of the machine: {load[0]:.1f} at the start, {load[1]:.1f} at the end."

"""Studies: each is one table or figure, made from numbers of the paper and numbers of cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.system import figures
from experiments.system.cells import Cell
from experiments.system.scales import Scale

NOT_RUN = "not run"
NOTHING = "-"
"""Shown for what a method does not have."""
STAND_IN = "stand-in:"
"""Stands before every number that was measured on stand-ins."""
SCORES = {
    "f1": "F1",
    "em": "EM",
    "rouge_l": "ROUGE-L",
    "recall@1": "recall@1",
    "recall@2": "recall@2",
    "recall@4": "recall@4",
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
        parts: numbers that our number is computed from; it is shown if all of them are measured.
        computed: computes it from theirs, in their order; it has no interval.
    """

    row: str
    column: str
    paper: float | None = None
    cell: Cell | None = None
    metric: str = "f1"
    per: float = 1.0
    digits: int = 1
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
        shown, ours = self.value(scale), self.ours(scale)
        if ours is None:
            shown = NOT_RUN if shown is None else shown
        else:
            mean, interval = ours
            shown = f"{mean:,.{self.digits}f}"
            if interval is not None:
                shown += f" ({interval[0]:,.{self.digits}f}-{interval[1]:,.{self.digits}f})"
        if scale.stand_in and shown != NOT_RUN:
            shown = f"{STAND_IN} {shown}"
        if self.paper is None:
            return [shown]
        difference = ""
        if ours is not None and not scale.stand_in:
            difference = f", {ours[0] - self.paper:+.{self.digits}f}"
        return [shown, f"paper {self.paper:g}{difference}"]


def mean_of(row: str, column: str, paper: float | None, parts: Sequence[Number]) -> Number:
    """The mean of numbers."""
    return Number(row, column, paper, parts=tuple(parts), computed=fmean)


def ratio_of(
    row: str, column: str, paper: float | None, parts: Sequence[Number], digits: int = 2
) -> Number:
    """The ratio of two numbers."""

    def ratio(values: Sequence[float]) -> float:
        above, below = values
        return above / below

    return Number(row, column, paper, parts=tuple(parts), computed=ratio, digits=digits)


def entries(row: str, cell: Cell | None, *columns: tuple[Any, ...]) -> list[Number]:
    """Several entries of one result, in one row.

    Args:
        columns: the column and the metric; then, if they are not the defaults, decimals and
            divisor.
    """
    result = []
    for column, metric, *more in columns:
        digits, per = (*more, *(1, 1.0)[len(more) :])
        result.append(Number(row, column, None, cell, metric, per, digits))
    return result


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
        spread: what the intervals are.
        drawn: a column is drawn if its name contains one of these; empty means all columns.
        render: writes the block of a page, if it is more than the table of the numbers.
        draw: draws the picture, if it differs from that of the numbers.
    """

    name: str
    title: str
    numbers: Callable[[Scale], list[Number]]
    note: str = ""
    about: str = ""
    spread: str = "95 %"
    drawn: tuple[str, ...] = ()
    render: Callable[[Scale], str] | None = None
    draw: Callable[[Study, Scale, Path], None] | None = None

    def cells(self, scale: Scale) -> list[Cell]:
        """The cells that must be measured, without duplicates."""
        every = (one for n in self.numbers(scale) for one in (n, *n.parts))
        return list(dict.fromkeys(n.cell for n in every if n.cell is not None))

    def markdown(self, scale: Scale) -> str:
        """The block of a page."""
        return self.table(scale) if self.render is None else self.render(scale)

    def table(self, scale: Scale) -> str:
        """The table of the numbers, and where they were measured."""
        numbers = self.numbers(scale)
        columns = list(dict.fromkeys(n.column for n in numbers))
        shown = [["", *columns]]
        for row in dict.fromkeys(n.row for n in numbers):
            found = {n.column: "<br>".join(n.lines(scale)) for n in numbers if n.row == row}
            shown.append([row, *(found.get(column, "") for column in columns)])
        return "\n\n".join(filter(None, [self.measured(scale), markdown_table(shown)]))

    def measured(self, scale: Scale) -> str:
        """Where and what was measured; empty if the study does not state it, or was not run."""
        shown = []
        for cell in self.cells(scale) if self.about else ():
            if (result := cell.read(scale)) is not None:
                said = (
                    f"{made_on(result)}. {self.about.format(**result)} {load_of(result)}".rstrip()
                )
                left_out = [f"{name}: {why}" for name, why in result.get("left_out", {}).items()]
                shown += [said, *(f"- {note}" for note in (*result.get("notes", ()), *left_out))]
        return "\n".join(shown)

    def plot(self, scale: Scale, path: Path) -> None:
        """Draw the picture."""
        if self.draw is not None:
            self.draw(self, scale, path)
            return
        shown = [n for n in self.numbers(scale) if n.metric and self._draws(n.column)]
        figures.draw(shown, scale, self.title, path, self.spread)

    def _draws(self, column: str) -> bool:
        return not self.drawn or any(part in column for part in self.drawn)


def study(title: str, note: str = "", **fields: Any) -> Callable[[Any], Study]:
    """A study of the numbers that a function yields; the study has the function's name."""
    return lambda numbers: Study(
        numbers.__name__, title, lambda scale: [*numbers(scale)], note, **fields
    )


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
    if load is None:
        return ""
    if isinstance(load, float):
        return f"Load of the machine: {load:.1f}."
    before, after = load
    return f"Load of the machine: {before:.1f} at the start, {after:.1f} at the end."

"""Yes/no questions separated from the others, for every row that has both. Not in the paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments import controls, equal_training, main_qa, more_memory, shipped_baselines
from experiments.system.cells import Cell
from experiments.system.constants import constant_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, markdown_table

SETS = ("hotpotqa", "2wiki")
KINDS = {"yes_no": "yes/no questions", "other": "other questions"}
"""Kinds of questions in a result, with their names in the table."""
ALWAYS = ("yes", "no")
DTYPE = "float32"
"""Type of the shipped baselines' backbones, as of the guided rows."""
WHOLE = "not apart"
"""Shown for a result without separate kinds if another result of its row has them."""


def numbers(scale: Scale) -> list[Number]:
    """F1 by kind of question: rows of other tables, and two constant answers."""
    sets = _sets(scale)
    rows: dict[tuple[Cell, str], str] = {}
    for row, cell, metric in _answered(scale):
        if cell is not None and cell.questions in sets:
            rows.setdefault((cell, metric.removesuffix("f1")), row)
    return [
        Number(row, f"{scale.sets[cell.questions].title}, {name}", None, cell, f"{place}{kind}.f1")
        for (cell, place), row in rows.items()
        for kind, name in KINDS.items()
    ]


def _answered(scale: Scale) -> Iterator[tuple[str, Cell | None, str]]:
    """Rows with their cells and the key of F1 in them; an answer in two tables appears twice."""
    tables = (main_qa, controls, more_memory, equal_training)
    every = [number for table in tables for number in table.numbers(scale)]
    for number in every:
        if number.metric == "f1" or number.metric.endswith(".f1"):
            yield number.row, number.cell, number.metric
    for answer in ALWAYS:
        for key in _sets(scale):
            yield f'always "{answer}"', constant_cell(key, answer), "f1"
    for number in shipped_baselines.numbers(scale):
        if number.cell and number.cell.shipped:
            # A CPU without bfloat16 units is several times as fast in float32.
            yield f"{number.row}, as shipped", replace(number.cell, dtype=DTYPE), number.metric


def _sets(scale: Scale) -> Sequence[str]:
    # The HotpotQA fixture has no yes/no questions.
    return ("2wiki",) if scale.name == "smoke" else SETS


def _markdown(scale: Scale) -> str:
    """The rows whose results contain both kinds, then the names of the others."""
    found = numbers(scale)
    columns = list(dict.fromkeys(number.column for number in found))
    table, whole = [["", *columns]], []
    for row in dict.fromkeys(number.row for number in found):
        places = {n.column: _place(n, scale) for n in found if n.row == row}
        if set(places.values()) != {WHOLE}:
            table.append([row, *(places.get(column, "") for column in columns)])
        else:
            whole.append(row)
    missing = f"\n\nNot measured apart: {'; '.join(whole)}." if whole else ""
    return markdown_table(table) + missing


def _place(number: Number, scale: Scale) -> str:
    """F1 with its interval, and the number of questions, if the result contains them."""
    value = number.value(scale)
    return f"{number.lines(scale)[0]}<br>{value['n']} questions" if value else WHOLE


STUDY = Study(
    "yes_no",
    "Yes/no questions apart from the others",
    numbers,
    "The paper gives no numbers. A question is one of yes or no if its reference is.",
    render=_markdown,
)

if __name__ == "__main__":
    command(STUDY)()

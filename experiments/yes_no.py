"""Yes/no questions apart from the others, for rows of Table main_qa_results and the controls."""

from __future__ import annotations

from collections.abc import Sequence

from experiments import controls, main_qa
from experiments.system.constants import constant_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, markdown_table

SETS = ("hotpotqa", "2wiki")
KINDS = {"yes_no": "yes/no questions", "other": "other questions"}
"""Kinds of questions in a result, with their names in the table."""
ALWAYS = ("yes", "no")
WHOLE = "not apart"
"""Stands for a result of a row that does not hold both kinds, if another of its results does."""


def numbers(scale: Scale) -> list[Number]:
    """F1 by kind of question, of every row of both tables and of the two constant answers."""
    sets = _sets(scale)
    rows = [
        (number.row, number.cell)
        for number in (*main_qa.numbers(scale), *controls.numbers(scale))
        if number.metric == "f1" and number.cell and number.cell.questions in sets
    ]
    rows += [
        (f'always "{answer}"', constant_cell(key, answer)) for answer in ALWAYS for key in sets
    ]
    return [
        Number(row, f"{scale.sets[cell.questions].title}, {name}", None, cell, f"{kind}.f1")
        for row, cell in dict.fromkeys(rows)
        for kind, name in KINDS.items()
    ]


def _sets(scale: Scale) -> Sequence[str]:
    # The fixture of HotpotQA has no yes/no question.
    return ("2wiki",) if scale.name == "smoke" else SETS


def _markdown(scale: Scale) -> str:
    """The rows whose results hold both kinds, then the names of the others."""
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
    """F1 with its interval, and the number of questions, if the result holds them."""
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

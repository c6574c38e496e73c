"""Every number that the paper prints stands beside a cell; docs/paper-map.md has its command."""

from __future__ import annotations

import json
import re

import pytest

from experiments.pages import STUDIES
from experiments.system import paper
from experiments.system.scales import PAPER, ROOT

LINE = re.compile(
    r"^\| (?P<labels>[\w:, -]+) \| `(?P<command>python -m experiments run .*)` \|$", re.M
)
NO_CELL = {
    # What is compared, not what is measured.
    *("k", "k_low", "k_high", "blocks", "layer", "layers", "l_extract", "l_inject", "early_exit"),
    *("shift_tokens", "best", "decline_at"),
    # Differences and ratios of the other numbers, and parts that no method of ours has.
    *("f1_drop", "hmt_memorymap_excluded_m", "backbone_params_b"),
}


def listed() -> dict[str, str]:
    """The command of each label."""
    text = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    found = [(m["labels"].split(", "), m["command"]) for m in LINE.finditer(text)]
    return {label: command for labels, command in found for label in labels}


def test_every_table_and_figure_has_a_command() -> None:
    labels = set(json.loads(paper.TABLES.read_text(encoding="utf-8"))) - {"source"}
    assert labels == set(listed()) - {"fig:codec_granularity_ablation"}


@pytest.mark.parametrize("label", [label for label in listed() if not label.startswith("fig:")])
def test_every_printed_number_stands_beside_a_cell(label: str) -> None:
    start, name = listed()[label].rsplit(" ", 1)
    assert start == "python -m experiments run --scale paper --only"
    assert [study for study in STUDIES if name in study] == [name]
    shown = {n.paper for n in STUDIES[name].numbers(PAPER) if n.cell or n.parts}
    printed = {
        value
        for row in paper.rows(label)
        for column, value in row.items()
        if column not in NO_CELL and isinstance(value, int | float)
    }
    assert printed <= shown, f"{label}: nothing of ours stands beside {sorted(printed - shown)}"

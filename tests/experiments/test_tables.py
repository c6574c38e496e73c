"""How a number stands in a table, and where the paper's numbers come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.selection import effective_rank
from experiments.speed import efficiency
from experiments.system import cells, paper
from experiments.system.cells import Cell
from experiments.system.models import Variant
from experiments.system.scales import NANO, PAPER
from experiments.system.tables import (
    NOT_RUN,
    NOTHING,
    Number,
    Study,
    load_of,
    made_on,
    mean_of,
    ratio_of,
)


@pytest.fixture
def one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Study]:
    monkeypatch.setattr(cells, "RESULTS", tmp_path)

    def make(result: dict[str, object] | None, paper_value: float | None = 20.0) -> Study:
        cell = Cell(variant=Variant("some"), questions="hotpotqa")
        if result is not None:
            path = tmp_path / "nano" / "some" / f"{cell.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result))
        return Study("some", "Some", lambda scale: [Number("row", "F1", paper_value, cell)])

    return make


@pytest.mark.parametrize(
    ("f1", "printed", "cell"),
    [
        ({"mean": 14.84, "interval": [12.9, 16.6]}, 20.0, "14.8 (12.9-16.6)<br>paper 20, -5.2"),
        ({"median": 1024.0, "q1": 1000.25, "q3": 1100.0}, None, "1,024.0 (1,000.2-1,100.0)"),
        (None, None, NOTHING),
    ],
)
def test_ours_stands_over_the_papers_with_interval_and_difference(
    f1: Any, printed: float | None, cell: str, one_cell: Callable[..., Study]
) -> None:
    study = one_cell({"f1": f1}, printed)
    assert study.markdown(NANO).splitlines()[2] == f"| row | {cell} |"
    assert NOT_RUN in study.markdown(PAPER)


def test_what_was_not_measured_shows_no_number(one_cell: Callable[..., Study]) -> None:
    assert one_cell(None).markdown(NANO).splitlines()[2] == f"| row | {NOT_RUN}<br>paper 20 |"
    assert one_cell(None, None).markdown(NANO).splitlines()[2] == f"| row | {NOT_RUN} |"


def test_a_text_stands_as_it_is_and_parts_are_added(one_cell: Callable[..., Study]) -> None:
    (number,) = one_cell({"machine": {"device": "Abacus"}, "counts": {"a": 1, "b": 2}}).numbers(
        NANO
    )
    text = Number("row", "machine", None, number.cell, "machine.device")
    parts = Number("row", "parts", None, number.cell, "counts", digits=0)
    assert (text.lines(NANO), text.ours(NANO)) == (["Abacus"], None)
    assert parts.lines(NANO) == ["3"]


def test_a_mean_and_a_ratio_are_shown_once_all_of_their_parts_are_measured(
    one_cell: Callable[..., Study],
) -> None:
    (number,) = one_cell({"f1": {"mean": 8.0, "interval": [7.0, 9.0]}, "ms": 2.0}).numbers(NANO)
    time = Number("row", "ms", None, number.cell, "ms")
    mean = mean_of("average", "F1", 4.5, [number, time])
    assert mean.ours(NANO) == (5.0, None) and mean.lines(NANO) == ["5.0", "paper 4.5, +0.5"]
    ratio = ratio_of("ratio", "F1", 3.0, [number, mean])
    assert ratio.lines(NANO) == ["1.60", "paper 3, -1.40"]
    missing = Number("row", "ms", None, number.cell, "seconds")
    for part in (missing, mean_of("average", "F1", None, [number, missing])):
        assert ratio_of("ratio", "F1", 3.0, [number, part]).lines(NANO) == [NOT_RUN, "paper 3"]


def test_averages_of_the_paper_are_those_of_its_rows() -> None:
    """The rules that compute our averages and ratios give the paper's from its own numbers."""
    for one in (efficiency, effective_rank):
        computed = [number for number in one.numbers(PAPER) if number.computed is not None]
        assert len(computed) == {"efficiency": 28, "effective_rank": 2}[one.name]
        for number in computed:
            assert _printed(number) == pytest.approx(number.paper, abs=0.0501), number.row


def _printed(number: Number) -> float:
    """A number of the paper, computed from the numbers of its parts."""
    if number.computed is None:
        assert number.paper is not None
        return number.paper
    return number.computed([_printed(part) for part in number.parts])


def test_a_number_of_the_paper_is_one_number() -> None:
    assert paper.number("tab:ruler_qa2", "4k", method="SeDeM") == 31.6
    with pytest.raises(LookupError, match="0 rows have"):
        paper.number("tab:ruler_qa2", "4k", method="sedem")
    with pytest.raises(LookupError, match="5 rows have"):
        paper.number("tab:k_sweep", "f1", dataset="2WikiMHQA")


MACHINE = {
    "machine": {"processor": "Abacus", "cores": 2, "threads": 1, "device": "Slide rule"},
    "versions": {"torch": "2", "transformers": "5"},
}


def test_where_it_was_measured_is_said_for_each_kind_of_result() -> None:
    assert made_on(MACHINE) == "Abacus, 2 cores, 1 threads; torch 2, transformers 5"
    on_gpu = {**MACHINE, "settings": {"device": "cuda", "dtype": "bfloat16"}}
    shown = "Slide rule, 2 cores, 1 threads, bfloat16; torch 2, transformers 5"
    assert made_on(on_gpu) == shown
    assert load_of({}) == ""
    assert load_of({"load_average": 1.25}) == "Load of the machine: 1.2."
    ends = load_of({"load_average": [0.5, 1.5]})
    assert ends == "Load of the machine: 0.5 at the start, 1.5 at the end."

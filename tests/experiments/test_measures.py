"""One cell of every kind is measured at smoke scale, and results lie where studies look."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system import bench, cells, measures
from experiments.system.bench import RIVALS
from experiments.system.cells import Cell
from experiments.system.measures import MEASURES, measure, measure_missing
from experiments.system.scales import ROOT, SMOKE

FIXTURES = ROOT / "tests" / "fixtures"
CEILINGS = cache(bench.measure_ceilings)
"""What the machine can do, measured once and not in every bench; it takes seconds."""


def first_of_each_kind() -> dict[str, tuple[str, Cell]]:
    """The study and the first cell of every kind of measure."""
    found: dict[str, tuple[str, Cell]] = {}
    for name, study in STUDIES.items():
        for cell in study.cells(SMOKE):
            # The bench of other methods has tests of its own.
            if (cell.measure, cell.method in RIVALS) != ("bench", True):
                found.setdefault(cell.measure, (name, cell))
    return found


KINDS = first_of_each_kind()
LEFT_OUT = {"batches", "memories", "bank-size"}
"""Like "bench", or slow; tests/slow measures all."""


def test_every_kind_has_a_study() -> None:
    # Peers are measured like "bench", but not at smoke scale.
    assert set(MEASURES) == set(KINDS) | {"peers"}


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that everything is run in, so that each model is trained once."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - LEFT_OUT))
def test_a_kind_is_measured_and_drawn_at_smoke_scale(
    kind: str, smoke_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(smoke_runs)
    monkeypatch.setattr(bench, "measure_ceilings", CEILINGS)
    name, cell = KINDS[kind]
    measure(cell, SMOKE, FIXTURES, name)
    shown = [number for number in STUDIES[name].numbers(SMOKE) if number.cell == cell]
    assert shown and all(number.value(SMOKE) is not None for number in shown)
    STUDIES[name].plot(SMOKE, smoke_runs / f"{name}.svg")
    assert (smoke_runs / f"{name}.svg").read_text().startswith("<?xml")


def test_a_result_lies_in_the_folder_of_the_first_study_and_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = STUDIES["parameters"], STUDIES["parameter_overhead"]
    monkeypatch.setitem(
        measures.MEASURES,
        "cost",
        lambda cell, scale, data: {"digits": 0.123456789, "machine": "Abacus"},
    )
    measure_missing([first, second], SMOKE, FIXTURES)
    folder = cells.results_of(SMOKE)
    shared = first.cells(SMOKE)
    assert {path.stem for path in (folder / "parameters").iterdir()} == {c.name for c in shared}
    assert set(shared) < set(second.cells(SMOKE))
    rest = {cell.name for cell in second.cells(SMOKE)} - {cell.name for cell in shared}
    assert {path.stem for path in (folder / "parameter_overhead").iterdir()} == rest

    path = shared[0].path(SMOKE)
    assert path is not None and path.read_text() == '{"digits":0.123457,"machine":"Abacus"}\n'
    path.write_text("{}")
    measure_missing([second], SMOKE, FIXTURES, only=shared[0].name)
    assert path.read_text() == "{}"
    measure_missing([second], SMOKE, FIXTURES, only=shared[0].name, again=True)
    assert shared[0].path(SMOKE) == path and path.read_text() != "{}"

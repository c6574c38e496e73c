"""One cell of every kind is measured on stand-ins, and results lie where studies look."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pages import STUDIES, write_tables
from experiments.system import cells, measures, search, timing
from experiments.system.answers import WAYS
from experiments.system.cells import Cell
from experiments.system.measures import MEASURES, measure, measure_missing
from experiments.system.scales import NANO, PAPER, SMOL
from experiments.system.stand_in import stand_in
from experiments.system.tables import STAND_IN

SMALL = stand_in(PAPER)


def one_of_each_kind() -> dict[str, tuple[str, Cell]]:
    """The study and a cell of every kind of measure, of HotpotQA if there is one."""
    found: dict[str, tuple[str, Cell]] = {}
    for name, study in STUDIES.items():
        for cell in study.cells(SMALL):
            _, known = found.get(cell.measure, (name, cell))
            if known is cell or (cell.questions == "hotpotqa" != known.questions):
                found[cell.measure] = (name, cell)
    return found


KINDS = one_of_each_kind()
LEFT_OUT = {"bench", "batches", "bank-size"}
"""The bench, which test_bench measures, what is like it, or slow; tests/slow measures all."""


def test_every_kind_has_a_study() -> None:
    # These are of sedem-smol, which the paper does not have.
    of_smol = {"beside-llama-cpp", "ways", "hops", "tool-servers", "new-user"}
    of_smol |= {"finding", "agent-savings"}
    assert set(MEASURES) == set(KINDS) | of_smol


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that everything is run in, so that each model is trained once."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("kind", sorted(set(KINDS) - LEFT_OUT))
def test_a_kind_is_measured_on_stand_ins(
    kind: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.setattr(search, "RESAMPLES", 20)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    name, cell = KINDS[kind]
    measure(cell, SMALL, runs, name)
    shown = [number for number in STUDIES[name].numbers(SMALL) if number.cell == cell]
    assert shown and all(number.value(SMALL) is not None for number in shown)
    # Never taken for a real result: it lies with the runs, and its page marks it.
    assert cell.path(PAPER) is None
    assert any(STAND_IN in line for number in shown for line in number.lines(SMALL))


def test_every_way_to_answer_is_scored(
    tiny_checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scale = replace(NANO, stand_in=True, shipped={SMOL: Path(tiny_checkpoint)})
    study = STUDIES["real_model"]
    (cell,) = (c for c in study.cells(scale) if c.questions == "household")
    measure(replace(cell, limit=2), scale, tmp_path, study.name)
    result = replace(cell, limit=2).read(scale)
    assert result is not None and result["form"]["examples"] == 2
    assert set(result["ways"]) == set(WAYS) and set(result["change"]) == set(WAYS) - {"K=4"}
    cut = {way: found["conditioning"]["mean"] for way, found in result["ways"].items()}
    assert cut["no memory"] < cut["auto, K=1"] < cut["K=4"] < cut["auto, K=all"]


def test_a_cell_that_fails_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def cost(cell: Cell, *_: object) -> dict[str, str]:
        if cell.backbone == "llama-3.2-3b":
            raise ValueError("no such weights")
        return {"machine": "Abacus"}

    monkeypatch.setitem(measures.MEASURES, "cost", cost)
    assert measure_missing([STUDIES["parameters"]], SMALL, tmp_path) == (2, ["cost.llama-3.2-3b"])
    assert "ValueError: no such weights" in capsys.readouterr().err
    page = write_tables(SMALL).read_text(encoding="utf-8")
    assert "They mean nothing" in page and "Parameters by part" in page
    # The same command goes on: only what failed is measured.
    monkeypatch.setitem(measures.MEASURES, "cost", lambda *_: {"machine": "Abacus 2"})
    assert measure_missing([STUDIES["parameters"]], SMALL, tmp_path) == (2, [])
    first, second = STUDIES["parameters"].cells(SMALL)
    results = first.read(SMALL), second.read(SMALL)
    marked = {"stand_in": True}
    assert results == ({"machine": "Abacus", **marked}, {"machine": "Abacus 2", **marked})


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
    measure_missing([first, second], SMALL, tmp_path)
    folder = cells.results_of(SMALL)
    shared = first.cells(SMALL)
    assert {path.stem for path in (folder / "parameters").iterdir()} == {c.name for c in shared}
    assert set(shared) < set(second.cells(SMALL))
    rest = {cell.name for cell in second.cells(SMALL)} - {cell.name for cell in shared}
    assert {path.stem for path in (folder / "parameter_overhead").iterdir()} == rest

    path = shared[0].path(SMALL)
    written = '{"digits":0.123457,"machine":"Abacus","stand_in":true}\n'
    assert path is not None and path.read_text() == written
    path.write_text("{}")
    measure_missing([second], SMALL, tmp_path, only=shared[0].name)
    assert path.read_text() == "{}"
    measure_missing([second], SMALL, tmp_path, only=shared[0].name, again=True)
    assert shared[0].path(SMALL) == path and path.read_text() != "{}"

"""Every study end to end at smoke scale, and the committed results that belong to studies."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments import STUDIES
from experiments.bench import run
from experiments.system import cells, study
from experiments.system.cells import Cell
from experiments.system.measures import SELECTING
from experiments.system.scales import NANO, PAPER, ROOT, SMOKE, Scale
from experiments.system.study import find, measure_missing
from experiments.system.training import recipe_of
from experiments.system.variants import BASE, Variant, main_model, without_selector
from sedem.training.recipe import load_recipe
from sedem.training.stages import STAGES, Stage2Recipe

FIXTURES = ROOT / "tests" / "fixtures"
CEILINGS = cache(run.measure_ceilings)
"""What the machine can do, measured once and not in every bench; it takes seconds."""


@cache
def one_of_each_kind() -> dict[Cell, str]:
    """For each study one cell of every measure, and for each method one of its measures."""
    chosen: dict[Cell, str] = {}
    seen: set[tuple[str | None, str]] = set()
    for name in STUDIES:
        for cell in find(name).cells(SMOKE):
            kinds = {(name, cell.measure), (cell.method, cell.measure)}
            if kinds - seen:
                chosen.setdefault(cell, name)
            seen |= kinds
    return chosen


@pytest.fixture(scope="session")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all studies are run in, so that each model is trained once."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_measures_and_draws_at_smoke_scale(
    name: str, smoke_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(smoke_runs)
    monkeypatch.setattr(run, "measure_ceilings", CEILINGS)
    one, chosen = find(name), one_of_each_kind()
    shown = [n for n in one.numbers(SMOKE) if n.cell in chosen]
    for cell, owner in chosen.items():
        needed = owner == name or any(n.cell == cell for n in shown)
        if needed and cell.path(SMOKE) is None:
            study.measure(cell, SMOKE, FIXTURES, owner)
    assert shown and all(n.value(SMOKE) is not None for n in shown)
    one.plot(SMOKE, smoke_runs / f"{name}.svg")
    assert (smoke_runs / f"{name}.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_every_study_runs_end_to_end_at_smoke_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studies = [find(name) for name in STUDIES]
    measure_missing(studies, SMOKE, FIXTURES)
    for one in studies:
        missing = [n for n in one.numbers(SMOKE) if n.cell is not None and n.value(SMOKE) is None]
        assert not missing, f"{one.name} measured nothing for {missing[:3]}"
        picture = tmp_path / f"{one.name}.svg"
        one.plot(SMOKE, picture)
        assert picture.read_text().startswith("<?xml")
    measured: list[Cell] = []
    monkeypatch.setattr(study, "measure", lambda cell, *rest: measured.append(cell))
    measure_missing(studies, SMOKE, FIXTURES)
    assert not measured, "a result that is there is not measured again"


def test_a_result_lies_in_the_folder_of_the_study_that_measured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = find("parameters"), find("parameter_overhead")
    measure_missing([first, second], SMOKE, FIXTURES)
    folder = cells.results_of(SMOKE)
    shared = first.cells(SMOKE)
    assert {path.stem for path in (folder / "parameters").iterdir()} == {c.name for c in shared}
    assert set(shared) < set(second.cells(SMOKE))
    rest = {cell.name for cell in second.cells(SMOKE)} - {cell.name for cell in shared}
    assert {path.stem for path in (folder / "parameter_overhead").iterdir()} == rest


def test_a_result_is_measured_again_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = find("parameters")
    cell = one.cells(SMOKE)[0]
    measure_missing([one], SMOKE, FIXTURES, only=cell.name)
    path = cell.path(SMOKE)
    assert path is not None and all(n.value(SMOKE) for n in one.numbers(SMOKE) if n.cell == cell)
    path.write_text("{}")
    measure_missing([one], SMOKE, FIXTURES, only=cell.name)
    assert path.read_text() == "{}"
    measure_missing([one], SMOKE, FIXTURES, only=cell.name, again=True)
    assert cell.read(SMOKE) != {}


def test_every_module_beside_those_that_run_studies_is_a_study_and_is_listed() -> None:
    modules = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert modules - {"__init__", "__main__", "gpu"} == set(STUDIES)
    assert [find(name).name for name in STUDIES] == list(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", [NANO, PAPER], ids=lambda scale: scale.name)
def test_a_study_has_numbers_of_the_paper_or_a_note_why_not(name: str, scale: Scale) -> None:
    one = find(name)
    numbers = one.numbers(scale)
    assert numbers
    assert any(n.paper is not None for n in numbers) or "gives no numbers" in one.note


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_which_part_of_the_paper_it_is(name: str) -> None:
    text = (ROOT / "experiments" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    assert any(word in text for word in ("Table", "Figure", "Appendix", "paper")), text


def test_two_cells_of_one_name_are_one_and_the_same() -> None:
    for scale in (SMOKE, NANO, PAPER):
        by_name: dict[str, Cell] = {}
        for name in STUDIES:
            for cell in find(name).cells(scale):
                assert by_name.setdefault(cell.name, cell) == cell


def test_two_variants_of_one_name_are_one_and_the_same() -> None:
    for scale in (SMOKE, NANO, PAPER):
        by_name: dict[str, Variant] = {}
        for name in STUDIES:
            for cell in find(name).cells(scale):
                if cell.variant is not None:
                    assert by_name.setdefault(cell.variant.name, cell.variant) == cell.variant


def test_every_committed_result_lies_once_with_a_study_that_shows_it() -> None:
    paths = list(cells.results_of(NANO).rglob("*.json"))
    assert paths and {path.parent.parent for path in paths} == {cells.results_of(NANO)}
    assert len({path.stem for path in paths}) == len(paths)
    for folder in {path.parent for path in paths}:
        shown = {cell.name for cell in find(folder.name).cells(NANO)}
        assert {path.stem for path in folder.iterdir()} <= shown, folder


def committed_answers() -> list[Any]:
    found = {c.name: c for name in STUDIES for c in find(name).cells(NANO)}
    answers = [cell for cell in found.values() if cell.measure == "answers"]
    return [pytest.param(cell, id=cell.name) for cell in answers if cell.path(NANO) is not None]


@pytest.mark.parametrize("cell", committed_answers())
def test_a_committed_result_has_the_settings_of_its_cell(cell: Cell) -> None:
    settings = (cell.read(NANO) or {})["settings"]
    questions = NANO.sets[cell.questions]
    assert settings["method"] == cell.method
    assert settings["data"] == Path(questions.source).name
    assert settings["control"] == cell.control
    assert settings["max_new_tokens"] == (cell.max_new_tokens or questions.max_new_tokens)
    assert settings["dtype"] == (cell.dtype or NANO.dtype)
    assert settings.get("memory", "bfloat16") == (cell.slots or "bfloat16")
    assert settings.get("shift", 0) == cell.shift
    if cell.limit is not None:
        assert settings["limit"] == cell.limit
    if cell.k is not None and cell.method in SELECTING:
        assert settings["k"] == cell.k


def test_layers_are_taken_at_the_same_depth() -> None:
    assert [PAPER.layer(layer) for layer in (4, 10, 16, 22)] == [4, 10, 16, 22]
    assert [NANO.layer(layer) for layer in (4, 10, 16, 22)] == [2, 4, 7, 9]


def test_every_model_of_the_paper_has_its_recipes() -> None:
    variants = {
        (cell.variant, cell.trained_for or cell.questions)
        for name in STUDIES
        for cell in find(name).cells(PAPER)
        if cell.variant is not None and not cell.variant.further and cell.method == "sedem"
    }
    for variant, questions in variants:
        if questions in ("hotpotqa", "2wiki", "musique", "qasper", "mixture"):
            for stage, (kind, _) in STAGES.items():
                load_recipe(kind, *recipe_of(variant, PAPER, stage, questions))


def test_the_papers_ablations_are_trained_without_selector() -> None:
    for name in ("decompression", "depth", "granularity", "lora", "mixed_layers"):
        cells = find(name).cells(PAPER)
        assert {cell.k for cell in cells if cell.measure == "answers"} == {"all"}
        for cell in cells:
            assert cell.variant is not None and cell.variant.every_block
            path, overrides = recipe_of(cell.variant, PAPER, "stage2", cell.questions or "hotpotqa")
            recipe = load_recipe(Stage2Recipe, path, overrides)
            assert (recipe.losses.select, recipe.data.budgets) == (0, ("all",))
    # A small decoder has no positions for every block: the evidence is put among two.
    for cell in find("lora").cells(NANO):
        assert cell.variant is not None and not cell.variant.every_block


def test_the_full_bank_of_hotpotqa_is_a_training_of_its_own() -> None:
    for name in ("controls", "operating_points"):
        banks = {
            cell.questions: cell.variant
            for cell in find(name).cells(PAPER)
            if (cell.k, cell.control, cell.shift, cell.limit) == ("all", "selected", 0, None)
        }
        assert banks == {
            "hotpotqa": without_selector(PAPER, BASE),
            "2wiki": main_model(PAPER),
        }

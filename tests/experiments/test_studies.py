"""The committed results belong to studies, and models of the paper have their recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system import cells
from experiments.system.cells import SELECTING, Cell
from experiments.system.models import BASE, Variant, main_model, recipe_of, without_selector
from experiments.system.scales import NANO, PAPER, Scale
from sedem_lab.data.hub import HOMES
from sedem_lab.training.recipe import load_recipe, what_trains
from sedem_lab.training.stages import Stage2Recipe, load_run

COMMITTED = pytest.mark.parametrize("scale", [NANO, PAPER], ids=lambda scale: scale.name)
"""The scales whose results are committed; the paper's has none yet."""
OF_SMALL_BACKBONES = (
    "plan",
    "context_tokens",
    "beside_llama_cpp",
    "real_model",
    "real_selection",
    "second_hop",
    "tool_servers",
    "agent_savings",
    "new_user",
    "finding",
)
OF_LARGE_BACKBONES = ("summaries", "adaptive")


@COMMITTED
def test_a_study_has_numbers_of_the_paper_or_a_note_why_not(scale: Scale) -> None:
    for name, one in STUDIES.items():
        numbers = one.numbers(scale)
        if name in (OF_SMALL_BACKBONES if scale is PAPER else OF_LARGE_BACKBONES):
            continue
        printed = any(n.paper is not None for n in numbers)
        assert numbers and (printed or "gives no numbers" in one.note), name


def test_two_cells_or_variants_of_one_name_are_one_and_the_same() -> None:
    for scale in (NANO, PAPER):
        by_name: dict[str, Cell] = {}
        variants: dict[str, Variant] = {}
        for study in STUDIES.values():
            for cell in study.cells(scale):
                assert by_name.setdefault(cell.name, cell) == cell
                if cell.variant is not None:
                    assert variants.setdefault(cell.variant.name, cell.variant) == cell.variant


@COMMITTED
def test_every_committed_result_lies_once_with_a_study_that_shows_it(scale: Scale) -> None:
    paths = list(cells.results_of(scale).rglob("*.json"))
    assert {path.parent.parent for path in paths} <= {cells.results_of(scale)}
    assert len({path.stem for path in paths}) == len(paths)
    for folder in {path.parent for path in paths}:
        shown = {cell.name for cell in STUDIES[folder.name].cells(scale)}
        assert {path.stem for path in folder.iterdir()} <= shown, folder
    assert not [path for path in paths if "stand_in" in json.loads(path.read_text("utf-8"))]


@COMMITTED
def test_a_committed_result_has_the_settings_of_its_cell(scale: Scale) -> None:
    found = {c.name: c for study in STUDIES.values() for c in study.cells(scale)}
    answers = [cell for cell in found.values() if cell.measure == "answers"]
    results = [(cell, cell.read(scale)) for cell in answers]
    assert scale is PAPER or any(result is not None for _, result in results)
    for cell, result in results:
        if result is None:
            continue
        settings, questions = result["settings"], scale.sets[cell.questions]
        public = HOMES.get(questions.source)
        expected = {
            "method": cell.method,
            "data": public.repository if public else Path(questions.source).name,
            "control": cell.control,
            "max_new_tokens": cell.max_new_tokens or questions.max_new_tokens,
            "dtype": cell.dtype or scale.dtype,
            "memory": cell.slots or "bfloat16",
            "shift": cell.shift,
        }
        if cell.limit is not None:
            expected["limit"] = cell.limit
        if cell.k is not None and cell.method in SELECTING:
            expected["k"] = cell.k
        shown = {"memory": "bfloat16", "shift": 0, **settings}
        assert {name: shown[name] for name in expected} == expected, cell.name


def test_layers_are_taken_at_the_same_depth() -> None:
    assert [PAPER.layer(layer) for layer in (4, 10, 16, 22)] == [4, 10, 16, 22]
    assert [NANO.layer(layer) for layer in (4, 10, 16, 22)] == [2, 4, 7, 9]


def test_every_model_of_the_paper_has_its_recipes() -> None:
    variants = {
        (cell.variant, cell.trained_for or cell.questions)
        for study in STUDIES.values()
        for cell in study.cells(PAPER)
        if cell.variant is not None and not cell.variant.further and cell.method == "sedem"
    }
    for variant, questions in variants:
        if questions in ("hotpotqa", "2wiki", "musique", "qasper", "mixture"):
            for stage in ("stage1", "stage2"):
                path, overrides = recipe_of(variant, PAPER, stage, questions)
                load_run(path, overrides)
                assert what_trains(path, overrides) == stage


def test_the_papers_ablations_are_trained_without_selector() -> None:
    for name in ("decompression", "depth", "granularity", "lora", "mixed_layers"):
        cells = STUDIES[name].cells(PAPER)
        if name == "decompression":  # the row of SeDeM is the main model
            chosen = [cell for cell in cells if cell.variant is not None and cell.variant.main]
            assert {(c.questions, c.k) for c in chosen if c.k} == {("hotpotqa", 2), ("qasper", 8)}
            cells = [cell for cell in cells if cell not in chosen]
        assert {cell.k for cell in cells if cell.measure == "answers"} == {"all"}
        for cell in cells:
            assert cell.variant is not None and cell.variant.every_block
            path, overrides = recipe_of(cell.variant, PAPER, "stage2", cell.questions or "hotpotqa")
            recipe = load_recipe(Stage2Recipe, path, overrides)
            assert (recipe.losses.select, recipe.data.budgets) == (0, ("all",))
    # A small decoder has no positions for every block: the evidence is put among two.
    for cell in STUDIES["lora"].cells(NANO):
        assert cell.variant is not None and not cell.variant.every_block


def test_the_full_bank_of_hotpotqa_is_a_training_of_its_own() -> None:
    for name in ("controls", "operating_points"):
        banks = {
            cell.questions: cell.variant
            for cell in STUDIES[name].cells(PAPER)
            if (cell.k, cell.control, cell.shift, cell.limit) == ("all", "selected", 0, None)
            and cell.variant in (without_selector(PAPER, BASE), main_model(PAPER))
        }
        assert banks == {
            "hotpotqa": without_selector(PAPER, BASE),
            "2wiki": main_model(PAPER),
        }

"""Every study end to end at smoke scale, and the page that is written from committed results."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import cells, paper, performance, study
from experiments.__main__ import PAGE, STUDIES, rendered
from experiments.__main__ import study as named_study
from experiments.cells import Cell
from experiments.figures import draw
from experiments.scales import NANO, PAPER, ROOT, SMOKE
from experiments.search import best, search
from experiments.study import NOT_RUN, Number, Study, fill
from experiments.variants import Variant, main, supervision
from sedem.baselines.registry import TRAINED
from sedem.training.baseline_recipe import BaselineRecipe, load_baseline_recipe
from sedem.training.recipe import load_recipe
from sedem.training.run import Stage2Recipe

FIXTURES = ROOT / "tests" / "fixtures"


def test_every_study_runs_end_to_end_at_smoke_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studies = [named_study(name) for name in STUDIES]
    fill(studies, SMOKE, FIXTURES)
    for one in studies:
        missing = [n for n in one.numbers(SMOKE) if n.cell is not None and n.ours(SMOKE) is None]
        assert not missing, f"{one.name} measured nothing for {missing[:3]}"
        picture = tmp_path / f"{one.name}.svg"
        draw(one, SMOKE, picture)
        assert picture.read_text().startswith("<?xml")
    measured: list[Cell] = []
    monkeypatch.setattr(study, "measure", lambda cell, scale, data: measured.append(cell))
    fill(studies, SMOKE, FIXTURES)
    assert not measured, "what is there is not measured again"


def test_every_module_of_a_study_is_listed() -> None:
    modules = {
        path.stem
        for path in (ROOT / "experiments").glob("*.py")
        if "STUDY = Study(" in path.read_text(encoding="utf-8")
    }
    assert modules == set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("scale", [NANO, PAPER], ids=lambda scale: scale.name)
def test_a_study_has_numbers_of_the_paper_or_a_note_why_not(name: str, scale: object) -> None:
    one = named_study(name)
    numbers = one.numbers(scale)  # type: ignore[arg-type]
    assert numbers
    assert any(n.paper is not None for n in numbers) or "gives no numbers" in one.note


def test_two_cells_of_one_name_are_one_and_the_same() -> None:
    for scale in (SMOKE, NANO, PAPER):
        by_name: dict[str, Cell] = {}
        for name in STUDIES:
            for cell in named_study(name).cells(scale):
                assert by_name.setdefault(cell.name, cell) == cell


def test_two_variants_of_one_name_are_one_and_the_same() -> None:
    for scale in (SMOKE, NANO, PAPER):
        by_name: dict[str, Variant] = {}
        for name in STUDIES:
            for cell in named_study(name).cells(scale):
                if cell.variant is not None:
                    assert by_name.setdefault(cell.variant.name, cell.variant) == cell.variant


@pytest.fixture
def one_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Study]:
    monkeypatch.setattr(cells, "RESULTS", tmp_path)

    def make(result: dict[str, object] | None, paper_value: float | None = 20.0) -> Study:
        cell = Cell(variant=Variant("some"), questions="hotpotqa")
        if result is not None:
            cell.path(NANO).parent.mkdir(exist_ok=True)
            cell.path(NANO).write_text(json.dumps(result))
        return Study("some", "Some", lambda scale: [Number("row", "F1", paper_value, cell)])

    return make


def test_ours_stands_over_the_papers_with_interval_and_difference(
    one_cell: Callable[..., Study],
) -> None:
    table = one_cell({"f1": {"mean": 14.84, "interval": [12.9, 16.6]}}).markdown(NANO)
    assert table.splitlines()[2] == "| row | 14.8 (12.9-16.6)<br>paper 20, -5.2 |"


def test_what_was_not_measured_is_said_and_shows_no_number(one_cell: Callable[..., Study]) -> None:
    assert one_cell(None).markdown(NANO).splitlines()[2] == f"| row | {NOT_RUN}<br>paper 20 |"
    assert one_cell(None, None).markdown(NANO).splitlines()[2] == f"| row | {NOT_RUN} |"


def test_a_result_of_one_scale_never_shows_at_another(one_cell: Callable[..., Study]) -> None:
    shown = one_cell({"f1": {"mean": 14.84, "interval": [12.9, 16.6]}})
    assert NOT_RUN in shown.markdown(PAPER)
    assert NOT_RUN in shown.markdown(SMOKE)


def test_the_page_shows_the_committed_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text, NANO) == text, "run `python -m experiments page`"
    assert set(STUDIES) == {
        line.split()[2] for line in text.splitlines() if line.startswith("<!-- study")
    }


def test_a_cell_changed_by_hand_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    shutil.copytree(cells.RESULTS / "nano", tmp_path / "nano")
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    path = tmp_path / "nano" / "cost.llama-3.2-1b.json"
    result = json.loads(path.read_text())
    result["parameters"]["selector"] += 1_000_000
    path.write_text(json.dumps(result))
    assert rendered(text, NANO) != text


def test_a_number_of_the_paper_is_one_number() -> None:
    assert paper.number("tab:ruler_qa2", "4k", method="SeDeM") == 31.6
    with pytest.raises(LookupError, match="0 rows have"):
        paper.number("tab:ruler_qa2", "4k", method="sedem")
    with pytest.raises(LookupError, match="5 rows have"):
        paper.number("tab:k_sweep", "f1", dataset="2WikiMHQA")


@pytest.mark.parametrize("method", TRAINED)
def test_a_baseline_learns_at_paper_scale_what_sedem_learns_for_a_set(method: str) -> None:
    for backbone in ("llama-3.2-1b", "llama-3.2-3b"):
        path = PAPER.baseline_recipe(method, "questions", backbone)
        for key, name in (("qasper", "qasper"), ("musique", "musique"), ("hotpotqa", "hotpotqa")):
            theirs = load_recipe(Stage2Recipe, PAPER.recipe("stage2", backbone, key))
            overrides = supervision(path, PAPER.recipe("stage2", backbone, key))
            recipe = load_baseline_recipe(method, path, overrides)
            data = recipe.data
            assert data is not None
            # The paper gives 500xCompressor 64 tokens of question and answer.
            limit = 64 if method == "500x" else theirs.data.answer_limit
            assert data.answer_limit == limit
            (source,) = data.training
            assert source.path == name
            if data.evaluation:
                (followed,) = data.evaluation
                assert followed.path == name
                first = "50" if key == "qasper" else "500"
                assert (followed.records, source.records) == (f":{first}", f"{first}:")
            if method == "rag":
                assert recipe.model.k == theirs.model.k == PAPER.sets[key].k  # type: ignore[attr-defined]
                assert data.max_paragraphs == theirs.data.max_blocks


def test_layers_are_taken_at_the_same_depth() -> None:
    assert [PAPER.layer(layer) for layer in (4, 10, 16, 22)] == [4, 10, 16, 22]
    assert [NANO.layer(layer) for layer in (4, 10, 16, 22)] == [2, 4, 7, 9]


@pytest.mark.parametrize("method", TRAINED)
def test_recipes_take_the_rate_that_was_found(method: str) -> None:
    result = Cell("search", method, main("nano")).read(NANO)
    if result is None:
        pytest.skip(f"no rate of {method} has been searched for")
    found = best(result)
    for path in sorted((ROOT / "recipes" / "nano").glob(f"{method}-*.yaml")):
        recipe = load_baseline_recipe(method, path)
        after_text = recipe.data is not None and recipe.start_from is not None
        rates = set(recipe.optimization.learning_rates.values())
        assert rates == {found / 2 if after_text else found}, path.name


@pytest.mark.parametrize(
    ("losses", "tried"),
    [([3, 2, 4, 1], 3), ([2, 3, 4, 1], 3), ([4, 3, 2, 3, 1], 4), ([5, 4, 3, 2, 1], 5)],
)
def test_a_search_goes_on_while_the_highest_rate_is_the_best(
    losses: list[float], tried: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scale = replace(NANO, rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2)[: len(losses)])
    by_rate = dict(zip(scale.rates, losses, strict=True))

    def train(recipe: BaselineRecipe) -> None:
        (rate,) = set(recipe.optimization.learning_rates.values())
        summary = {
            "evaluation": {"eval_loss": by_rate[rate]}, "seconds": 1.0, "steps": 20,
            "examples_seen": 320, "recipe": {"optimization": {"seed": 0}},
        }  # fmt: skip
        folder = Path(recipe.run.output)
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(json.dumps(summary))

    monkeypatch.setattr("sedem.training.baseline.train_baseline", train)
    result = search("icae", scale, "nano", tmp_path)
    assert [entry["loss"] for entry in result["rates"].values()] == losses[:tried]
    assert best(result) == scale.rates[losses.index(min(losses[:tried]))]


def test_the_page_of_times_shows_the_committed_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    assert performance.rendered(text) == text, "run `python -m experiments.performance page`"
    assert set(re.findall(r"<!-- bench ([\w.-]+) -->", text)) == set(performance.cells())
    there = performance.nano(NANO).path(NANO).is_file()
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    assert (performance.rendered(text) != text) == there


def bench_result(method: str = "sedem") -> dict[str, object]:
    """A bench as small as one can be."""
    times = {"median": 12.0, "min": 10.0, "q1": 11.0, "q3": 13.0, "max": 20.0, "n": 20}
    row = {
        "online_ttft_ms": times, "prebuilt_ttft_ms": times, "decode_tok_s": times,
        "build_tok_s": times, "layers_tok_s": {**times, "median": 10.0}, "batches": {},
        "stages": {"encode_ms": times}, "reads_tokens": 500, "memory": None,
        "build_stages": {"segment_ms": 1.0, "encode_ms": 2.0, "compress_ms": 3.0},
        "stored_bytes_per_token": 512.0, "floor": None,
    }  # fmt: skip
    return {
        "settings": {"device": "cpu", "dtype": "float32", "runs": 20, "answer_tokens": 33},
        "machine": {"processor": "Abacus", "cores": 2, "threads": 1, "device": "Abacus"},
        "versions": {"torch": "2", "transformers": "5"},
        "commit": {"id": "0123456789abcdef", "dirty": True},
        "ceilings": {"bytes_per_s": 2e10, "flops_per_s": 1e11},
        "load_average": [0.5, 1.5],
        "notes": ["no GPU here: these are times of the CPU"],
        "left_out": {"hf-compiled": "no compiler"},
        "results": {method: {"2048": row}},
        "selection": {
            "1000": {
                "blocks": 1000, "tokens": 128000, "bytes": 1e6, "score_ms": times, "floor_ms": 1,
            }
        },
    }  # fmt: skip


def test_a_bench_is_shown_with_machine_load_and_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    path = performance.nano(NANO).path(NANO)
    path.parent.mkdir()
    result = bench_result()
    older = {
        **result,
        "machine": {"device": "Slide rule"},
        "versions": {"torch": "1", "transformers": "4"},
    }
    result["earlier"] = [{n: older[n] for n in ("machine", "versions", "commit")}, None]
    path.write_text(json.dumps(result))
    page = performance.rendered("<!-- bench sedem-nano -->\n<!-- end -->")
    assert "Abacus, 2 cores, 1 threads, float32" in page and "with changes" in page
    assert "older: commit 0123456789 on Slide rule, torch 1, transformers 4" in page
    assert "older: it is not known what measured it" in page
    assert "0.5 and 1.5" in page and "- hf-compiled: no compiler" in page
    assert "| 2,048 | sedem | 500 of 2,048 | 12.0 (11.0-13.0) | - |" in page
    assert "| 2,048 | 12 | 10 | 1.20 |" in page
    assert "| 2,048 | 1.0 | 2.0 | 3.0 | 12.0 | - | - | - |" in page
    assert "| 1,000 | 128,000 | 1 | 12.0 (11.0-13.0) | 1.0 |" in page

"""README.md, the model card, docs/ and experiments/ show the committed results and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experiments import pages
from experiments.system import cells
from experiments.system.bench import bench_cells
from experiments.system.scales import NANO, SCALES

SMOL_CELL = "ways.sedem-smol-guided.squad-10.32-tokens.float32.n100"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_a_page_links_to_pictures_of_studies_that_it_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for picture, name, scale in pages.pictures_of(text):
        assert name in pages.studies_of(text), picture
        pages.STUDIES[name].plot(SCALES[scale], tmp_path / "drawn.svg")
        assert (page.parent / picture).read_bytes() == (tmp_path / "drawn.svg").read_bytes()


def test_every_study_is_on_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages.PAGES]
    shown = {name for text in texts for name in pages.studies_of(text)}
    # At the paper's scale alone, which has no results yet.
    assert shown == set(pages.STUDIES) - {"summaries", "adaptive"}


@pytest.mark.parametrize(
    ("page", "study", "cell", "change"),
    [
        (pages.RESULTS, "parameters", "cost.llama-3.2-1b", ("parameters", "selector")),
        (pages.PAGES[0], "real_model", SMOL_CELL, ("ways", "K=4", "f1", "mean")),
        (pages.CARD, "shipped_training", "training.sedem-nano.stage1", ("steps",)),
        (pages.PERFORMANCE, "batches", "batches.sedem-nano", ("settings", "runs")),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_a_cell_changed_by_hand_does_not_pass(
    page: Path,
    study: str,
    cell: str,
    change: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(cells.RESULTS / "nano", tmp_path / "nano")
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    path = tmp_path / "nano" / study / f"{cell}.json"
    result = json.loads(path.read_text())
    entry = result
    for name in change[:-1]:
        entry = entry[name]
    entry[change[-1]] *= 2
    path.write_text(json.dumps(result))
    text = page.read_text(encoding="utf-8")
    assert pages.rendered(text) != text


def test_notes_and_missing_methods_are_said_above_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = bench_cells(NANO).values()
    result = cell.read(NANO)
    assert result is not None
    result = {**result, "left_out": {"hf-compiled": "no compiler"}}
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    path = tmp_path / "nano" / "performance" / f"{cell.name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    page = pages.rendered("<!-- study performance -->\n<!-- end -->")
    assert "- no GPU here" in page and "- hf-compiled: no compiler" in page

"""README.md, the model card, docs/ and experiments/ show the committed results and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experiments import pages
from experiments.system import cells
from experiments.system.bench import bench_cells, worth
from experiments.system.scales import NANO


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_a_page_links_to_pictures_of_studies_that_it_shows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for picture, name, _ in pages.pictures_of(text):
        assert name in pages.studies_of(text), picture
        assert (page.parent / picture).is_file(), picture


def test_every_study_is_on_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages.PAGES]
    assert {name for text in texts for name in pages.studies_of(text)} == set(pages.STUDIES)


@pytest.mark.parametrize(
    ("page", "study", "cell", "change"),
    [
        (pages.RESULTS, "parameters", "cost.llama-3.2-1b", ("parameters", "selector")),
        (pages.PAGES[0], "shipped_model", "sedem-nano.squad-10.k2.32-tokens", ("f1", "mean")),
        (pages.CARD, "shipped_training", "training.sedem-nano.stage1", ("steps",)),
        (pages.PERFORMANCE, "batches", "batches.sedem-nano", ("ceilings", "flops_per_s")),
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
    (cell,) = bench_cells(NANO).values()
    path = tmp_path / "nano" / "performance" / f"{cell.name}.json"
    path.parent.mkdir(parents=True)
    result = bench_result()
    older = {
        **result,
        "machine": {"device": "Slide rule"},
        "versions": {"torch": "1", "transformers": "4"},
    }
    result["earlier"] = [{n: older[n] for n in ("machine", "versions", "commit")}, None]
    path.write_text(json.dumps(result))
    page = pages.rendered("<!-- study performance -->\n<!-- end -->")
    assert "Abacus, 2 cores, 1 threads, float32" in page and "with changes" in page
    assert "older: commit 0123456789 on Slide rule, torch 1, transformers 4" in page
    assert "older: its machine and versions are not known" in page
    assert "0.5 at the start, 1.5 at the end" in page and "- hf-compiled: no compiler" in page
    assert "| 2,048 | sedem | 500 of 2,048 | 12.0 (11.0-13.0) | - |" in page
    assert "| 2,048 | 12 | 10 | 1.20 |" in page
    assert "| 2,048 | 1.0 | 2.0 | 3.0 | 12.0 | - | - | - |" in page
    assert "| 1,000 | 128,000 | 1 | 12.0 (11.0-13.0) | 1.0 |" in page


def test_kept_keys_and_values_are_shown_with_what_they_are_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(time: float, kept: float | None) -> dict[str, object]:
        return {
            "prebuilt_ttft_ms": {"median": time, "q1": time - 1, "q3": time + 1},
            "missed_ttft_ms": {"median": 90.0},
            "warm_ms": {"median": 1200.0},
            "decoder_tokens": 256,
            "stored_bytes_per_token": 512.0,
            "kept": None if kept is None else {"bytes_per_token": kept},
        }

    rows = {
        "sedem": row(80, None), "sedem-warm": row(40, 12288), "text-blocks": row(50, 24576),
        "hf-prefix": row(30, 24576),
    }  # fmt: skip
    results = {name: {"2048": found} for name, found in rows.items()}
    monkeypatch.setattr(cells, "RESULTS", tmp_path)
    (cell,) = bench_cells(NANO, "kept").values()
    path = tmp_path / "nano" / "kept" / f"{cell.name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**bench_result(), "results": results, "worth": worth(results)}))
    page = pages.rendered("<!-- study kept -->\n<!-- end -->")
    assert "| 2,048 | sedem, cold | 256 | 80.0 (79.0-81.0) | 2.00 | 512 | - |" in page
    assert "| 2,048 | sedem, warm | 256 | 40.0 (39.0-41.0) | 1.00 | 512 | 12,288 |" in page
    assert "| 2,048 | text-blocks | 256 | 50.0 (49.0-51.0) | 1.25 | 512 | 24,576 |" in page
    assert "| 2,048 | hf-prefix | 256 | 30.0 (29.0-31.0) | 0.75 | - | 24,576 |" in page
    # A fifth of the way from a miss to what is found; 1,200 ms over 40 ms a question.
    assert "| 2,048 | 80.0 | 90.0 | 40.0 | 20 | 1,200 | 30 |" in page
    results["sedem"]["2048"] = row(35, None)
    assert worth(results)["2048"]["hit_rate"] == worth(results)["2048"]["questions"] == "never"


def test_a_bench_that_was_not_run_is_said_for_each_shape() -> None:
    page = pages.rendered("<!-- study batches paper -->\n<!-- end -->")
    names = "llama-3.2-1b:\n\nnot run\n\nllama-3.2-3b:\n\nnot run\n"
    assert page == f"<!-- study batches paper -->\n{names}<!-- end -->"

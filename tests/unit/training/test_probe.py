"""A probe: what it tries and recommends, that it goes on, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError, DataError
from sedem.training import probe as probe_runs
from sedem.training.probe import (
    PICTURE,
    ProbeSettings,
    best_pair,
    draw,
    kept,
    probe,
    quarters,
    read_documents,
    recommended,
)

SMALL = ProbeSettings(
    layers=((2, 1), (3, 3)),
    compressions=(2, 4),
    steps=2,
    batch_size=2,
    held_out=2,
    segment_length=16,
    continuation=8,
)


def texts() -> Iterator[str]:
    return iter(["The flat in Mill Lane is let from May. " * 6] * 2)


def row(extract: int, inject: int, compression: int, loss: float) -> dict[str, Any]:
    return {
        "extract_layers": [extract],
        "inject_layer": inject,
        "compression": compression,
        "continuation": {"memory": {"mean": loss}},
    }


ENDS = {"continuation": {"raw_text": {"mean": 2.0}, "nothing": {"mean": 3.0}}}


def test_quarters_inject_no_deeper_than_they_extract(tiny_folder: Callable[..., str]) -> None:
    pairs = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)]
    assert quarters(open_backbone(tiny_folder())) == pairs
    with pytest.raises(ConfigError, match=r"has 3 layers.* at least 4"):
        quarters(open_backbone(tiny_folder(depth=3)))


def test_pairs_are_compared_at_the_compressions_that_all_were_tried_with() -> None:
    rows = [row(6, 3, 4, 2.6), row(9, 3, 4, 2.5), row(6, 3, 1, 2.1)]
    assert best_pair(rows) == (9, 3)
    assert best_pair([*rows, row(9, 3, 1, 2.3)]) == (6, 3)


def test_the_largest_compression_that_costs_little_is_recommended() -> None:
    def chosen(*losses: float) -> int:
        rows = [row(6, 3, c, loss) for c, loss in zip((1, 2, 4), losses, strict=True)]
        return int(recommended({"runs": rows, "ends": ENDS})["compression"])

    assert chosen(2.50, 2.54, 2.60) == 2
    assert chosen(2.50, 2.52, 2.55) == 4
    assert chosen(3.10, 3.20, 3.30) == 1, "where memory is worse than nothing, the best one"
    assert kept(row(6, 3, 1, 2.25), ENDS) == pytest.approx(0.75)
    worthless = {"continuation": {"raw_text": {"mean": 3.1}, "nothing": {"mean": 3.0}}}
    assert kept(row(6, 3, 1, 3.5), worthless) == 0


def test_a_probe_tries_depths_then_compressions_and_goes_on(
    tiny_folder: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[int, int]] = []

    def run(settings: ProbeSettings = SMALL) -> dict[str, Any]:
        return probe(
            tiny_folder(), texts(), settings, tmp_path, lambda *steps: reported.append(steps)
        )

    result = run()
    tried = [(r["extract_layers"][0], r["inject_layer"], r["compression"]) for r in result["runs"]]
    assert len(tried) == 3 and {(2, 1, 4), (3, 3, 4)} < set(tried)
    assert [r["continuation"]["memory"]["mean"] for r in result["runs"]] == sorted(
        r["continuation"]["memory"]["mean"] for r in result["runs"]
    )
    assert {r["compression"]: r["bytes_per_token"] for r in result["runs"]} == {2: 32, 4: 16}
    assert reported[-1] == (6, 6) and (1, 6) in reported
    assert not list(tmp_path.glob("run-*")), "no checkpoint of a run is kept"
    draw(result, tmp_path / PICTURE)
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(probe_runs, "fit", None)
    again = run()
    assert {**again, "commit": None} == {**result, "commit": None}
    with pytest.raises(ConfigError, match="results of other settings"):
        run(SMALL.with_changes(seed=1))


def test_what_cannot_be_probed_is_refused_before_any_training(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    def refused(error: type[Exception], words: str, **changes: Any) -> None:
        out = tmp_path / "new"
        with pytest.raises(error, match=words):
            probe(tiny_folder(), texts(), SMALL.with_changes(**changes), out, print)
        assert not out.exists()

    refused(ConfigError, "inject_layer is 4", layers=((4, 4),))
    refused(ConfigError, "not a multiple of compression 3", compressions=(3,))
    refused(DataError, r"17 windows of 24 tokens, a probe needs 22: 10 steps of 2", steps=10)
    with pytest.raises(DataError, match=r"no file or folder 'nowhere.txt'"):
        next(read_documents([Path("nowhere.txt")]))

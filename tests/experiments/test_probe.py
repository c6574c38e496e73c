"""A probe: what it tries and recommends, that it goes on, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.system import probe as probe_runs
from experiments.system.probe import ProbeSettings, kept, probe, quarters, recommended
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError, DataError

SMALL = ProbeSettings(
    layers=((2, 1), (3, 3)), compressions=(2, 4), steps=2, batch_size=2, held_out=2,
    segment_length=16, continuation=8,
)  # fmt: skip
ENDS = {"continuation": {"raw_text": {"mean": 2.0}, "nothing": {"mean": 3.0}}}


def texts() -> Iterator[str]:
    return iter(["The flat in Mill Lane is let from May. " * 6] * 2)


def row(extract: int, inject: int, compression: int, loss: float) -> dict[str, Any]:
    return {
        "extract_layers": [extract],
        "inject_layer": inject,
        "compression": compression,
        "continuation": {"memory": {"mean": loss}},
    }


def test_quarters_inject_no_deeper_than_they_extract(tiny_folder: Callable[..., str]) -> None:
    pairs = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)]
    assert quarters(open_backbone(tiny_folder())) == pairs
    with pytest.raises(ConfigError, match=r"has 3 layers.* at least 4"):
        quarters(open_backbone(tiny_folder(depth=3)))


def test_the_largest_compression_that_costs_little_is_recommended() -> None:
    def chosen(*losses: float) -> int:
        rows = [row(6, 3, c, loss) for c, loss in zip((1, 2, 4), losses, strict=True)]
        other = row(9, 3, 8, 2.0)  # of other layers
        return int(recommended([*rows, other], (6, 3), ENDS)["compression"])

    assert chosen(2.50, 2.54, 2.60) == 2
    assert chosen(2.50, 2.52, 2.55) == 4
    assert chosen(3.10, 3.20, 3.30) == 1, "where memory is worse than nothing, the best one"
    assert kept(row(6, 3, 1, 2.25), ENDS) == pytest.approx(0.75)
    worthless = {"continuation": {"raw_text": {"mean": 3.1}, "nothing": {"mean": 3.0}}}
    assert kept(row(6, 3, 1, 3.5), worthless) == 0


def test_a_probe_tries_depths_then_compressions_and_goes_on(
    tiny_folder: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def run(settings: ProbeSettings = SMALL) -> dict[str, Any]:
        return probe(tiny_folder(), texts(), settings, tmp_path, began.append)

    result = run()
    tried = [(r["extract_layers"][0], r["inject_layer"], r["compression"]) for r in result["runs"]]
    assert len(tried) == 3 and {(2, 1, 4), (3, 3, 4)} < set(tried)
    losses = [r["continuation"]["memory"]["mean"] for r in result["runs"]]
    assert losses == sorted(losses)
    assert {r["compression"]: r["bytes_per_token"] for r in result["runs"]} == {2: 32, 4: 16}
    assert began[:2] == ["extract-2.inject-1.c4", "extract-3.inject-3.c4"] and len(began) == 4
    assert not list(tmp_path.glob("run-*")), "no checkpoint of a run is kept"

    monkeypatch.setattr(probe_runs, "fit", None)
    again = run()
    assert {**again, "commit": None} == {**result, "commit": None}
    with pytest.raises(ConfigError, match="results of other settings"):
        run(SMALL.with_changes(steps=1))


def test_what_cannot_be_probed_is_refused_before_any_training(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    def refused(error: type[Exception], words: str, **changes: Any) -> None:
        out = tmp_path / "new"
        with pytest.raises(error, match=words):
            probe(tiny_folder(), texts(), SMALL.with_changes(**changes), out)
        assert not out.exists()

    refused(ConfigError, "inject_layer is 4", layers=((4, 4),))
    refused(ConfigError, "not a multiple of compression 3", compressions=(3,))
    refused(DataError, r"17 windows of 24 tokens, a probe needs 22: 10 steps of 2", steps=10)


def test_the_command_prints_a_table_and_how_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {**row(6, 3, 2, 2.5), "recall": {"memory": {"mean": 1.0}}, "bytes_per_token": 512.0}
    found["continuation"]["true_states"] = {"mean": 2.2}
    given: dict[str, Any] = {}

    def run(name: str, documents: Iterator[str], settings: ProbeSettings, *_: Any) -> Any:
        given.update(name=name, texts=[*documents], settings=settings)
        return {"ends": ENDS, "runs": [found], "recommended": found}

    monkeypatch.setattr(probe_runs, "probe", run)
    (tmp_path / "a.txt").write_text("Some text.")
    words = ["probe", "base", str(tmp_path), "--out", "x", "--layers", "6:3", "--compression", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert given["texts"] == ["Some text."] and given["settings"].layers == ((6, 3),)
    assert (
        "50%" in done.output
        and "loss with the text itself 2.000, with nothing 3.000" in done.output
    )
    assert "--set model.encoder=base --set 'model.extract_layers=[6]'" in done.output
    assert json.dumps(given["settings"].compressions) == "[2]"

"""The study of confidence end to end at smoke scale, and its figures on made-up features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.confidence import STUDY
from experiments.system import study
from experiments.system.confidence import measure_confidence
from experiments.system.scales import ROOT, SMOKE
from sedem.method.confidence import Confidence


def test_the_study_measures_both_contexts_and_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fixtures = ROOT / "tests" / "fixtures"
    study.measure_missing([STUDY], SMOKE, fixtures)
    (cell,) = STUDY.cells(SMOKE)
    path = cell.path(SMOKE)
    assert path is not None
    assert all(number.value(SMOKE) is not None for number in STUDY.numbers(SMOKE))
    path.write_text("{}")
    study.measure_missing([STUDY], SMOKE, fixtures)
    assert path.read_text() == "{}"
    study.measure_missing([STUDY], SMOKE, fixtures, again=True)
    assert cell.read(SMOKE) != {}


def test_figures_are_those_of_plain_loops() -> None:
    part = Confidence()
    with torch.no_grad():
        part.weight.copy_(torch.tensor([4.0, 1.0]))
        part.bias.fill_(-2.0)
    generator = torch.Generator().manual_seed(0)
    present = torch.tensor([True, False]).repeat(40)
    features = torch.rand(80, 2, generator=generator) + 0.2 * present[:, None]
    found = measure_confidence(part, features, present)
    logits = [4 * a + b - 2 for a, b in features.tolist()]
    with_it, without = logits[::2], logits[1::2]
    wins = sum(a > b for a in with_it for b in without)
    assert found["auroc"]["mean"] == pytest.approx(wins / 1600, abs=1e-4)
    best = features[:, 0].tolist()
    wins = sum(a > b for a in best[::2] for b in best[1::2])
    assert found["auroc_of_one_feature"]["best"]["mean"] == pytest.approx(wins / 1600, abs=1e-4)
    for name, kind in (("with", with_it), ("without", without)):
        share = 100 * sum(logit < 0 for logit in kind) / 40
        assert found[f"declined_{name}_evidence"]["mean"] == pytest.approx(share, abs=1e-4)
    for figure in ("auroc", "calibration_error"):
        low, high = found[figure]["interval"]
        assert low < high and found[figure]["n"] == 40
    assert len(found["reliability"]) == 10

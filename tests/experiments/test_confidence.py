"""The figures of the study of confidence, on made-up features."""

from __future__ import annotations

import pytest
import torch

from experiments.system import search
from experiments.system.search import measure_confidence
from sedem.guidance import Confidence


def test_figures_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "RESAMPLES", 50)
    part = Confidence()
    with torch.no_grad():
        part.weight.copy_(torch.tensor([4.0, 1.0, 2.0]))
        part.bias.fill_(-2.0)
    generator = torch.Generator().manual_seed(0)
    present = torch.tensor([True, False]).repeat(40)
    features = torch.rand(80, 3, generator=generator) + 0.2 * present[:, None]
    found = measure_confidence(part, features, present)
    logits = [4 * a + b + 2 * c - 2 for a, b, c in features.tolist()]
    with_it, without = logits[::2], logits[1::2]
    wins = sum(a > b for a in with_it for b in without)
    assert found["auroc"]["mean"] == pytest.approx(wins / 1600, abs=1e-4)
    for name, kind in (("with", with_it), ("without", without)):
        share = 100 * sum(logit < 0 for logit in kind) / 40
        assert found[f"declined_{name}_evidence"]["mean"] == pytest.approx(share, abs=1e-4)
    for figure in ("auroc", "calibration_error"):
        low, high = found[figure]["interval"]
        assert low < high and found[figure]["n"] == 40

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.guidance.scores import (
    Auto,
    Confidence,
    Guidance,
    blocks_for_mass,
    confidence_features,
    guidance_bias,
)
from sedem_lab.evaluation.metrics import BINS, auroc, calibration_error


def naive_features(scores: list[float], tokens: int) -> list[float]:
    """The best score, and its distance from the mean of the next seven, per question token."""
    best, *rest = sorted((s for s in scores if s > -math.inf), reverse=True)
    rivals = rest[:7]
    lead = best - sum(rivals) / len(rivals) if rivals else 0.0
    return [best / tokens, lead / tokens]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 40])
@pytest.mark.parametrize("tokens", [1, 12])
def test_the_features_are_the_best_score_and_its_lead_per_token(count: int, tokens: int) -> None:
    scores = torch.randn(count, generator=torch.Generator().manual_seed(count))
    expected = naive_features(scores.tolist(), tokens)
    assert confidence_features(scores, tokens).tolist() == pytest.approx(expected, abs=1e-6)


def test_blocks_that_are_no_candidates_change_nothing() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0])
    padded = torch.cat([torch.full((20,), -torch.inf), scores])
    assert torch.equal(confidence_features(padded, 4), confidence_features(scores, 4))


def test_confidence_is_a_logistic_function_and_one_half_before_it_is_fitted() -> None:
    part = Confidence()
    assert part(torch.tensor([[0.7, 0.2]])).item() == 0.5
    with torch.no_grad():
        part.weight.copy_(torch.tensor([2.0, -3.0]))
        part.bias.fill_(0.5)
        (found,) = part(torch.tensor([[0.7, 0.2]])).tolist()
    assert found == pytest.approx(1 / (1 + math.exp(-(2 * 0.7 - 3 * 0.2 + 0.5))))


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, whether the evidence is there, and the probabilities that it was drawn with."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 2, generator=generator) * torch.tensor([0.1, 0.02]) + 0.5
    logits = features @ torch.tensor([12.0, 40.0]) - 26.0
    chances = logits.sigmoid()
    return features, torch.rand(count, generator=generator) < chances, chances


def test_a_fit_finds_the_probabilities_that_labels_were_drawn_with() -> None:
    part = Confidence()
    part.fit(*drawn(20_000)[:2])
    features, present, chances = drawn(5_000, seed=1)
    with torch.no_grad():
        found = part(features)
    assert (found - chances).abs().max() < 0.03
    assert calibration_error(found, present) < 0.03


def test_a_fit_is_finite_where_the_features_tell_everything() -> None:
    part = Confidence()
    part.fit(torch.tensor([[0.1, 0.5], [0.2, 0.5], [0.8, 0.5], [0.9, 0.5]]), torch.arange(4) > 1)
    with torch.no_grad():
        found = part(torch.tensor([[0.15, 0.5], [0.85, 0.5]]))
    assert torch.isfinite(part.weight).all()
    assert found[0] < 0.05 and found[1] > 0.95


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    rng = random.Random(0)
    for _ in range(10):
        confidence = [rng.randrange(6) / 5 for _ in range(30)]
        present = [True, False] + [rng.random() < 0.4 for _ in range(28)]
        wins = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a, is_present in zip(confidence, present, strict=True)
            if is_present
            for b, other in zip(confidence, present, strict=True)
            if not other
        ]
        found = auroc(torch.tensor(confidence), torch.tensor(present))
        assert found == pytest.approx(sum(wins) / len(wins))


@pytest.mark.parametrize("count", [BINS, 47, 3])
def test_the_calibration_error_is_the_mean_distance_of_groups(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    confidence = torch.rand(count, generator=generator)
    present = torch.rand(count, generator=generator) < confidence
    pairs = sorted(zip(confidence.tolist(), present.tolist(), strict=True))
    small, larger = divmod(count, BINS)
    total, start = 0.0, 0
    for group in range(BINS):
        size = small + (group < larger)
        part, start = pairs[start : start + size], start + size
        if part:
            total += abs(sum(p for p, _ in part) - sum(real for _, real in part))
    assert calibration_error(confidence, present) == pytest.approx(total / count)


SCORES = st.lists(st.floats(-20, 20), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(SCORES, min_size=1, max_size=3), tau=st.floats(0.1, 10))
def test_the_bias_of_a_block_is_how_far_it_scored_behind_the_best_over_tau(
    rows: list[list[float]], tau: float
) -> None:
    width = max(map(len, rows))
    scores = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row in rows])
    bias = guidance_bias(scores, tau)
    for row, found in zip(rows, bias.tolist(), strict=True):
        expected = [(s - max(row)) / tau for s in row] + [0.0] * (width - len(row))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_tau_is_trained_and_stays_positive() -> None:
    guidance = Guidance(tau=0.5)
    assert guidance.tau.item() == pytest.approx(0.5)
    optimizer = torch.optim.SGD(guidance.parameters(), lr=3.0)
    guidance(torch.tensor([[1.0, 3.0]])).sum().backward()
    optimizer.step()
    assert 0 < guidance.tau.item() < math.inf
    assert guidance.tau.item() != pytest.approx(0.5)


def test_the_gradient_of_a_place_without_a_block_is_zero() -> None:
    scores = torch.tensor([[2.0, 1.0, -math.inf]], requires_grad=True)
    guidance = Guidance()
    guidance(scores).square().sum().backward()
    assert scores.grad is not None
    # The best block is the reference of the other: d/ds of (s_1 - s_0)^2.
    assert scores.grad.tolist() == [[2.0, -2.0, 0.0]]
    assert guidance.log_tau.grad is not None and guidance.log_tau.grad.isfinite()


# Budgets by need


def fewest(scores: list[float], tau: float, mass: float, most: int) -> int:
    """The fewest best scores whose shares of the sum of exp(s / tau) of `most` reach a mass."""
    weights = sorted((math.exp(score / tau) for score in scores), reverse=True)[:most]
    total = 0.0
    for count, weight in enumerate(weights, start=1):
        total += weight
        if total / sum(weights) >= mass - 1e-12:
            return count
    return len(weights)


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_a_budget_by_need_is_the_fewest_blocks_that_reach_the_mass(tau: float, mass: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        scores = (3 * torch.randn(12)).tolist()
        for most in (1, 5, 12, 20):
            expected = fewest(scores, tau, mass, most)
            assert blocks_for_mass(torch.tensor(scores), tau, mass, 1, most) == expected
        limited = blocks_for_mass(torch.tensor(scores), tau, mass, 3, 5)
        assert limited == max(fewest(scores, tau, mass, 5), 3)


def test_a_budget_by_need_does_not_depend_on_how_many_bad_blocks_there_are() -> None:
    few = torch.tensor([5.0, 1.0, 0.5, 0.0])
    many = torch.cat([few, torch.full((50_000,), -torch.inf), torch.zeros(50_000)])
    assert blocks_for_mass(few, 1.0, 0.9, 1, 4) == blocks_for_mass(many, 1.0, 0.9, 1, 4) == 1


def test_an_auto_budget_takes_what_it_leaves_open_from_the_model() -> None:
    config = SedemConfig(encoder="-", extract_layers=(1,), inject_layer=1, auto_min=2, auto_max=6)
    assert Auto().filled(config) == (0.95, 2, 6)
    assert Auto(0.5, 3, 4).filled(config) == (0.5, 3, 4)
    assert Auto(most=1).filled(config) == (0.95, 1, 1)
    assert Auto(least=9).filled(config) == (0.95, 9, 9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mass": 1.5}, r"mass is 1\.5; it must be a number from 0 to 1"),
        ({"mass": True}, "mass is True"),
        ({"mass": math.nan}, "mass is nan"),
        ({"least": 0}, "least is 0; it must be a whole number of at least 1"),
        ({"most": 2.0}, r"most is 2\.0; it must be"),
        ({"least": 4, "most": 3}, "least is 4 but most 3"),
    ],
)
def test_a_bad_auto_budget_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Auto(**settings)

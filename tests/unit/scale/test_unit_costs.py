"""Unit costs: seconds follow from the figures of the committed table."""

from __future__ import annotations

import pytest

from sedem.evaluation.cost import Workload
from sedem.scale.unit_costs import UnitCosts, counted, from_entries, measured, table


def entries(**values: float) -> dict[str, dict[str, float]]:
    return {name: {"value": value} for name, value in values.items()}


def test_every_figure_names_a_file_whose_machine_is_known() -> None:
    found = table()
    named = {
        entry["file"] for model in found["models"].values() for entry in model["costs"].values()
    }
    assert named == set(found["files"])
    assert all("torch" in about["made_on"] for about in found["files"].values())


def test_seconds_a_unit_follow_from_measured_figures() -> None:
    costs = from_entries(
        "a device",
        entries(
            read_tokens_s=2000, exact_ms=3000, exact_blocks=100_000, coarse_ms=300,
            coarse_blocks=100_000, candidates_ms=90, warm_ms=500, warm_tokens=1000,
        ),
    )  # fmt: skip
    assert costs.read == 1 / 2000
    assert costs.exact == pytest.approx(3e-5)
    assert costs.coarse == pytest.approx(3e-6)
    assert costs.candidates == pytest.approx(0.09)
    assert costs.warm == pytest.approx(5e-4)
    assert costs.answer(16) is None


def test_candidates_cost_what_so_many_blocks_do_if_they_were_not_measured() -> None:
    costs = from_entries("a device", entries(exact_ms=3000, exact_blocks=100_000))
    assert costs.candidates == pytest.approx(4096 * 3e-5)


def test_a_full_batch_is_answered_at_the_measured_rate() -> None:
    figures = entries(
        first_ms=150, decode_tokens_s=80, batch=64, batch_questions_s=5, answer_tokens=17
    )
    costs = from_entries("a device", figures)
    seconds = costs.answer(17)
    assert seconds == pytest.approx(1 / 5)
    assert costs.row is not None and costs.row > 0


def test_a_batch_that_is_faster_than_its_prefills_gives_no_negative_time() -> None:
    figures = entries(
        first_ms=300, decode_tokens_s=80, batch=8, batch_questions_s=5, answer_tokens=17
    )
    assert from_entries("a device", figures).row == 0


def test_counted_times_fall_with_the_rate_and_say_what_they_are() -> None:
    slow, fast = (counted("llama-3.2-1b", rate, Workload()) for rate in (100, 400))
    assert not fast.is_measured and "400 TFLOP/s" in fast.device
    assert slow.read == pytest.approx(4 * (fast.read or 0))
    # 30 question tokens, 32 slots of 4 heads of 512: two FLOPs a product.
    assert fast.exact == pytest.approx(2 * 30 * 32 * 2048 / 400e12)
    assert fast.coarse == pytest.approx((fast.exact or 0) / 4)


def test_a_model_without_results_has_no_measured_costs() -> None:
    assert measured("another") is None
    assert isinstance(measured("sedem-nano"), UnitCosts)

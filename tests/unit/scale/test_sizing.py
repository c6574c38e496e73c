"""Engines of a bank by simulation: enough for the limit, and scaled up from a slice."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sedem.cli.main import app
from sedem.errors import ConfigError
from sedem.scale import sizing
from sedem.scale.costs import Machines, Plan, bank_cost
from sedem.scale.sizing import sized


def test_engines_keep_the_limit_and_bursts_need_more() -> None:
    result = bank_cost("sedem-nano", Plan(10**6, 20.0))
    found = sized(result, 1.5, questions=600)
    assert found["poisson"]["first_p99_s"] <= 1.5 and found["bursts"]["first_p99_s"] <= 1.5
    needed = 20 * result["answer"]["device_seconds_a_question"]
    assert needed <= found["poisson"]["engines"] <= found["bursts"]["engines"]
    assert found["partitions"] == 1
    # One device scores for 0.18 s: at a load of 0.7, 20 a second need 6.
    assert 6 <= found["poisson"]["scorers"] <= found["bursts"]["scorers"]


def test_engines_are_scaled_up_from_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "SLICE", 4)
    result = bank_cost("sedem-nano", Plan(10**6, 2000.0))
    found = sized(result, 2.0, questions=300)
    share = found["simulated_questions_per_second"] / 2000.0
    assert share < 0.1
    assert found["poisson"]["engines"] >= 2000 * result["answer"]["device_seconds_a_question"]


def test_a_limit_below_the_time_of_one_question_needs_no_number() -> None:
    result = bank_cost("sedem-nano", Plan(10**6), Machines(score_seconds=0.1))
    assert sized(result, 0.01, questions=100)["poisson"]["engines"] is None


def test_what_was_not_measured_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="--tflops"):
        sized(bank_cost("llama-3.2-1b", Plan(10**9)), 1.0)
    with pytest.raises(ConfigError, match="above 0"):
        sized(bank_cost("sedem-nano", Plan(10**6)), 0.0)


def test_the_command_shows_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "QUESTIONS", 200)
    words = ["cost", "--bank", "1M", "--simulate", "2"]
    told = CliRunner().invoke(app, [*words, "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["simulation"]["poisson"]["engines"] >= 1
    assert "first p99, s" in CliRunner().invoke(app, words).stdout

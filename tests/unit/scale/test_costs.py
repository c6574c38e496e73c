"""The cost of a bank: products of unit costs and counts, and what is not measured says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from sedem.bank.search import COARSE_FROM
from sedem.cli.bank_cost import parse_machine, parse_tokens
from sedem.cli.main import app
from sedem.errors import ConfigError
from sedem.scale.costs import Machines, Plan, bank_cost
from sedem.scale.unit_costs import UnitCosts

COSTS = UnitCosts(
    "made up", True, read=1e-3, exact=1e-5, coarse=1e-6, candidates=0.05, first=0.1, step=0.01,
    row=0.001, rows=10, text_bytes=4.0, open_bytes=200.0,
)  # fmt: skip


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr("sedem.scale.unit_costs.measured", lambda model: COSTS)

    def cost(tokens: int, machines: Machines | None = None, **plan: Any) -> dict[str, Any]:
        return bank_cost("sedem-nano", Plan(tokens, **plan), machines)

    return cost


def test_reading_is_tokens_times_their_cost(cost: Callable[..., dict[str, Any]]) -> None:
    build = cost(10**9, Machines(devices=10, days=1.0))["build"]
    assert build["device_seconds"] == pytest.approx(1e6)
    assert build["days_on_one_machine"] == pytest.approx(1e5 / 86400)
    assert build["machines"] == 2


def test_sedem_scores_exactly_up_to_its_limit(cost: Callable[..., dict[str, Any]]) -> None:
    at, above = (cost(128 * blocks)["score"] for blocks in (COARSE_FROM, COARSE_FROM + 1))
    assert (at["search"], at["recall"]["how"], at["candidates"]) == ("exact", "exact search", None)
    assert (above["search"], above["candidates"]) == ("coarse", 4096)
    assert (at["parts_for_exact"], above["parts_for_exact"]) == (1, 2)
    assert at["exact"]["device_seconds_a_question"] == pytest.approx(1.0)
    assert at["coarse"]["device_seconds_a_question"] == pytest.approx(0.1 + 0.05)


def test_scorers_are_as_many_as_questions_time_or_memory_need(
    cost: Callable[..., dict[str, Any]],
) -> None:
    machines = Machines(devices=10, memory_gb=64, load=0.5)
    busy = cost(12_800_000, machines, questions_per_second=100)["score"]["exact"]
    assert (busy["machines"], busy["because_of"]) == (20, "the questions a second")
    late = cost(12_800_000, Machines(devices=10, score_seconds=0.01), questions_per_second=0.1)
    assert late["score"]["exact"]["machines"] == 10
    assert late["score"]["exact"]["because_of"] == "the time of one question"
    # A question searches one of many banks, but the keys of all are in memory.
    many = cost(10**12, Machines(devices=1000), questions_per_second=0.1, searched=12_800_000)
    found = many["score"]
    assert found["search"] == "exact" and found["blocks"] == COARSE_FROM
    assert found["exact"]["machines"] == found["exact"]["machines_for_memory"] == 8000
    assert found["exact"]["because_of"] == "the memory of keys"


def test_money_is_machines_times_hours_times_price(cost: Callable[..., dict[str, Any]]) -> None:
    machines = Machines(devices=10, price=2.0, storage_price=10.0, load=0.5)
    result = cost(12_800_000, machines, questions_per_second=100)
    assert result["money"]["per_million_tokens_read"] == pytest.approx(1000 / 10 / 3600 * 2)
    # 10 answers at once: 0.1 s + 15 steps of (0.01 + 9 * 0.001) / 10 each.
    assert result["answer"]["device_seconds_a_question"] == pytest.approx(0.1 + 15 * 0.0019)
    assert result["answer"]["machines"] == 3
    hours = 1e6 / 100 / 3600
    assert result["money"]["per_million_questions"] == pytest.approx((20 + 3) * 2 * hours)
    stored = 100_000 * (65_536 + 65_536) + 12_800_000 * 4
    assert result["money"]["storage_per_month"] == pytest.approx(stored / 1e12 * 10, rel=0.1)


def test_what_was_not_measured_is_named_and_has_no_figure() -> None:
    result = bank_cost("llama-3.2-1b", Plan(10**12))
    assert result["build"]["machines"] is None and result["answer"]["machines"] is None
    assert result["money"]["per_million_questions"] is None
    assert "reading" in result["not_measured"] and "answering" in result["not_measured"]
    assert result["bytes"]["slots"]["bfloat16"] == 1024 * 10**12


def test_counted_costs_are_named_as_such() -> None:
    result = bank_cost("llama-3.2-1b", Plan(10**9), tflops=400)
    assert not result["is_measured"] and "400 TFLOP/s" in result["basis"]
    assert result["not_measured"] == []
    assert result["build"]["device_seconds"] > 0


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12000000", 12_000_000), ("12_000_000", 12_000_000), ("12,000,000", 12_000_000),
        ("1e9", 10**9), ("2.5e3", 2500), ("10M", 10**7), ("2.5B", 2_500_000_000),
        ("3G", 3 * 10**9), ("2T", 2 * 10**12), ("0.5K", 500), ("1e12", 10**12),
    ],
)  # fmt: skip
def test_numbers_of_tokens_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "0", "1.5", "1e16", "1 T", "1Q", "1e-3", "nan", "1e99", "٣"]
)
def test_other_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        parse_tokens(text)


@pytest.mark.parametrize("entry", ["cores=3", "devices=2.5", "price=x", "price", "load=2"])
def test_other_settings_of_machines_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError):
        Machines(**parse_machine([entry]))


@pytest.mark.parametrize(
    "change", [{"devices": 0}, {"load": 0.0}, {"days": float("nan")}, {"price": -1.0}]
)
def test_machines_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Machines(**change)


@pytest.mark.parametrize(
    "change",
    [{"tokens": 0}, {"questions_per_second": 0.0}, {"searched": 11}, {"document_tokens": 0}],
)
def test_plans_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan(**{"tokens": 10, **change})


def test_the_command_prints_what_the_functions_count() -> None:
    words = ["cost", "--bank", "1T", "--questions-per-second", "1e4", "--searched", "10M"]
    told = CliRunner().invoke(app, [*words, "--machine", "price=3", "--json"])
    assert told.exit_code == 0, told.output
    plan = Plan(10**12, 10_000.0, 10**7)
    assert json.loads(told.stdout) == json.loads(
        json.dumps(bank_cost("sedem-nano", plan, Machines(price=3.0)))
    )
    shown = CliRunner().invoke(app, ["cost", "--bank", "1T"])
    assert shown.exit_code == 0
    assert "7,812,500,000 blocks" in shown.stdout and "assumed, not measured" in shown.stdout
    assert "extrapolated" in shown.stderr


def test_the_command_says_what_is_not_measured() -> None:
    shown = CliRunner().invoke(app, ["cost", "--bank", "1T", "--checkpoint", "llama-3.2-1b"])
    assert shown.exit_code == 0
    assert "not measured" in shown.stdout and "--tflops" in shown.stderr


@pytest.mark.parametrize(
    "words", [["llama-3.2-1b", "--bank", "1T"], ["--searched", "1T", "llama-3.2-1b"]]
)
def test_options_that_do_not_belong_together_are_refused(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["cost", *words]).exit_code == 2

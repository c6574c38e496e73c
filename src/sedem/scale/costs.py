"""Estimate what a bank of any size costs: bytes, machines and money, from unit costs.

Every figure is a product of a unit cost and a count. A figure without a unit cost is None and is
listed in `not_measured`. The assumed machines, their prices and their load are in `assumptions`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from sedem.bank.search import CANDIDATES, COARSE_FROM
from sedem.checkpoint.folder import embedded
from sedem.errors import ConfigError
from sedem.evaluation.cost import Workload
from sedem.quantization import BFLOAT16
from sedem.scale import unit_costs
from sedem.scale.bank_bytes import BlockShape, bank_bytes
from sedem.scale.recall import recall_at
from sedem.scale.unit_costs import UnitCosts

HOUR, DAY = 3600.0, 86400.0
MILLION = 10**6


@dataclass(frozen=True)
class Machines:
    """Assumptions about machines and their prices; none of them was measured or looked up.

    Attributes:
        devices: CPU cores, or GPUs, of one machine.
        memory_gb: GB of a machine's memory for keys.
        price: price of a machine per hour.
        storage_price: price of a stored TB per month.
        load: share of the time that a machine may be busy, 0 to 1.
        days: days within which the bank must be built.
        score_seconds: seconds within which all blocks must be scored for a question.

    Raises:
        ConfigError: a number is not above zero, or `load` is above 1.
    """

    devices: int = 16
    memory_gb: float = 64.0
    price: float = 1.0
    storage_price: float = 20.0
    load: float = 0.7
    days: float = 7.0
    score_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            zero_allowed = "price" in name
            if not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
                least = "of 0 or more" if zero_allowed else "above 0"
                raise ConfigError(f"{name} is {value:g}; it must be a number {least}")
        if self.load > 1:
            raise ConfigError(f"load is {self.load:g}; it must be at most 1")


@dataclass(frozen=True)
class Plan:
    """The bank and its questions.

    Attributes:
        tokens: tokens of all documents.
        questions_per_second: average rate.
        searched: tokens of the bank that a question searches; None means all. Where there are many
            banks, a question searches one of them.
        document_tokens: tokens of each document; None means that every block is full.
        workload: tokens of a question and its answer, and K.

    Raises:
        ConfigError: a number is below its minimum.
    """

    tokens: int
    questions_per_second: float = 1.0
    searched: int | None = None
    document_tokens: int | None = None
    workload: Workload = field(default_factory=Workload)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"the bank has {self.tokens:,} tokens; it must have at least 1")
        if self.document_tokens is not None and self.document_tokens < 1:
            raise ConfigError(
                f"documents have {self.document_tokens:,} tokens; they must have at least 1"
            )
        if self.searched is not None and not 1 <= self.searched <= self.tokens:
            raise ConfigError(
                f"searched is {self.searched:,} tokens; it must be from 1 to {self.tokens:,}"
            )
        if not math.isfinite(self.questions_per_second) or self.questions_per_second <= 0:
            raise ConfigError(
                f"{self.questions_per_second:g} questions a second; it must be a number above 0"
            )


def bank_cost(
    model: str,
    plan: Plan,
    machines: Machines | None = None,
    *,
    tflops: float | None = None,
) -> dict[str, Any]:
    """Return what a bank costs to build, to store and to query.

    Args:
        model: a checkpoint that ships with sedem, a preset, a checkpoint folder or a hub id.
        plan: the bank and its questions.
        machines: assumptions about machines; None means the defaults.
        tflops: count times from FLOPs at this rate; None uses what was measured for the model.

    Returns:
        `model`, `basis`, `is_measured`, `tokens`, `blocks`, `bytes`, `build`, `score`, `answer`,
        `money`, `not_measured` and `assumptions`. Times are seconds of a device unless named
        otherwise.

    Raises:
        ConfigError: the model or a number is unknown or out of range.
    """
    machines = machines or Machines()
    folder = embedded(model)
    place = model if folder is None else str(folder)
    shape = BlockShape.of_model(place)
    if tflops is None:
        costs = unit_costs.measured(model) or UnitCosts("not measured", True)
    else:
        costs = unit_costs.counted(place, tflops, plan.workload)
    blocks = shape.blocks(plan.tokens, plan.document_tokens)
    searched = plan.tokens if plan.searched is None else plan.searched
    sizes = bank_bytes(shape, plan.tokens, blocks)
    text = None if costs.text_bytes is None else round(plan.tokens * costs.text_bytes)
    catalog = None if costs.open_bytes is None else round(blocks * costs.open_bytes)
    build = _build(costs, plan.tokens, machines)
    searched_blocks = shape.blocks(searched, plan.document_tokens)
    score = _score(costs, shape, searched_blocks, blocks, plan, machines)
    answer = _answer(costs, plan, machines)
    return {
        "model": model,
        "basis": costs.device,
        "is_measured": costs.is_measured,
        "tokens": plan.tokens,
        "blocks": blocks,
        "bytes": {**sizes, "text": text, "catalog": catalog},
        "build": build,
        "score": score,
        "answer": answer,
        "money": _money(build, score, answer, sizes, text, plan, machines),
        "not_measured": _missing(costs),
        "assumptions": _assumptions(plan, machines, searched),
    }


def _build(costs: UnitCosts, tokens: int, machines: Machines) -> dict[str, float | None]:
    if costs.read is None:
        return dict.fromkeys(("device_seconds", "days_on_one_machine", "machines"))
    seconds = tokens * costs.read
    of_machine = seconds / machines.devices
    return {
        "device_seconds": seconds,
        "days_on_one_machine": of_machine / DAY,
        "machines": max(1, math.ceil(of_machine / (machines.days * DAY))),
    }


def _score(
    costs: UnitCosts,
    shape: BlockShape,
    blocks: int,
    blocks_in_all: int,
    plan: Plan,
    machines: Machines,
) -> dict[str, Any]:
    """Return costs of exact and coarse scoring; `search` says which one sedem uses here."""
    search = "exact" if blocks <= COARSE_FROM else "coarse"
    found: dict[str, Any] = {
        "search": search,
        "exact_up_to_blocks": COARSE_FROM,
        "exact_up_to_tokens": COARSE_FROM * shape.tokens,
        "blocks": blocks,
        "candidates": None if search == "exact" else CANDIDATES,
        "parts_for_exact": -(-blocks // COARSE_FROM),
        "recall": asdict(_recall(blocks)),
    }
    coarse = None
    if costs.coarse is not None and costs.candidates is not None:
        coarse = blocks * costs.coarse + costs.candidates
    seconds = {
        "exact": None if costs.exact is None else blocks * costs.exact,
        "coarse": coarse,
    }
    # As selectors keep them; pooled keys are bfloat16 everywhere.
    keys = shape.key_bytes("float32" if costs.on_cpu else BFLOAT16)
    sizes = {"exact": keys, "coarse": shape.pooled_bytes}
    for name, spent in seconds.items():
        # Every block's keys are in some machine's memory, no matter which part is searched.
        memory = blocks_in_all * sizes[name]
        found[name] = {
            "device_seconds_a_question": spent,
            "bytes_in_memory": memory,
            **_scorers(spent, memory, plan.questions_per_second, machines),
        }
    return found


def _scorers(
    seconds: float | None, memory: int, rate: float, machines: Machines
) -> dict[str, int | str | None]:
    """Return the number of machines that score, and what determines it."""
    for_memory = math.ceil(memory / (machines.memory_gb * 1e9))
    if seconds is None:
        return {"machines": None, "because_of": None, "machines_for_memory": for_memory}
    devices = {
        "the questions a second": rate * seconds / machines.load,
        "the time of one question": seconds / machines.score_seconds,
    }
    needed = {why: math.ceil(number / machines.devices) for why, number in devices.items()}
    needed["the memory of keys"] = for_memory
    why = max(needed, key=needed.__getitem__)
    return {
        "machines": max(1, needed[why]),
        "because_of": why,
        "machines_for_memory": for_memory,
    }


def _recall(blocks: int) -> Any:
    found = unit_costs.table()["recall"]
    percents = {int(size): percent for size, percent in found["percent"].items()}
    return recall_at(blocks, percents, found["best_blocks"])


def _answer(costs: UnitCosts, plan: Plan, machines: Machines) -> dict[str, float | None]:
    seconds = costs.answer(plan.workload.answer)
    times = {
        "first_seconds": costs.first,
        "step_seconds": costs.step,
        "row_seconds": costs.row,
    }
    if seconds is None:
        return {"device_seconds_a_question": None, "machines": None, **times}
    devices = plan.questions_per_second * seconds / machines.load
    return {
        "device_seconds_a_question": seconds,
        **times,
        "machines": max(1, math.ceil(devices / machines.devices)),
    }


def _money(
    build: dict[str, Any],
    score: dict[str, Any],
    answer: dict[str, Any],
    sizes: dict[str, Any],
    text: int | None,
    plan: Plan,
    machines: Machines,
) -> dict[str, float | None]:
    """Return the money for reading, questions and storage, at the assumed prices."""
    scorers, answerers = score[score["search"]]["machines"], answer["machines"]
    questions = None
    if scorers is not None and answerers is not None:
        hours = MILLION / plan.questions_per_second / HOUR
        questions = (scorers + answerers) * machines.price * hours
    read = None
    if build["device_seconds"] is not None:
        a_token = build["device_seconds"] / machines.devices / HOUR / plan.tokens
        read = MILLION * a_token * machines.price
    stored = sizes["file"][BFLOAT16] + sizes["keys"][BFLOAT16] + (text or 0)
    return {
        "per_million_tokens_read": read,
        "per_million_questions": questions,
        "storage_per_month": stored / 1e12 * machines.storage_price,
    }


def _missing(costs: UnitCosts) -> list[str]:
    named = {
        "reading": costs.read,
        "scoring all keys": costs.exact,
        "scoring pooled keys": costs.coarse,
        "scoring candidates": costs.candidates,
        "answering": costs.answer(2),
    }
    if costs.is_measured:
        named |= {"bytes of text": costs.text_bytes, "the open catalog": costs.open_bytes}
    return [name for name, value in named.items() if value is None]


def _assumptions(plan: Plan, machines: Machines, searched: int) -> dict[str, Any]:
    return {
        **asdict(machines),
        "questions_per_second": plan.questions_per_second,
        "searched_tokens": searched,
        "document_tokens": plan.document_tokens,
        "question_tokens": plan.workload.question,
        "answer_tokens": plan.workload.answer,
    }

"""Costs of reading a token, scoring a block and answering a question on one core or one GPU.

Measured costs come from committed results: `python -m experiments.scale_costs write` copies them
into unit_costs.json, each with its file and entry. Where nothing was measured, times may be counted
from FLOPs and an assumed rate. They are then lower bounds, because bandwidth, launches and Python
are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sedem.bank.search import CANDIDATES, GROUPS
from sedem.evaluation.cost import Workload, count_flops, layer_flops, model_shapes

FILE = "unit_costs.json"


@dataclass(frozen=True)
class UnitCosts:
    """Seconds of one device: a CPU core or a GPU. None means not measured.

    Attributes:
        device: what was measured, or the assumption.
        is_measured: whether these are measurements; otherwise they are counted from FLOPs.
        on_cpu: whether the device is a CPU core, which keeps keys in float32.
        read: seconds per token of documents.
        exact: seconds per question and block, to score all keys.
        coarse: seconds per question and block, to score pooled keys.
        candidates: seconds per question, to score its candidates exactly.
        first: seconds to the first token of a question whose blocks are in a small bank.
        step: seconds of a decoding step of one answer.
        row: seconds that every further answer adds to such a step.
        rows: concurrent answers with which `row` was measured.
        warm: seconds per token, to compute the keys and values that are kept.
        text_bytes: bytes of text per token.
        open: seconds per block, to open a bank.
        open_bytes: bytes of memory per block of an opened bank.
    """

    device: str
    is_measured: bool
    on_cpu: bool = False
    read: float | None = None
    exact: float | None = None
    coarse: float | None = None
    candidates: float | None = None
    first: float | None = None
    step: float | None = None
    row: float | None = None
    rows: int = 1
    warm: float | None = None
    text_bytes: float | None = None
    open: float | None = None
    open_bytes: float | None = None

    def answer(self, tokens: int) -> float | None:
        """Device seconds per question when `rows` are answered at once.

        Args:
            tokens: tokens of an answer. The first one needs no step.
        """
        if self.first is None or self.step is None or self.row is None:
            return None
        shared = (self.step + (self.rows - 1) * self.row) / self.rows
        return self.first + (tokens - 1) * shared


@cache
def table() -> dict[str, Any]:
    """Return the committed table: `models` (entries with their origin), `files` and `recall`."""
    return json.loads((files("sedem.scale") / FILE).read_text(encoding="utf-8"))


def measured(model: str) -> UnitCosts | None:
    """Return the measured costs of a model; None if nothing was measured for it.

    Args:
        model: its name in the table, such as "sedem-nano".
    """
    found = table()["models"].get(model)
    if found is None:
        return None
    device = f"measured on {', '.join(found['devices'])}"
    return from_entries(device, found["costs"], found["on_cpu"])


def from_entries(
    device: str, entries: Mapping[str, Mapping[str, Any]], on_cpu: bool = True
) -> UnitCosts:
    """Convert measured figures to seconds per unit.

    Args:
        device: what they were measured on.
        entries: figures by name, each with its `value`; what was not measured is missing.
        on_cpu: whether it is a CPU core.
    """
    values = {name: float(entry["value"]) for name, entry in entries.items()}

    def per(total: str, units: str, scale: float = 1.0) -> float | None:
        has_both = total in values and units in values
        return scale * values[total] / values[units] if has_both else None

    def inverse(name: str) -> float | None:
        return 1 / values[name] if name in values else None

    first = None if "first_ms" not in values else 1e-3 * values["first_ms"]
    exact, candidates = per("exact_ms", "exact_blocks", 1e-3), None
    if "candidates_ms" in values:
        candidates = 1e-3 * values["candidates_ms"]
    elif exact is not None:
        # Candidates are blocks that are scored exactly.
        candidates = CANDIDATES * exact
    step, rows = inverse("decode_tokens_s"), int(values.get("batch", 1))
    row = _row_seconds(first, step, rows, values.get("batch_questions_s"), values)
    return UnitCosts(
        device,
        True,
        on_cpu,
        read=inverse("read_tokens_s"),
        exact=exact,
        coarse=per("coarse_ms", "coarse_blocks", 1e-3),
        candidates=candidates,
        first=first,
        step=step,
        row=row,
        rows=rows,
        warm=per("warm_ms", "warm_tokens", 1e-3),
        text_bytes=values.get("text_bytes"),
        open=per("open_s", "open_blocks"),
        open_bytes=per("open_mb", "open_blocks", 1e6),
    )


def _row_seconds(
    first: float | None,
    step: float | None,
    rows: int,
    questions_s: float | None,
    values: Mapping[str, float],
) -> float | None:
    """Return what a further answer adds to a step, from a full batch's questions per second."""
    steps = values.get("answer_tokens", 1) - 1
    if first is None or step is None or questions_s is None or rows < 2 or steps < 1:
        return None
    # rows / questions_s = rows * first + steps * (step + (rows - 1) * row)
    return max(0.0, (rows / questions_s - rows * first - steps * step) / (steps * (rows - 1)))


def counted(model: str, tflops: float, workload: Workload) -> UnitCosts:
    """Return lower bounds of a model's times, from counted FLOPs.

    Args:
        model: a preset, a checkpoint folder, a backbone folder or a hub id.
        tflops: TFLOP/s that the device is assumed to sustain.
        workload: tokens of the question and of its answer, and K.

    Raises:
        ConfigError: the model is unknown.
    """
    config, encoder, decoder = model_shapes(model)
    flops, rate = count_flops(config, encoder, decoder, workload), 1e12 * tflops
    width = decoder.hidden_size
    keys = config.selector_heads * (config.selector_dim or width // config.selector_heads)
    slots = config.slots_per_block
    exact = 2 * workload.question * slots * keys
    question = config.extract_layer * layer_flops(encoder, workload.question + 1)
    question += 2 * keys * workload.question * encoder.hidden_size
    step = flops["decode"] / max(1, workload.answer - 1) / rate
    return UnitCosts(
        f"counted FLOPs at {tflops:g} TFLOP/s",
        False,
        read=flops["read"] / workload.context / rate,
        exact=exact / rate,
        coarse=exact * math.gcd(slots, GROUPS) / slots / rate,
        candidates=CANDIDATES * exact / rate,
        first=(question + flops["restore"] + flops["prefill"]) / rate,
        step=step,
        row=step,
    )

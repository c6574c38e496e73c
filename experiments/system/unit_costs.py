"""Unit costs of `sedem cost --bank`, taken from the results of other studies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import bank_size, large_banks
from experiments.system.bench import (
    BATCHES,
    BLOCKS,
    CONTEXTS,
    KEPT_CONTEXTS,
    SEDEM_CONTEXTS,
    bench_cells,
)
from experiments.system.cells import Cell
from experiments.system.large_banks import BUDGET
from experiments.system.measured import made_on
from experiments.system.scales import ROOT, SCALES, Scale
from experiments.system.study import Number
from sedem.bank.search import CANDIDATES
from sedem.config import DEFAULT_MODEL
from sedem.durable_files import write_text

TABLE = ROOT / "src" / "sedem" / "scale" / "unit_costs.json"
COMMITTED = ("nano", "paper")
"""Scales whose results are committed."""


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: name in the table of the package.
        title: title for readers, with the unit.
        cell: its measurement.
        metric: metric of the result; dots separate nested names.
        digits: number of decimals.
        units: what the value is a total of, by the name in the table of the package; None if it is
            already a rate.
    """

    name: str
    title: str
    cell: Cell
    metric: str
    digits: int = 1
    units: tuple[str, int] | None = None

    def number(self, model: str) -> Number:
        """The value as a number of a study."""
        return Number(self.title, model, None, self.cell, self.metric, digits=self.digits)


def figures(scale: Scale) -> Iterator[tuple[str, Figure]]:
    """Values that unit costs come from, with the names of their models."""
    for name, bench in bench_cells(scale).items():
        model = name if scale.name == "paper" else DEFAULT_MODEL
        yield from ((model, one) for one in _bench_figures(scale, name, bench))
        if scale.name != "paper":
            yield from ((model, one) for one in _bank_figures(scale))


def _bench_figures(scale: Scale, model: str, bench: Cell) -> Iterator[Figure]:
    contexts, alone = CONTEXTS[scale.name], SEDEM_CONTEXTS[scale.name][0]
    batches, kept = (bench_cells(scale, kind)[model] for kind in ("batches", "kept"))
    row = f"results.sedem.{alone}"
    # The bench of all methods has a thread for each core; these are costs of one core.
    yield Figure(
        "read_tokens_s", "reading, tokens a second", batches,
        f"{row}.build_tok_s.median", 0,
    )  # fmt: skip
    yield Figure(
        "text_bytes", "text, bytes a token", bench,
        f"results.full-context.{min(contexts)}.stored_bytes_per_token",
    )  # fmt: skip
    if scale.name == "paper":
        size = max(BLOCKS[scale.name])
        yield Figure(
            "exact_ms", f"scoring {size:,} blocks for a question, ms", bench,
            f"selection.{size}.score_ms.median", units=("exact_blocks", size),
        )  # fmt: skip
    yield Figure(
        "first_ms", "a question alone, to its first token, ms", batches,
        f"{row}.prebuilt_ttft_ms.median",
    )  # fmt: skip
    yield Figure(
        "decode_tokens_s", "further tokens of an answer alone, a second", batches,
        f"{row}.decode_tok_s.median",
    )  # fmt: skip
    most = max(BATCHES[scale.name])
    yield Figure(
        "batch_questions_s", f"answers a second, {most} questions at once", batches,
        f"{row}.batches.{most}.questions_per_s.median", 2, ("batch", most),
    )  # fmt: skip
    yield Figure("answer_tokens", "tokens of these answers", batches, "settings.answer_tokens", 0)
    tokens = max(KEPT_CONTEXTS[scale.name])
    yield Figure(
        "warm_ms", f"computing what is kept of {tokens:,} tokens, ms", kept,
        f"results.sedem-warm.{tokens}.warm_ms.median", 0, ("warm_tokens", tokens),
    )  # fmt: skip


def _bank_figures(scale: Scale) -> Iterator[Figure]:
    (made,) = large_banks.STUDY.cells(scale)
    blocks = max(recall_sizes(scale))
    for kind, what in (("exact", "all keys"), ("coarse", "pooled keys")):
        yield Figure(
            f"{kind}_ms", f"scoring {what} of {blocks:,} blocks for a question, ms", made,
            f"sizes.{blocks}.cpu_ms_per_question.{kind}", units=(f"{kind}_blocks", blocks),
        )  # fmt: skip
    yield Figure(
        "candidates_ms", f"scoring {CANDIDATES:,} candidates of a question, ms", made,
        "candidates_cpu_ms_per_question",
    )  # fmt: skip
    size, (opened,) = max(bank_size.sizes(scale.name)), bank_size.STUDY.cells(scale)
    yield Figure(
        "open_s", f"opening a bank of {size:,} blocks, s", opened, f"sizes.{size}.open_s",
        units=("open_blocks", size),
    )  # fmt: skip
    yield Figure(
        "open_mb", f"memory of {size:,} opened blocks, MB", opened, f"sizes.{size}.open_mb",
        units=("open_blocks", size),
    )  # fmt: skip


def recall_sizes(scale: Scale) -> tuple[int, ...]:
    """Numbers of blocks at which coarse-search recall was measured, in ascending order."""
    (cell,) = large_banks.STUDY.cells(scale)
    result = cell.read(scale)
    planned = large_banks.sizes(scale.name)
    return planned if result is None else tuple(sorted(map(int, result["sizes"])))


def table() -> dict[str, Any]:
    """The table of the package, from all committed results."""
    models: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for scale in map(SCALES.__getitem__, COMMITTED):
        for model, figure in figures(scale):
            value, path = figure.number(model).value(scale), figure.cell.path(scale)
            if value is None or path is None:
                continue
            file = path.relative_to(ROOT).as_posix()
            result = figure.cell.read(scale) or {}
            device = "device" if scale.name == "paper" else "processor"
            found = models.setdefault(
                model, {"devices": [], "on_cpu": device == "processor", "costs": {}}
            )
            if (name := result["machine"][device]) not in found["devices"]:
                found["devices"].append(name)
            origin = {"file": file, "entry": figure.metric}
            found["costs"][figure.name] = {"value": value, **origin}
            if figure.units is not None:
                name, count = figure.units
                found["costs"][name] = {"value": count, **origin}
            sources[file] = {"made_on": made_on(result, device), "commit": result["commit"]}
    return {"models": models, "files": sources, "recall": _recall(SCALES["nano"])}


def _recall(scale: Scale) -> dict[str, Any]:
    (cell,) = large_banks.STUDY.cells(scale)
    result, path = cell.read(scale), cell.path(scale)
    assert result is not None and path is not None, "recall has not been measured"
    return {
        "file": path.relative_to(ROOT).as_posix(),
        "candidates": CANDIDATES,
        "best_blocks": result["questions"]["limit"] * BUDGET,
        "percent": {
            str(size): result["sizes"][str(size)]["recall"][str(CANDIDATES)]
            for size in recall_sizes(scale)
        },
    }


def write(path: Path = TABLE) -> None:
    """Write the table of the package."""
    write_text(path, json.dumps(table(), indent=1) + "\n")

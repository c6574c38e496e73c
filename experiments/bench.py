"""What the bench measures at each scale: times, memory and floors, never quality."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.scales import RUNS, Scale
from sedem.evaluation.registry import METHODS as EVERY

CONTEXTS = {
    "smoke": (64,),
    "nano": (512, 2048, 32768),
    "paper": (1280, 5120, 32768, 131072, 1048576),
}
"""Context lengths in tokens."""

METHODS = {
    "smoke": ("sedem", "full-context"),
    # LongLLMLingua reads all of a context for every question, minutes of a CPU at 32,768 tokens.
    "nano": ("sedem", "full-context", "bm25", "hf", "hf-compiled", "hf-prefix"),
}
"""All methods where nothing else is said."""

BESIDE = {"nano": (1024,)}
"""Context lengths where every method of `sedem eval --list` is clocked, trained ones too."""

ANSWER_TOKENS = {"smoke": 3, "nano": 17, "paper": 33}

SHAPES = ("llama-3.2-1b", "llama-3.2-3b")
"""Measured on random weights at paper scale: speed does not depend on their values."""

BLOCKS = {"nano": (1000, 10_000), "paper": (1000, 10_000, 100_000)}
"""Sizes of synthetic banks that are scored."""

ALONE = {"smoke": (64,), "nano": (8192,), "paper": (32768,)}
"""Context lengths where SeDeM is held against itself."""

BATCHES = {"smoke": (1, 2), "nano": (1, 8, 64), "paper": (1, 8, 64)}
"""Questions over one bank."""

STORED = ("bfloat16", "int8", "fp8")
"""Types of stored slots."""


def measure_bench(
    kind: str, scale: Scale, checkpoint: Path | None, backbone: str, name: str
) -> dict[str, Any]:
    """Run the bench; one that was killed goes on from the contexts that it finished.

    Args:
        kind: "bench" (the scale's methods), "batches" (SeDeM's throughput), "memories" (SeDeM with
            each type of stored slots) or "peers" (every method, and how many times sooner than full
            context its first token is).
        scale: whose lengths and methods.
        checkpoint: that is opened; None for a shape.
        backbone: the shape, empty for a checkpoint.
        name: of the cell, and so of the folder that a killed run goes on in.
    """
    from sedem.bench.command import run_bench
    from sedem.bench.plan import Plan

    smoke = scale.name == "smoke"
    methods = {"bench": METHODS.get(scale.name, ()), "peers": tuple(EVERY)}
    plan = Plan(
        methods=methods.get(kind, ("sedem",)),
        contexts={"bench": CONTEXTS, "peers": BESIDE}.get(kind, ALONE)[scale.name],
        blocks=BLOCKS.get(scale.name, ()) if kind == "bench" else (),
        batches=BATCHES[scale.name] if kind == "batches" else (),
        memory=STORED if kind == "memories" else Plan.memory,
        checkpoint=str(checkpoint or Plan.checkpoint),
        backbone=backbone or None,
        runs=1 if smoke else 20,
        answer_tokens=ANSWER_TOKENS[scale.name],
    )
    result = run_bench(plan, RUNS / scale.name / "bench" / name)
    # Where a checkpoint lay on the machine that measured it says nothing; its digest does.
    result["settings"]["checkpoint"] = None if checkpoint is None else checkpoint.name
    if kind == "peers":
        result["times_sooner"] = times_sooner(result["results"])
    return result


def times_sooner(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Full context's time to the first token over a method's, by method and clock."""
    reference = _times(results["full-context"])
    return {
        method: {clock: reference[clock] / time for clock, time in _times(found).items()}
        for method, found in results.items()
    }


def _times(found: Mapping[str, Any]) -> dict[str, float]:
    (figures,) = found.values()
    return {clock: figures[f"{clock}_ttft_ms"]["median"] for clock in ("online", "prebuilt")}

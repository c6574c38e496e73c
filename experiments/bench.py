"""What the bench measures at each scale: times, memory and floors, never quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.scales import RUNS, Scale

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
        kind: "bench" (every method), "batches" (SeDeM's throughput) or "memories" (SeDeM with each
            type of stored slots).
        scale: whose lengths and methods.
        checkpoint: that is opened; None for a shape.
        backbone: the shape, empty for a checkpoint.
        name: of the cell, and so of the folder that a killed run goes on in.
    """
    from sedem.bench.command import run_bench
    from sedem.bench.plan import Plan

    smoke = scale.name == "smoke"
    plan = Plan(
        methods=METHODS.get(scale.name, ()) if kind == "bench" else ("sedem",),
        contexts=(CONTEXTS if kind == "bench" else ALONE)[scale.name],
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
    return result

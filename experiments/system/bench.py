"""What `sedem bench` measures at each scale: times, memory and floors, never quality."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.variants import guided_model, main_model
from sedem.bench.keeping import break_even_hit_rate, questions_to_pay
from sedem.config import DEFAULT_MODEL
from sedem.evaluation.registry import METHODS as EVERY

CONTEXTS = {
    "smoke": (64,),
    "nano": (512, 2048, 32768),
    "gpu": (1280, 5120, 32768),
    "paper": (1280, 5120, 32768, 131072, 1048576),
}
"""Context lengths in tokens."""

METHODS = {
    "smoke": ("sedem", "full-context"),
    # LongLLMLingua reads the whole context for each question: minutes of a CPU at 32,768 tokens.
    "nano": ("sedem", "full-context", "bm25"),
    "gpu": ("sedem", "full-context", "bm25"),
}
"""Methods; a scale without an entry measures all of them."""

PEER_CONTEXTS = {"nano": (1024,)}
"""Context lengths at which every method of `sedem eval --list` is timed, trained ones too."""

ANSWER_TOKENS = {"smoke": 3, "nano": 17, "gpu": 33, "paper": 33}

SHAPES = ("llama-3.2-1b", "llama-3.2-3b")
"""Shapes timed on random weights at gpu and paper scale: speed does not depend on weights."""

BLOCKS = {"nano": (1000, 10_000), "gpu": (1000, 10_000, 100_000), "paper": (1000, 10_000, 100_000)}
"""Sizes of the synthetic banks that are scored."""

SEDEM_CONTEXTS = {"smoke": (64,), "nano": (8192,), "gpu": (32768,), "paper": (32768,)}
"""Context lengths at which SeDeM is timed alone."""

BATCHES = {"smoke": (1, 2), "nano": (1, 8, 64), "gpu": (1, 8, 64), "paper": (1, 8, 64)}
"""Numbers of questions asked of one bank together."""

KEPT_CONTEXTS = {
    "smoke": (64,),
    "nano": (256, 1024, 4096, 16384),
    "paper": (256, 1024, 4096, 16384, 65536),
}
"""Context lengths at which kept keys and values are compared. The first has as much text as the K
blocks that SeDeM reads."""

PEERS = {"nano": ("hf", "hf-compiled", "hf-prefix"), "gpu": ("hf", "hf-prefix")}
"""Peers of the methods."""

KEPT_PEERS = ("text-blocks", "hf-prefix")
KEPT_K = 2

KEPT_ROWS = {
    "sedem": "sedem, cold",
    "sedem-warm": "sedem, warm",
    "text-blocks": "text-blocks",
    "hf-prefix": "hf-prefix",
}
"""Rows of that comparison, and their labels."""

NEVER = "never"

SLOT_TYPES = ("bfloat16", "int8", "fp8")
"""Types of stored slots."""


def bench_cells(scale: Scale, kind: str = "bench") -> dict[str, Cell]:
    """The bench of the scale's main model, or of the paper's shapes, by name for tables."""
    if scale.name in ("gpu", "paper"):
        return {shape: Cell(kind, backbone=shape) for shape in SHAPES}
    # The bench of all methods times the model that people install.
    model = guided_model(scale) if kind == "bench" else main_model(scale)
    return {scale.backbones[0]: Cell(kind, variant=model)}


def measure_bench(
    kind: str, scale: Scale, checkpoint: Path | None, backbone: str, name: str
) -> dict[str, Any]:
    """Run the bench; a killed run resumes after its last finished context.

    Args:
        kind: "bench" (the scale's methods), "batches" (SeDeM's questions per second), "memories"
            (SeDeM with each type of stored slots), "kept" (what is kept of blocks, and when it pays
            off) or "peers" (every method, with its speed-up over the full context).
        scale: gives lengths and methods.
        checkpoint: the model; None for a shape.
        backbone: the shape; empty for a checkpoint.
        name: name of the cell; names the folder of the run.
    """
    from experiments.bench.run import run_bench
    from sedem.bench.plan import Plan

    methods = {"bench": METHODS.get(scale.name, tuple(EVERY)), "peers": tuple(EVERY)}
    peers = {"bench": PEERS.get(scale.name, ()), "kept": KEPT_PEERS}
    blocks = BLOCKS.get(scale.name, ()) if kind == "bench" else ()
    contexts: Mapping[str, Mapping[str, tuple[int, ...]]] = {
        "bench": CONTEXTS, "peers": PEER_CONTEXTS, "kept": KEPT_CONTEXTS
    }  # fmt: skip
    # Joint blocks cannot be kept. Times do not depend on how a model was trained.
    keeping = {"kept": ("cold", "warm"), "block_context": "independent", "k": KEPT_K}
    plan = Plan(
        methods=methods.get(kind, ("sedem",)),
        contexts=contexts.get(kind, SEDEM_CONTEXTS)[scale.name],
        batches=BATCHES[scale.name] if kind == "batches" else (),
        memory=SLOT_TYPES if kind == "memories" else ("bfloat16",),
        checkpoint=str(checkpoint or DEFAULT_MODEL),
        backbone=backbone or None,
        runs=1 if scale.name == "smoke" else 20,
        answer_tokens=ANSWER_TOKENS[scale.name] if kind != "kept" else ANSWER_TOKENS["smoke"],
        online=kind != "kept",
        **(keeping if kind == "kept" else {}),
    )
    out = scale.runs / "bench" / name
    result = run_bench(plan, out, peers=peers.get(kind, ()), blocks=blocks)
    # Checkpoint folders differ between machines; the result contains the digest of the weights.
    result["settings"]["checkpoint"] = None if checkpoint is None else checkpoint.name
    if kind == "peers":
        result["times_sooner"] = times_sooner(result["results"])
    if kind == "kept":
        result["worth"] = worth(result["results"])
    return result


def worth(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The benefit of kept keys and values, by context length.

    Args:
        results: results of the bench, by method and context length.

    Returns:
        `ratio` (time to the first token over that of SeDeM with everything kept, by method),
        `hit_rate` (share of blocks found from which keeping is faster, in percent) and `questions`
        (after which warming the whole bank has paid off); the last two may be "never".
    """
    found = {}
    for tokens, warm in results["sedem-warm"].items():
        times = {name: _median(rows[tokens], "prebuilt_ttft_ms") for name, rows in results.items()}
        cold, hit = times["sedem"], times["sedem-warm"]
        share = break_even_hit_rate(cold, _median(warm, "missed_ttft_ms"), hit)
        questions = questions_to_pay(_median(warm, "warm_ms"), cold, hit)
        found[tokens] = {
            "ratio": {name: time / hit for name, time in times.items()},
            "hit_rate": NEVER if share is None else 100 * share,
            "questions": NEVER if questions is None else questions,
        }
    return found


def _median(row: Mapping[str, Any], figure: str) -> float:
    median: float = row[figure]["median"]
    return median


def times_sooner(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Speed-up of the time to the first token over full context, by method and clock."""
    reference = _first_token_ms(results["full-context"])
    return {
        method: {clock: reference[clock] / ms for clock, ms in _first_token_ms(found).items()}
        for method, found in results.items()
    }


def _first_token_ms(found: Mapping[str, Any]) -> dict[str, float]:
    (figures,) = found.values()
    return {clock: figures[f"{clock}_ttft_ms"]["median"] for clock in ("online", "prebuilt")}

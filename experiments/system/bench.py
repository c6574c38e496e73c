"""The bench of the studies: `sedem_lab.bench` with peers. It measures times, never quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from experiments.system import paper
from experiments.system.cells import Cell, checkpoint_of
from experiments.system.models import guided_model, main_model
from experiments.system.peers import PEERS, PrefixCached, WarmSedem
from experiments.system.scales import SHIPPED, SMOL, Scale
from experiments.system.stand_in import backbone
from sedem.config import SMALL_MODEL
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem_lab.baselines.registry import METHODS as EVERY
from sedem_lab.bench import measure
from sedem_lab.bench.measure import Trial, spread
from sedem_lab.bench.subjects import plan_of
from sedem_lab.evaluation.readers import BoundSedem

# What is measured, by kind and scale

CONTEXTS: dict[str, dict[str, tuple[int, ...]]] = {
    "bench": {
        "stand-in": (64,),
        "nano": (512, 2048, 32768),
        "gpu": (1280, 5120, 32768),
        "paper": (1280, 5120, 32768, 131072, 1048576),
    },
    # SeDeM alone.
    "batches": {"stand-in": (64,), "nano": (8192,), "gpu": (32768,), "paper": (32768,)},
    # The first has as much text as the K blocks that SeDeM reads.
    "kept": {
        "stand-in": (64,),
        "nano": (256, 1024, 4096, 16384),
        "paper": (256, 1024, 4096, 16384, 65536),
    },
    # The backbone of sedem-smol has 8,192 positions.
    "beside-llama-cpp": {"stand-in": (64,), "nano": (1024, 2048, 4096, 7168)},
}
"""Context lengths in tokens."""
METHODS = {
    # LongLLMLingua reads the whole context for each question: minutes of a CPU at 32,768 tokens.
    **dict.fromkeys(("nano", "gpu"), ("sedem", "full-context", "bm25")),
    "paper": tuple(EVERY),
}
PEERS_BESIDE = dict.fromkeys(("nano", "gpu"), ("hf-prefix",))
"""Methods of "bench", and peers of them."""
BATCHES = {"stand-in": (1, 2)} | dict.fromkeys(("nano", "gpu", "paper"), (1, 8, 64))
"""Numbers of questions asked of one bank together."""
ANSWER_TOKENS = {"stand-in": 3, "nano": 17, "gpu": 33, "paper": 33}
SHAPES = ("llama-3.2-1b", "llama-3.2-3b")
"""Shapes timed on random weights at gpu and paper scale: speed does not depend on weights."""
OWN_SHAPES = {"nano": SHIPPED / "backbone"}
"""Folders whose shapes stand for those of the paper, by backbone of a scale."""
RIVALS = {"icae": ("sedem-all-layers",), "comprexit": ("sedem-all-blocks", "comprexit-128")}
"""Methods that the paper times beside SeDeM, and the peers that are measured with each."""
COMPREXIT_CONTEXT = 1536
"""Tokens of the context of Table comprexit_ttft."""


def contexts_of(scale: Scale, kind: str) -> tuple[int, ...]:
    """Context lengths of a kind of bench."""
    return CONTEXTS[kind][scale.size]


def bench_cells(scale: Scale, kind: str = "bench") -> dict[str, Cell]:
    """The bench of the scale's main model, or of the paper's shapes, by name for tables."""
    if scale.name in ("gpu", "paper"):
        return {shape: Cell(kind, backbone=shape) for shape in SHAPES}
    if kind == "beside-llama-cpp":
        return {SMOL: Cell(kind, variant=guided_model(scale, SMOL), k=4)}
    # The bench of all methods times the model that people install.
    model = guided_model(scale) if kind == "bench" else main_model(scale)
    return {scale.backbones[0]: Cell(kind, variant=model)}


def timed_shapes(scale: Scale) -> dict[str, str]:
    """The shapes of the paper's tables of times, and the paper's short names of them.

    A small scale has its own shape in place of the 1B backbone.
    """
    names = SHAPES if scale.name in ("gpu", "paper") else scale.backbones
    return dict(zip(names, ("1b", "3b"), strict=False))


def icae_times(scale: Scale, shape: str, questions: str) -> Cell:
    """SeDeM and ICAE on contexts of a set's mean length (Table efficiency_varb_icae)."""
    return Cell("bench", "icae", backbone=shape, questions=questions, k=scale.sets[questions].k)


def comprexit_times(scale: Scale) -> Cell:
    """SeDeM and ComprExIT on the first shape (Table comprexit_ttft)."""
    return Cell("bench", "comprexit", backbone=next(iter(timed_shapes(scale))), k=2)


def timed_context(cell: Cell, scale: Scale) -> int:
    """Tokens of the context of one of these cells, as in the paper if the scale has room."""
    tokens = COMPREXIT_CONTEXT
    if cell.questions:
        tokens = paper.row("tab:datasets", cell.questions)["avg_len_tokens"]
    return min(tokens, max(contexts_of(scale, "bench")))


def bench(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Run the bench.

    - bench: the scale's methods; with another method than SeDeM, both, on random weights.
    - batches: SeDeM's questions per second.
    - kept: a warm bank and a cold one, and a prefix cache.
    - beside-llama-cpp: a warm bank, and prefix caches of the whole text.
    """
    kind, size, shape = cell.measure, scale.size, OWN_SHAPES.get(cell.backbone, cell.backbone)
    if cell.backbone and scale.stand_in:
        shape = backbone(cell.backbone, scale)
    checkpoint = None if cell.variant is None else checkpoint_of(cell, scale, data)
    rival = cell.method in RIVALS
    entries: dict[str, Any] = {
        "methods": ("sedem",),
        "contexts": (timed_context(cell, scale),) if rival else contexts_of(scale, kind),
        "checkpoint": str(checkpoint or SMALL_MODEL),
        "backbone": str(shape) or None,
        "runs": 1 if scale.stand_in else 20,
        "max_new_tokens": ANSWER_TOKENS[size],
    }
    peers: tuple[str, ...] = ()
    trial: Callable[..., Trial] = Trial
    match kind:
        case "bench" if rival:
            entries |= {"methods": ("sedem", cell.method), "k": cell.k}
            peers = RIVALS[cell.method]
        case "bench":
            entries["methods"], peers = METHODS[scale.name], PEERS_BESIDE.get(size, ())
        case "batches":
            trial = partial(Batched, sizes=BATCHES[size])
        case "kept":
            peers, trial = ("sedem", "sedem-warm", "hf-prefix"), Keeping
            entries |= {"methods": (), "k": 2, "max_new_tokens": 3}
        case "beside-llama-cpp":
            peers = ("sedem-warm-int8-weights", "hf-prefix", "llama-cpp")
            trial = Keeping
            entries |= {"methods": (), "k": cell.k}
    plan = plan_of(entries)
    more = {peer: PEERS[peer] for peer in peers}
    result = measure.run_bench(plan, more, trial=trial, read_again=trial is not Keeping)
    # Folders differ between machines.
    result["settings"] |= {
        "checkpoint": None if checkpoint is None else checkpoint.name,
        "backbone": cell.backbone or None,
        "methods": [*result["results"]],
        "answer_tokens": plan.max_new_tokens,
    }
    if cell.backbone:
        result["notes"] = [n.replace(str(plan.backbone), cell.backbone) for n in result["notes"]]
    if kind == "beside-llama-cpp" and not result["left_out"]:
        result["versions"]["llama-cpp-python"] = version("llama-cpp-python")
    return result


class Batched(Trial):
    """Also measures questions per second over one memory, by number of questions together."""

    def __init__(self, *given: Any, sizes: Sequence[int]) -> None:
        super().__init__(*given)
        self.sizes = sizes

    def row(self) -> dict[str, Any]:
        """The measurements of the method; each round runs every size."""
        reader, place, runs = self.subject.reader, self.plan.place, self.plan.runs
        assert isinstance(reader, BoundSedem)
        speeds: dict[int, list[float]] = {size: [] for size in self.sizes}
        for _ in range(measure.WARM_UP + runs):
            for size, measured in speeds.items():
                clock = Clock(place)
                reader.answer_together(self.memory, [*islice(cycle(QUESTIONS), size)])
                clock.lap("ms")
                measured.append(1e3 * size / clock.timings["ms"])
        found = {str(n): spread(measured[measure.WARM_UP :]) for n, measured in speeds.items()}
        return {**super().row(), "batches": {n: {"questions_per_s": s} for n, s in found.items()}}


class Keeping(Trial):
    """Also measures the bytes of the keys and values that are kept of a memory."""

    def row(self) -> dict[str, Any]:
        """The measurements of the method."""
        reader, tokens, size = self.subject.reader, self.answer.context_tokens, None
        if isinstance(reader, WarmSedem):
            size = reader.kept_bytes(self.memory)
        elif isinstance(reader, PrefixCached):
            # For a truncated context, only the remaining tokens count.
            size, tokens = self.answer.stored_bytes, self.memory.ids.shape[1] - 1
        kept = {"bytes_per_token": size / tokens} if size and tokens else None
        return {**super().row(), "online_ttft_ms": None, "kept": kept}

"""The bench of the studies: `sedem_lab.bench` with peers, floors, memory, and building by stage.

It measures times, memory and floors, never quality.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.system import paper
from experiments.system.cells import Cell, checkpoint_of
from experiments.system.floors import Ceilings, floors_of, measure_ceilings
from experiments.system.models import guided_model, main_model
from experiments.system.peers import KEEPERS, PEERS, LlamaCpp, PrefixCached
from experiments.system.scales import SHIPPED, SMOL, Scale
from experiments.system.stand_in import backbone
from experiments.system.timing import PROCESS, process_bytes
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.config import SMALL_MODEL, SedemConfig
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem.method.segments import segment_text
from sedem.model import SeDeM
from sedem.reading.building import batches
from sedem.types import Document, Reader
from sedem_lab.baselines.registry import METHODS as EVERY
from sedem_lab.bench import measure
from sedem_lab.bench.measure import Trial, spread
from sedem_lab.bench.subjects import plan_of
from sedem_lab.evaluation.readers import BoundSedem

# What is measured, by kind and scale

_ALONE = {"stand-in": (64,), "nano": (8192,), "gpu": (32768,), "paper": (32768,)}
CONTEXTS: dict[str, dict[str, tuple[int, ...]]] = {
    "bench": {
        "stand-in": (64,),
        "nano": (512, 2048, 32768),
        "gpu": (1280, 5120, 32768),
        "paper": (1280, 5120, 32768, 131072, 1048576),
    },
    # SeDeM alone.
    **dict.fromkeys(("batches", "memories"), _ALONE),
    # Every method of `sedem eval --list`, trained ones too.
    "peers": {"nano": (1024,)},
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
PEERS_BESIDE = {"nano": ("hf", "hf-compiled", "hf-prefix"), "gpu": ("hf", "hf-prefix")}
"""Methods of "bench", and peers of them."""
SLOT_TYPES = ("bfloat16", "int8", "fp8")
"""Types of stored slots."""
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

    - bench: times, memory and floors of the scale's methods; with another method than SeDeM, times
      of both, on random weights.
    - batches: SeDeM's questions per second.
    - memories: SeDeM by type of the stored slots.
    - kept: what is kept of blocks, and when it pays off.
    - peers: every method.
    - beside-llama-cpp: a warm bank, and its backbone with the whole text, by Hugging Face's forward
      and by llama.cpp.
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
    trial, again, ceilings = Trial, True, None
    match kind:
        case "bench" if rival:
            entries |= {"methods": ("sedem", cell.method), "k": cell.k}
            peers = RIVALS[cell.method]
        case "bench":
            entries["methods"], peers = METHODS[scale.name], PEERS_BESIDE.get(size, ())
            plan = plan_of(entries)
            ceilings = measure_ceilings(plan.place, getattr(torch, plan.dtype))
            trial = partial(Detailed, ceilings=ceilings)
        case "batches":
            trial = partial(Batched, sizes=BATCHES[size])
        case "memories":
            peers = tuple(f"sedem-{slots}" for slots in SLOT_TYPES[1:])
        case "peers":
            entries["methods"] = tuple(EVERY)
        case "kept":
            peers = ("sedem", "sedem-warm", "text-blocks", "hf-prefix")
            trial, again = Keeping, False
            entries |= {"methods": (), "k": 2, "max_new_tokens": 3}
        case "beside-llama-cpp":
            peers = ("sedem-warm-int8-weights", "hf", "hf-prefix", "llama-cpp")
            trial, again = Keeping, False
            # A round reads the longest text anew, which takes half a minute of a CPU.
            entries |= {"methods": (), "k": cell.k, "runs": min(entries["runs"], 6)}
    plan = plan_of(entries)
    more = {peer: PEERS[peer] for peer in peers}
    result = measure.run_bench(plan, more, trial=trial, read_again=again)
    # Folders differ between machines.
    result["settings"] |= {
        "checkpoint": None if checkpoint is None else checkpoint.name,
        "backbone": cell.backbone or None,
        "methods": [*result["results"]],
        "answer_tokens": plan.max_new_tokens,
    }
    if cell.backbone:
        result["notes"] = [n.replace(str(plan.backbone), cell.backbone) for n in result["notes"]]
    if ceilings is not None:
        result["ceilings"] = ceilings._asdict()
    if cell.measure == "beside-llama-cpp" and not result["left_out"]:
        result["versions"]["llama-cpp-python"] = version("llama-cpp-python")
    return result


# Trials that measure more than times


class Batched(Trial):
    """Also measures questions per second over one memory, by number of questions together."""

    def __init__(self, *given: Any, sizes: Sequence[int]) -> None:
        super().__init__(*given)
        self.sizes = sizes

    def row(self) -> dict[str, Any]:
        """The measurements of the method; each round runs every size."""
        reader: Any = self.subject.reader
        speeds: dict[int, list[float]] = {size: [] for size in self.sizes}
        for _ in range(measure.WARM_UP + self.plan.runs):
            for size, measured in speeds.items():
                questions = list(islice(cycle(QUESTIONS), size))
                ask = partial(reader.answer_together, self.memory, questions)
                spent = _ms(self.plan.place, ask)
                measured.append(1e3 * size / spent)
        found = {str(n): spread(measured[measure.WARM_UP :]) for n, measured in speeds.items()}
        return {**super().row(), "batches": {n: {"questions_per_s": s} for n, s in found.items()}}


class Keeping(Trial):
    """Also measures what is kept of a memory that is read once, and what it costs."""

    def build(self) -> None:
        """Read the documents, and compute what the method keeps ahead."""
        super().build()
        spent = None
        if isinstance(reader := self.subject.reader, KEEPERS):
            # Use a copy, since the first answer has kept its blocks.
            self.memory = reader.anew(self.memory)
            spent = _ms(self.plan.place, lambda: reader.warm(self.memory))
        self.builds[-1]["warm_ms"] = spent

    def ask(self) -> None:
        """Answer from a memory with nothing kept, then from the warm one."""
        missed = None
        if isinstance(reader := self.subject.reader, KEEPERS):
            missed = reader.answer(reader.anew(self.memory), QUESTIONS[0]).timings["ttft_ms"]
        super().ask()
        self.asks[-1]["missed_ttft_ms"] = missed

    def row(self) -> dict[str, Any]:
        """The measurements of the method."""
        row, reader, tokens = super().row(), self.subject.reader, self.answer.context_tokens
        size = None
        if isinstance(reader, KEEPERS):
            size = reader.kept_bytes(self.memory)
        elif isinstance(reader, PrefixCached | LlamaCpp):
            # For a truncated context, only the remaining tokens count.
            size, tokens = self.answer.stored_bytes, self.memory.ids.shape[1] - 1
        kept = {"bytes_per_token": size / tokens if size and tokens else None}
        times = {name: row["stages"].pop(name) for name in ("warm_ms", "missed_ttft_ms")}
        return {**row, **times, "online_ttft_ms": None, "kept": kept if size else None}


class Detailed(Trial):
    """Also measures the peak of memory, the floors, and SeDeM's building by stage."""

    def __init__(self, *given: Any, ceilings: Ceilings) -> None:
        super().__init__(*given)
        self.ceilings = ceilings

    def row(self) -> dict[str, Any]:
        """The measurements of the method."""
        reader, documents, plan = self.subject.reader, self.documents, self.plan
        more: dict[str, Any] = {
            "floor": floors_of(self.subject, self.answer, self.ceilings),
            "memory": measure_memory(reader, documents, plan.place),
            "layers_tok_s": None,
        }
        if isinstance(reader, BoundSedem):
            config, name = reader.model.config, reader.model.encoder.name
            more["build_stages"] = build_stages(reader.model, documents)
            frozen = open_backbone(name, dtype=getattr(torch, plan.dtype), device=plan.place)
            layers = EncoderLayers(config, frozen)
            times = [layers.run_ms(documents) for _ in range(measure.WARM_UP + plan.runs)]
            tokens = self.answer.context_tokens or 0
            more["layers_tok_s"] = spread([1e3 * tokens / t for t in times[measure.WARM_UP :]])
        return {**super().row(), **more}


def _ms(device: torch.device, work: Callable[[], object]) -> float:
    clock = Clock(device)
    work()
    clock.lap("ms")
    return clock.timings["ms"]


class EncoderLayers:
    """The first layers of a backbone as Hugging Face runs them: the reference for building a bank.

    It runs the same segments in the same batches. Tokenization, the compressor and the storage of
    the bank are left out, which favours this reference.

    Args:
        config: gives the number of layers and the segmentation.
        encoder: a frozen backbone without adapters; its upper layers are removed.
    """

    def __init__(self, config: SedemConfig, encoder: Backbone) -> None:
        self.config, self.encoder = config, encoder
        self.trunk = encoder.model.get_decoder()
        self.trunk.layers = self.trunk.layers[: config.extract_layer]
        self.trunk.config.num_hidden_layers = config.extract_layer
        self.trunk.norm = nn.Identity()

    def batches(self, documents: Sequence[Document]) -> list[Tensor]:
        """Token ids in the batches of `sedem.reading.building`, with the start token."""
        segmented = [_segments(self.config, self.encoder, d) for d in documents]
        ids_ST = torch.cat([segments.ids for segments in segmented])
        lengths_S = torch.cat([segments.lengths for segments in segmented])
        found = []
        for batch_B in batches(lengths_S, self.encoder.device):
            ids_BT = ids_ST[batch_B, : int(lengths_S[batch_B].max())]
            start_B1 = ids_BT.new_full((len(ids_BT), 1), self.encoder.bos_token_id)
            found.append(torch.cat([start_B1, ids_BT], dim=1))
        return found

    @torch.no_grad()
    def states(self, ids_BP: Tensor) -> Tensor:
        """Hidden states of a batch after the last layer that is run `[B, P, E]`."""
        found: Tensor = self.trunk(input_ids=ids_BP.to(self.encoder.device), use_cache=False)[0]
        return found

    def run_ms(self, documents: Sequence[Document]) -> float:
        """Milliseconds of the forward over all documents, without segmentation."""
        batched = self.batches(documents)
        return _ms(self.encoder.device, lambda: [self.states(ids_BP) for ids_BP in batched])


def _segments(config: SedemConfig, encoder: Backbone, document: Document) -> Any:
    how, shift = config.segmentation, config.segment_shift
    return segment_text(document.text, encoder, config.segment_length, how, shift)


def build_stages(model: SeDeM, documents: Sequence[Document]) -> dict[str, float]:
    """Milliseconds to build a bank, by stage.

    Segmenting is timed separately, and the compressor by hooks. The encoder's time is the rest of
    the total, so it includes moving batches to and from the device.
    """
    cut = partial(_segments, model.config, model.encoder)
    segment, calls = _ms(model.device, lambda: [*map(cut, documents)]), list[Clock]()
    hooks = [
        model.compressor.register_forward_pre_hook(lambda *_: calls.append(Clock(model.device))),
        model.compressor.register_forward_hook(lambda *_: calls[-1].lap("call")),
    ]
    read = _ms(model.device, lambda: model.read(documents))
    for hook in hooks:
        hook.remove()
    compress = sum(call.timings["call"] for call in calls)
    encode = max(0.0, read - segment - compress)
    return {"segment_ms": segment, "encode_ms": encode, "compress_ms": compress}


# The peak of memory, in a pass that is not timed. Several methods are open in one process, so its
# growth is measured, and what the method holds already is added: weights, and caches that stay
# between answers. Another method's CUDA graphs cannot be separated and are left out.


def measure_memory(
    reader: Reader, documents: Sequence[Document], place: torch.device
) -> dict[str, int] | None:
    """The highest use of memory while a method reads and answers, in bytes, as `peak_bytes`.

    On a GPU the allocator reports it. On a CPU it is the resident set of the process; None if the
    system does not report that.
    """
    if place.type != "cuda" and not (PROCESS / "clear_refs").exists():
        return None
    if isinstance(reader, BoundSedem):
        # Drop the engine's caches for other batch sizes, and allocate those of this pass.
        reader.model.engine.release()
        reader.answer(reader.read(documents), QUESTIONS[0])
        held = sum(reader.model.engine.memory().values())
    else:
        modules = [value for value in vars(reader).values() if isinstance(value, nn.Module)]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        held = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
        held += int(getattr(reader, "cache_bytes", 0))
    gc.collect()
    peak: Callable[[], int]
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.reset_peak_memory_stats(place)
        before = torch.cuda.memory_allocated(place)
        peak = partial(torch.cuda.max_memory_allocated, place)
    else:
        # Free pages that the C library keeps would hide growth.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        (PROCESS / "clear_refs").write_text("5")
        before, peak = process_bytes("VmRSS"), partial(process_bytes, "VmHWM")
    reader.answer(reader.read(documents), QUESTIONS[0])
    return {"peak_bytes": held + max(0, peak() - before)}

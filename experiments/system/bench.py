"""The bench of the studies: `sedem bench` with peers, floors, building by stage, and large banks.

It measures times, memory and floors, never quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.system import paper
from experiments.system.cells import Cell, checkpoint_of
from experiments.system.floors import (
    Ceilings,
    Stages,
    Work,
    busy,
    floors,
    measure_ceilings,
    sedem_work,
    text_work,
)
from experiments.system.models import guided_model, main_model
from experiments.system.peers import PEERS, LlamaCpp, PrefixCached, TextBlocks
from experiments.system.scales import SHIPPED, SMOL, Scale
from experiments.system.stand_in import backbone
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.baselines.longllmlingua import LongLLMLingua
from sedem.bench import command
from sedem.bench.measure import WARM_UP, Trial, spread
from sedem.bench.plan import Plan
from sedem.bench.subjects import WarmSedem, open_subjects
from sedem.bench.subjects import checkpoint_of as plan_checkpoint
from sedem.config import SMALL_MODEL, SedemConfig
from sedem.demo import QUESTIONS
from sedem.engine.device import Clock
from sedem.evaluation.readers import BoundSedem
from sedem.evaluation.registry import METHODS as EVERY
from sedem.method.segments import segment_text
from sedem.method.selector import block_scores
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, Quantized, quantize
from sedem.reading.encoding import batches
from sedem.selecting.select import encode_questions
from sedem.types import Document

# What is measured, by scale

CONTEXTS = {
    "stand-in": (64,),
    "nano": (512, 2048, 32768),
    "gpu": (1280, 5120, 32768),
    "paper": (1280, 5120, 32768, 131072, 1048576),
}
"""Context lengths in tokens."""
METHODS = {
    # LongLLMLingua reads the whole context for each question: minutes of a CPU at 32,768 tokens.
    "nano": ("sedem", "full-context", "bm25"),
    "gpu": ("sedem", "full-context", "bm25"),
    "paper": tuple(EVERY),
}
PEERS_BESIDE = {"nano": ("hf", "hf-compiled", "hf-prefix"), "gpu": ("hf", "hf-prefix")}
"""Peers of the methods."""
PEER_CONTEXTS = {"nano": (1024,)}
"""Context lengths at which every method of `sedem eval --list` is timed, trained ones too."""
ANSWER_TOKENS = {"stand-in": 3, "nano": 17, "gpu": 33, "paper": 33}
SHAPES = ("llama-3.2-1b", "llama-3.2-3b")
"""Shapes timed on random weights at gpu and paper scale: speed does not depend on weights."""
BLOCKS = {"nano": (1000, 10_000), "gpu": (1000, 10_000, 100_000), "paper": (1000, 10_000, 100_000)}
"""Sizes of the synthetic banks that are scored."""
SEDEM_CONTEXTS = {"stand-in": (64,), "nano": (8192,), "gpu": (32768,), "paper": (32768,)}
"""Context lengths at which SeDeM is timed alone."""
BATCHES = {"stand-in": (1, 2), "nano": (1, 8, 64), "gpu": (1, 8, 64), "paper": (1, 8, 64)}
"""Numbers of questions asked of one bank together."""
OWN_SHAPES = {"nano": SHIPPED / "backbone"}
"""Folders whose shapes stand for those of the paper, by backbone of a scale."""
RIVALS = {"icae": ("sedem-all-layers",), "comprexit": ("sedem-all-blocks", "comprexit-128")}
"""Methods that the paper times beside SeDeM, and the peers that are measured with each."""
COMPREXIT_CONTEXT = 1536
"""Tokens of the context of Table comprexit_ttft."""
KEPT_CONTEXTS = {
    "stand-in": (64,),
    "nano": (256, 1024, 4096, 16384),
    "paper": (256, 1024, 4096, 16384, 65536),
}
"""Context lengths at which kept keys and values are compared. The first has as much text as the K
blocks that SeDeM reads."""
BESIDE_CONTEXTS = {"stand-in": (64,), "nano": (1024, 2048, 4096, 7168)}
"""Context lengths at which sedem-smol and llama.cpp are compared; its backbone has 8,192
positions."""
NEVER = "never"
SLOT_TYPES = ("bfloat16", "int8", "fp8")
"""Types of stored slots."""


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
    return min(tokens, max(CONTEXTS[scale.size]))


def bench(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Run the bench; a killed run resumes after its last finished context.

    - bench: times and memory of the scale's methods; with another method than SeDeM, of both, on
      random weights.
    - batches: SeDeM's questions per second.
    - memories: SeDeM by type of the stored slots.
    - kept: what is kept of blocks, and when it pays off.
    - peers: every method, with its speed-up over the full context.
    - beside-llama-cpp: a warm bank, and its backbone with the whole text, by Hugging Face's forward
      and by llama.cpp.
    """
    name = scale.size
    plan: dict[str, Any] = {
        "methods": ("sedem",),
        "backbone": _shape(cell, scale),
        "runs": 1 if scale.stand_in else 20,
        "answer_tokens": ANSWER_TOKENS[name],
    }
    more: dict[str, Any] = {}
    match cell.measure:
        case "bench" if cell.method in RIVALS:
            plan |= {"methods": ("sedem", cell.method), "k": cell.k}
            plan |= {"contexts": (timed_context(cell, scale),)}
            more = {"peers": RIVALS[cell.method]}
        case "bench":
            plan |= {"methods": METHODS[scale.name], "contexts": CONTEXTS[name]}
            more = {"peers": PEERS_BESIDE.get(name, ()), "blocks": BLOCKS.get(name, ())}
        case "batches":
            plan |= {"contexts": SEDEM_CONTEXTS[name], "batches": BATCHES[name]}
        case "memories":
            plan |= {"contexts": SEDEM_CONTEXTS[name], "memory": SLOT_TYPES}
        case "peers":
            plan |= {"methods": tuple(EVERY), "contexts": PEER_CONTEXTS[name]}
        case "kept":
            # Joint blocks cannot be kept. Times do not depend on how a model was trained.
            plan |= {"kept": ("cold", "warm"), "block_context": "independent", "k": 2}
            plan |= {"contexts": KEPT_CONTEXTS[name], "online": False, "answer_tokens": 3}
            more = {"peers": ("text-blocks", "hf-prefix")}
        case "beside-llama-cpp":
            # A round reads the longest text anew, which takes half a minute of a CPU.
            plan |= {"kept": ("warm",), "weights": ("int8",), "k": cell.k, "online": False}
            plan |= {"contexts": BESIDE_CONTEXTS[name], "runs": min(plan["runs"], 6)}
            more = {"peers": ("hf", "hf-prefix", "llama-cpp")}
    checkpoint = None if cell.variant is None else checkpoint_of(cell, scale, data)
    plan["checkpoint"] = str(checkpoint or SMALL_MODEL)
    result = run_bench(Plan(**plan), scale.runs / "bench" / cell.name, **more)
    # Folders differ between machines; the result contains the digests of their files.
    result["settings"]["checkpoint"] = None if checkpoint is None else checkpoint.name
    if cell.backbone:
        result["settings"]["backbone"] = cell.backbone
        result["notes"] = [n.replace(plan["backbone"], cell.backbone) for n in result["notes"]]
    if cell.measure == "peers":
        result["times_sooner"] = times_sooner(result["results"])
    if cell.measure == "beside-llama-cpp" and not result["left_out"]:
        result["versions"]["llama-cpp-python"] = version("llama-cpp-python")
    if cell.measure == "kept":
        result["worth"] = worth(result["results"])
    return result


def _shape(cell: Cell, scale: Scale) -> str | None:
    """The shape or the folder of the backbone whose times are measured on random weights."""
    if cell.backbone and scale.stand_in:
        return str(backbone(cell.backbone, scale))
    return str(OWN_SHAPES.get(cell.backbone, cell.backbone)) or None


def worth(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The benefit of kept keys and values, by context length.

    There are three times of an answer: `cold` if nothing is ever kept, `missed` if all blocks are
    computed and kept, `found` if every block is kept already. With a share h of found blocks, an
    answer takes h * found + (1 - h) * missed.

    Returns:
        `ratio` (time to the first token over that of SeDeM with everything kept, by method),
        `hit_rate` (share of blocks found from which keeping is faster, in percent) and `questions`
        (after which warming the whole bank has paid off); the last two may be "never".
    """
    shown: dict[str, dict[str, Any]] = {}
    for tokens, warm in results["sedem-warm"].items():
        times = {n: rows[tokens]["prebuilt_ttft_ms"]["median"] for n, rows in results.items()}
        cold, found = times["sedem"], times["sedem-warm"]
        missed, warming = warm["missed_ttft_ms"]["median"], warm["warm_ms"]["median"]
        rate: float | str = NEVER
        if missed <= cold:
            rate = 0.0
        elif found <= cold:
            rate = 100 * (missed - cold) / (missed - found)
        shown[tokens] = {
            "ratio": {name: time / found for name, time in times.items()},
            "hit_rate": rate,
            "questions": warming / (cold - found) if found < cold else NEVER,
        }
    return shown


def times_sooner(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Speed-up of the time to the first token over full context, by method and clock."""
    medians: dict[str, dict[str, float]] = {}
    for method, found in results.items():
        (figures,) = found.values()
        clocks = ("online", "prebuilt")
        medians[method] = {clock: figures[f"{clock}_ttft_ms"]["median"] for clock in clocks}
    reference = medians["full-context"]
    return {
        method: {clock: reference[clock] / ms for clock, ms in own.items()}
        for method, own in medians.items()
    }


@cache
def _ceilings(place: torch.device, dtype: torch.dtype) -> Ceilings:
    return measure_ceilings(place, dtype)


def run_bench(
    plan: Plan,
    out: Path | None = None,
    *,
    peers: Sequence[str] = (),
    blocks: Sequence[int] = (),
) -> dict[str, Any]:
    """Run `sedem.bench` with more rows and figures.

    Args:
        out: folder of an interrupted run, which resumes.
        peers: names in `PEERS`, which are measured after the methods.
        blocks: sizes of synthetic banks that SeDeM scores.

    Returns:
        The document of the bench with `ceilings` of this process, `floor` in each row, and
        `selection` by number of blocks.
    """
    # A single run shows that it runs, and not how fast: one measurement serves all.
    measured = _ceilings if plan.runs == 1 else measure_ceilings
    ceilings = measured(plan.place, plan.type)
    document = command.run_bench(
        plan, out, peers={name: PEERS[name] for name in peers}, detail=_Details(plan)
    )
    selection = _selection(plan, blocks) if blocks else {}
    # Measured before and after, so that neither warm-up nor other processes lower a ceiling.
    ceilings = ceilings.best_with(measured(plan.place, plan.type))
    for rows in document["results"].values():
        for tokens, row in rows.items():
            row["floor"] = _floor(row["work"], int(tokens), ceilings)
    for row in selection.values():
        row["floor_ms"] = 1e3 * Work(**row["work"]).seconds(ceilings)
    document["notes"] += busy(document["results"])
    return {**document, "ceilings": asdict(ceilings), "selection": selection}


def _floor(
    work: Mapping[str, Any] | None, tokens: int, ceilings: Ceilings
) -> dict[str, float | None] | None:
    if work is None:
        return None
    stages = {stage: [Work(**part) for part in parts] for stage, parts in work.items()}
    return floors(stages, tokens, ceilings)


# More of a method's row: the work behind its floors, and SeDeM's building by stage


@dataclass
class _Details:
    plan: Plan
    layers: dict[int, EncoderLayers] = field(default_factory=dict)

    def __call__(self, trial: Trial) -> dict[str, Any]:
        reader, answer = trial.subject.reader, trial.answer
        work = _work(trial)
        more: dict[str, Any] = {
            "work": work and {n: [asdict(part) for part in parts] for n, parts in work.items()},
            "layers_tok_s": None,
        }
        if isinstance(reader, TextBlocks):
            # It uses parts of two open models.
            more["memory"] = None
        elif isinstance(reader, PrefixCached | LlamaCpp):
            # For a truncated context, only the remaining tokens count.
            kept = answer.stored_bytes or 0
            tokens = trial.memory.ids.shape[1] - 1
            per_token = {"bytes_per_token": kept / tokens if tokens else None}
            more["kept"] = {**per_token, "ready": trial.ready, "blocks": answer.blocks}
        elif isinstance(reader, BoundSedem) and self.plan.online:
            more["build_stages"] = build_stages(reader.model, trial.documents)
            if trial.subject.name == "sedem":
                more["layers_tok_s"] = self._layers(reader.model, trial)
        return more

    def _layers(self, model: SeDeM, trial: Trial) -> dict[str, float]:
        """Tokens per second of Hugging Face's forward of the encoder's layers."""
        if id(model) not in self.layers:
            frozen = open_backbone(model.encoder.name, dtype=self.plan.type, device=self.plan.place)
            self.layers[id(model)] = EncoderLayers(model.config, frozen)
        layers, tokens = self.layers[id(model)], trial.answer.context_tokens or 0
        times = [layers.run_ms(trial.documents) for _ in range(WARM_UP + self.plan.runs)]
        return spread([1e3 * tokens / time for time in times[WARM_UP:]])


def _work(trial: Trial) -> Stages | None:
    """The work behind the method's floor; None if the method's stages are not known."""
    subject, reader = trial.subject, trial.subject.reader
    if isinstance(reader, BoundSedem):
        found = isinstance(reader, WarmSedem)
        return sedem_work(reader.model, trial.answer, QUESTIONS[0], found=found)
    unknown = isinstance(reader, LongLLMLingua | LlamaCpp)
    if subject.backbone is None or not subject.reads_text or unknown:
        # LongLLMLingua reads the context several times to prune it, then reads the rest.
        # llama.cpp has its own matrices.
        return None
    cached = isinstance(reader, PrefixCached)
    return text_work(subject.backbone, trial.answer, QUESTIONS[0], cached=cached)


class EncoderLayers:
    """The first layers of a backbone as Hugging Face runs them: the reference for building a bank.

    It runs the same segments in the same batches. Tokenization, the compressor and the storage of
    the bank are left out, which favours this reference.

    Args:
        config: gives the number of layers and the segmentation.
        encoder: a frozen backbone without adapters; its upper layers are removed.
    """

    def __init__(self, config: SedemConfig, encoder: Backbone) -> None:
        self.config = config
        self.encoder = encoder
        self.trunk = encoder.model.get_decoder()
        self.trunk.layers = self.trunk.layers[: config.extract_layer]
        self.trunk.config.num_hidden_layers = config.extract_layer
        self.trunk.norm = nn.Identity()

    def batches(self, documents: Sequence[Document]) -> list[Tensor]:
        """Token ids in the batches of `sedem.reading.encoding`, with the start token."""
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
        clock = Clock(self.encoder.device)
        for ids_BP in batched:
            self.states(ids_BP)
        clock.lap("all_ms")
        return clock.timings["all_ms"]


def _segments(config: SedemConfig, encoder: Backbone, document: Document) -> Any:
    how, shift = config.segmentation, config.segment_shift
    return segment_text(document.text, encoder, config.segment_length, how, shift)


def build_stages(model: SeDeM, documents: Sequence[Document]) -> dict[str, float]:
    """Milliseconds to build a bank, by stage.

    Segmenting is timed separately, and the compressor by hooks. The encoder's time is the rest of
    the total, so it includes moving batches to and from the device.
    """
    clock = Clock(model.device)
    for document in documents:
        _segments(model.config, model.encoder, document)
    clock.lap("segment_ms")
    calls: list[Clock] = []
    hooks = [
        model.compressor.register_forward_pre_hook(lambda *_: calls.append(Clock(model.device))),
        model.compressor.register_forward_hook(lambda *_: calls[-1].lap("call")),
    ]
    clock.lap("before")
    model.read(documents)
    clock.lap("read")
    for hook in hooks:
        hook.remove()
    segment, read = clock.timings["segment_ms"], clock.timings["read"]
    compress = sum(call.timings["call"] for call in calls)
    return {
        "segment_ms": segment,
        "encode_ms": max(0.0, read - segment - compress),
        "compress_ms": compress,
    }


# Scoring of synthetic banks

DISTINCT_BLOCKS = 1000
"""Number of distinct random memory blocks; a larger bank repeats them, each with its own keys."""


def _selection(plan: Plan, sizes: Sequence[int]) -> dict[str, Any]:
    """Times of exact scoring of every block of synthetic banks, by their number of blocks.

    Keys are prepared. `tokens` are those that the blocks represent, `bytes` those of the keys; the
    floor is computed from `work`.
    """
    with plan_checkpoint(plan) as checkpoint:
        alone = plan.with_changes(methods=("sedem",), kept=("cold",))
        (subject, *_), _ = open_subjects(alone, checkpoint)
        reader = subject.reader
        assert isinstance(reader, BoundSedem)
        model = reader.model
        hidden_1QE, mask_1Q = encode_questions(model, model.engine, QUESTIONS[:1])
        query_1QRH, mask_1Q = model.queries(hidden_1QE), mask_1Q.to(model.device)
        found = {}
        for count in sizes:
            keys_NJRH, times = _synthetic_keys(model, count), []
            keys_1NJRH = keys_NJRH.values[None]
            slots_1NJ = torch.ones(keys_1NJRH.shape[:3], dtype=torch.bool, device=model.device)
            for _ in range(WARM_UP + plan.runs):
                clock = Clock(model.device)
                block_scores(query_1QRH, mask_1Q, keys_1NJRH, slots_1NJ)
                clock.lap("score_ms")
                times.append(clock.timings["score_ms"])
            slots = count * model.config.slots_per_block
            flops = 2 * int(mask_1Q.sum()) * slots * model.selector.w_key.out_features
            found[str(count)] = {
                "blocks": count,
                "tokens": slots * model.config.compression,
                "bytes": keys_NJRH.nbytes,
                "score_ms": spread(times[WARM_UP:]),
                "work": asdict(Work(flops, keys_NJRH.nbytes)),
            }
    return found


@torch.no_grad()
def _synthetic_keys(model: SeDeM, blocks: int) -> Quantized:
    """The selector's keys `[N, J, R, H]` of random memory, as `keys.prepare` keeps them."""
    drawn_NJD = torch.randn(
        min(blocks, DISTINCT_BLOCKS),
        model.config.slots_per_block,
        model.decoder.width,
        generator=torch.Generator().manual_seed(0),
    )
    keys = quantize(model.selector.keys(drawn_NJD.to(model.selector.w_key.weight)), BFLOAT16)
    return keys[torch.arange(blocks, device=keys.values.device) % len(keys)]

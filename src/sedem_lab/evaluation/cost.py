"""The cost of a method: parameters and FLOPs of one query, counted while it runs without weights.

Appendix Efficiency and Overhead. `sedem_lab.evaluation.meta` says what counts. Adapters count as
merged. FLOPs are those that our implementations compute: baselines pad every row of a batch to the
longest, and run prefixes through every layer even if a method does not need the last one.
`docs/deviations.md` says what a method could save.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from sedem.backbone.decoder import FAMILIES, LORA_TARGETS
from sedem.backbone.loading import read_config
from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.config import SedemConfig, llama_1b, llama_1b_to_3b, llama_3b
from sedem.engine.eager import condition
from sedem.errors import ConfigError
from sedem.method.compressor import encode
from sedem.method.injection import GrowingCache, step
from sedem.method.selector import block_scores
from sedem.model import SeDeM
from sedem_lab.baselines.registry import reader_class
from sedem_lab.baselines.settings import ReaderConfig
from sedem_lab.baselines.soft_prompt import PrefillResult
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.evaluation.meta import META, backbone_of, counted

PRESETS: dict[str, tuple[Callable[..., SedemConfig], str, str]] = {
    "llama-3.2-1b": (llama_1b, "llama-3.2-1b", "llama-3.2-1b"),
    "llama-3.2-3b": (llama_3b, "llama-3.2-3b", "llama-3.2-3b"),
    "llama-3.2-1b-to-3b": (llama_1b_to_3b, "llama-3.2-1b", "llama-3.2-3b"),
}
"""The paper's settings: SeDeM's configuration, and the shapes of encoder and decoder."""


@dataclass(frozen=True)
class Workload:
    """The size of one query; the defaults are the paper's assumptions.

    Attributes:
        context, question, answer: numbers of tokens.
        k: number of selected blocks.
    """

    context: int = 2048
    question: int = 30
    answer: int = 16
    k: int = 2

    def assumptions(self) -> dict[str, int]:
        """The numbers of tokens by the names that results have."""
        return {
            "context_tokens": self.context,
            "question_tokens": self.question,
            "answer_tokens": self.answer,
        }


def cost(name: str, workload: Workload | None = None, method: str | None = None) -> dict[str, Any]:
    """Parameters and FLOPs of SeDeM on a backbone, or of a trained baseline.

    Args:
        name: a preset, a checkpoint folder, a backbone folder or a hub id.
        workload: the query; None means the paper's, with the model's own K.
        method: a baseline in `COUNTED`, with default settings, which are the paper's; None means
            SeDeM.

    Returns:
        `backbone`, `parameters` (by part, `total`, `backbone`, `percent`) and `flops` (by stage,
        with the assumptions).

    Raises:
        ConfigError: the name or the method is unknown, or no model has such settings.
    """
    if method:
        flops = baseline_flops(method, name, workload=workload)
        parameters = baseline_parameters(method, name)
        return {"backbone": name, "method": method, "parameters": parameters, "flops": flops}
    config, encoder, decoder = model_shapes(name)
    if workload is None:
        blocks = -(-Workload.context // config.segment_length)
        # The maximum that "auto" may take, since the actual number depends on the question.
        own = {"all": blocks, "auto": config.auto_max}
        workload = Workload(k=own[config.k] if isinstance(config.k, str) else config.k)
    try:
        return {
            "backbone": name,
            "parameters": count_parameters(config, encoder, decoder),
            "flops": count_flops(config, encoder, decoder, workload),
        }
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the settings of '{name}' do not fit each other: {reason}") from None


# Parameters


def count_parameters(
    config: SedemConfig, encoder: PretrainedConfig, decoder: PretrainedConfig
) -> dict[str, Any]:
    """The parameters that SeDeM adds, counted on the modules that a model has."""
    model = model_of(config, encoder, decoder)
    counts = {n: size_of(getattr(model, n)) for n in ("compressor", "decompressor", "selector")}
    size, counts["lora"] = backbone_size(decoder, config.lora_rank, LORA_TARGETS)
    total = sum(counts.values())
    return {**counts, "total": total, "backbone": size, "percent": round(100 * total / size, 2)}


def backbone_size(
    shape: PretrainedConfig, lora_rank: int, lora_targets: Sequence[str]
) -> tuple[int, int]:
    """The parameters of a backbone, and of its adapters; rank 0 means no adapters."""
    backbone = backbone_of(shape)
    size = size_of(backbone)
    if lora_rank:
        with META:
            backbone.add_lora(lora_rank, lora_rank, lora_targets)
    return size, sum(parameter.numel() for parameter in backbone.lora_parameters())


def size_of(module: nn.Module) -> int:
    """The parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def baseline_parameters(
    method: str, backbone: str, config: ReaderConfig | None = None
) -> dict[str, Any]:
    """The parameters that a baseline trains, and those that the paper's table of overheads counts.

    Returns:
        Trained parameters in `parts` and in `lora`, and their `total`; `without_lora`, which each
        method counts as the paper's table does, and `percent_without_lora` of the `backbone`.
    """
    kind, shape = reader_class(method), backbone_shape(backbone)
    config = config or kind.Config(backbone=backbone)
    with META:
        parts = size_of(kind.build_parts(config, shape))
    size, lora = backbone_size(shape, config.lora_rank, config.lora_targets)
    overhead = kind.overhead(config, shape)
    return {
        "parts": parts,
        "lora": lora,
        "total": parts + lora,
        "without_lora": overhead,
        "percent_without_lora": 100 * overhead / size,
        "backbone": size,
    }


# FLOPs


def model_of(
    config: SedemConfig, encoder: PretrainedConfig, decoder: PretrainedConfig, **options: Any
) -> SeDeM:
    """SeDeM on backbones of these shapes, without weights; `options` are those of `backbone_of`."""
    reads = backbone_of(encoder, **options)
    answers = backbone_of(decoder, **options) if config.cross_model else reads
    with META:
        return SeDeM(config.with_changes(chat_template=False), reads, answers)


@torch.no_grad()
def count_flops(
    config: SedemConfig,
    encoder: PretrainedConfig,
    decoder: PretrainedConfig,
    workload: Workload,
) -> dict[str, Any]:
    """The FLOPs of one query, online: read the context, select, restore, answer."""
    model, K = model_of(config, encoder, decoder), workload.k
    T, J, D = config.segment_length, config.slots_per_block, decoder.hidden_size
    ids_ST = torch.zeros(-(-workload.context // T), T, dtype=torch.long)
    question_1Q = torch.zeros(1, workload.question, dtype=torch.long)
    prefix_1P = torch.zeros(1, 1 + workload.question, dtype=torch.long)
    hidden_1QE = torch.empty(1, workload.question, encoder.hidden_size, device=META)
    bank_1NJD = torch.empty(1, -(-len(ids_ST) * config.slots // J), J, D, device=META)
    chosen_1KJD = torch.empty(1, K, J, D, device=META)
    full_1KJ, scores_1K = torch.full((1, K, J), config.compression), torch.zeros(1, K)
    cache = GrowingCache()

    def states(ids: Tensor) -> Tensor:
        return model.mixture(encode(model.encoder, ids, config.extract_layers).float())

    def select() -> None:
        # The decoder reads the question anyway.
        hidden = hidden_1QE if config.read_once else states(question_1Q)
        keys = model.selector.keys(bank_1NJD)
        every = torch.ones(keys.shape[:3]).bool()
        block_scores(model.queries(hidden), question_1Q == 0, keys, every)

    def prefill() -> None:
        given = prefix_1P, prefix_1P == 0, chosen_1KJD, full_1KJ, scores_1K
        filled = condition(model, *given, cache)
        model.decoder.logits(filled.prefix[:, -1])

    def decode() -> None:
        given = config.inject_layer, torch.zeros(1).long(), cache
        model.decoder.logits(step(model.decoder, *given))

    restore = counted(lambda: model.decompressor(chosen_1KJD.flatten(0, 2)))
    stages = {
        "read": counted(lambda: model.compressor(states(ids_ST), torch.ones_like(ids_ST).bool())),
        "select": counted(select),
        "restore": restore,
        "prefill": counted(prefill) - restore,
        "decode": _steps(decode, workload.answer - 1),
    }
    whole = workload.context + 1 + workload.question, workload.answer
    return {
        **stages,
        "total": sum(stages.values()),
        "full_context_total": full_context_flops(decoder, *whole),
        "assumptions": {
            **workload.assumptions(),
            "k": K,
            "extract_layer": config.extract_layer,
            "inject_layer": config.inject_layer,
        },
    }


@torch.no_grad()
def baseline_flops(
    method: str,
    backbone: str,
    config: ReaderConfig | None = None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """The FLOPs of one query, online: to `encode` the context, and to `decode` the answer.

    Raises:
        ConfigError: the method is not in `COUNTED`, or the backbone is unknown.
    """
    if method not in COUNTED:
        raise ConfigError(f"FLOPs of '{method}' are not counted; those of {', '.join(COUNTED)} are")
    kind, shape, asked = reader_class(method), backbone_shape(backbone), workload or Workload()
    settings: Any = config or kind.Config(backbone=backbone)
    assumed = {**asked.assumptions(), **{n: getattr(settings, n) for n in COUNTED[method]}}
    layers, found = shape.num_hidden_layers, []
    # Layers are alike, and a method may read a context in many passes: two say what all cost.
    for shape.num_hidden_layers in (1, 2):
        with META:
            reader = kind(settings.with_changes(lora_rank=0), backbone_of(shape)).eval()
        found.append(_read_and_answered(reader, asked))
    encode, decode = (one + (layers - 1) * (two - one) for one, two in zip(*found, strict=True))
    if method == "500x":
        prompt = 1 + asked.question
        assumed["context_tokens_read"] = reader.context_tokens_used(
            asked.context, prompt, asked.answer
        )
    return {"encode": encode, "decode": decode, "total": encode + decode, "assumptions": assumed}


def _read_and_answered(reader: TrainedReader, asked: Workload) -> tuple[int, int]:
    context, prompt = [0] * asked.context, [0] * (1 + asked.question)
    used = reader.context_tokens_used(asked.context, len(prompt), asked.answer)
    contents: list[Any] = []
    started: list[PrefillResult] = []
    encode = counted(lambda: contents.append(reader.compress(context).content))
    with reader.decoding_mode():
        decode = counted(lambda: started.append(reader.prefill(contents, [used], [prompt])))
        token_1 = torch.zeros(1, dtype=torch.long)
        decode += _steps(lambda: started[0].advance(token_1), asked.answer - 1)
    return encode, decode


COUNTED: Mapping[str, tuple[str, ...]] = {
    "icae": ("memory", "compression"),
    "hmt": ("memory", "sensory", "segment_length", "recall_width", "recall_context"),
    "500x": ("memory", "limit"),
    "beacon": ("window", "ratio", "sink"),
}
"""The trained methods of the paper's table, and the settings that their count depends on."""


@torch.no_grad()
def full_context_flops(shape: PretrainedConfig, prefix: int, answer: int) -> int:
    """The FLOPs of an answer after a whole context.

    The prefix gives the first answer token, and the last token is not read. Tokens that are read
    together cost as much as one by one.
    """
    backbone = backbone_of(shape)

    def run() -> None:
        ids_1P = torch.zeros(1, prefix + answer - 1, dtype=torch.long)
        positions_1P = torch.arange(ids_1P.shape[1])[None]
        states_1PD = backbone.run(backbone.embed(ids_1P), 0, backbone.depth, positions_1P)
        backbone.logits(states_1PD[:, -answer:])

    return counted(run)


def _steps(run: Callable[[], object], count: int) -> int:
    """The FLOPs of steps that each attend to one more token: two of them say what all cost."""
    if count < 1:
        return 0
    first, second = counted(run), counted(run)
    return count * first + (second - first) * (count * (count - 1) // 2)


# Shapes


def backbone_shape(name: str) -> PretrainedConfig:
    """The configuration of one backbone: a preset, a backbone folder or a hub id.

    Raises:
        ConfigError: the name is unknown, or a preset with two backbones.
    """
    if name.lower() not in PRESETS:
        return _auto_config(name)
    _, encoder, decoder = PRESETS[name.lower()]
    if encoder != decoder:
        raise ConfigError(f"'{name}' has two backbones; give {encoder} or {decoder}")
    return shape_file(decoder)


def model_shapes(name: str) -> tuple[SedemConfig, PretrainedConfig, PretrainedConfig]:
    """The configuration of SeDeM on a backbone, and those of its encoder and decoder.

    Args:
        name: a preset, a checkpoint folder, a backbone folder or a hub id.

    Raises:
        ConfigError: the name is unknown.
    """
    if name.lower() in PRESETS:
        preset, *names = PRESETS[name.lower()]
        encoder, decoder = map(shape_file, names)
        return preset(), encoder, decoder
    folder = Path(name)
    if (folder / "sedem.safetensors").is_file():
        config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
        encoder, decoder = (
            _auto_config(str(folder / own) if (folder / own).is_dir() else own)
            for own in (config.encoder, config.decoder or config.encoder)
        )
        return config, encoder, decoder
    shape = _auto_config(name)
    # The proportions of the paper's 3B setting: layers 14 and 10 of 28.
    depth = shape.num_hidden_layers
    config = SedemConfig(
        encoder=name,
        extract_layers=(max(1, depth // 2),),
        inject_layer=round(depth * 10 / 28),
    )
    return config, shape, shape


def _auto_config(name: str) -> PretrainedConfig:
    try:
        shape = read_config(name)
    except (OSError, ValueError):
        raise ConfigError(
            f"backbone '{name}' is not known; give {', '.join(PRESETS)}, a folder or a hub id"
        ) from None
    if shape.model_type not in FAMILIES:
        raise ConfigError(
            f"backbone '{name}' has the layout '{shape.model_type}'; costs are counted "
            f"for {', '.join(FAMILIES)}"
        )
    return shape


def shape_file(name: str) -> PretrainedConfig:
    """The configuration of a public backbone, from a file of the package."""
    entries = json.loads((files("sedem_lab") / "shapes" / f"{name}.json").read_text())
    return AutoConfig.for_model(**entries)

"""The cost of a model: parameters, counted on the meta device, and FLOPs, from formulas.

Appendix Efficiency and Overhead. Weights are neither needed nor created. One multiply-add is two
FLOPs. Norms, activations, softmax and embedding look-ups are not counted, as is usual.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from sedem.backbone.decoder import FAMILIES
from sedem.backbone.loading import empty_model, read_config
from sedem.backbone.lora import LORA_TARGETS
from sedem.config import SedemConfig, llama_1b, llama_1b_to_3b, llama_3b
from sedem.errors import ConfigError
from sedem.method.compressor import build_compressor
from sedem.method.decompressor import build_decompressor
from sedem.method.selector import build_selector

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
        context: number of document tokens.
        question: number of question tokens.
        answer: number of answer tokens.
        k: number of selected blocks.
    """

    context: int = 2048
    question: int = 30
    answer: int = 16
    k: int = 2


def cost(name: str, workload: Workload | None = None) -> dict[str, Any]:
    """Parameters and FLOPs of SeDeM on a backbone.

    Args:
        name: a preset, a checkpoint folder, a backbone folder or a hub id.
        workload: the query; None means the paper's.

    Returns:
        `backbone`, `parameters` (by part, `total`, `backbone`, `percent`) and `flops` (by stage,
        with the assumptions).

    Raises:
        ConfigError: the name is unknown.
    """
    config, encoder, decoder = model_shapes(name)
    workload = workload or _own_workload(config)
    return {
        "backbone": name,
        "parameters": count_parameters(config, encoder, decoder),
        "flops": count_flops(config, encoder, decoder, workload),
    }


def _own_workload(config: SedemConfig) -> Workload:
    """The paper's query with the model's own K."""
    if config.k == "all":
        return Workload(k=-(-Workload.context // config.segment_length))
    # The maximum that "auto" may take, since the actual number depends on the question.
    return Workload(k=config.auto_max if config.k == "auto" else config.k)


def count_parameters(
    config: SedemConfig, encoder: PretrainedConfig, decoder: PretrainedConfig
) -> dict[str, Any]:
    """The parameters that SeDeM adds, counted on the modules that a model has."""
    with torch.device("meta"):
        widths = encoder.hidden_size, decoder.hidden_size
        counts = {
            "compressor": _size(build_compressor(config, *widths)),
            "decompressor": _size(build_decompressor(config, decoder.hidden_size)),
            "selector": _size(build_selector(config, *widths)),
        }
    size, lora = backbone_size(decoder, config.lora_rank, LORA_TARGETS)
    counts["lora"] = lora
    total = sum(counts.values())
    return {**counts, "total": total, "backbone": size, "percent": round(100 * total / size, 2)}


def backbone_size(
    shape: PretrainedConfig, lora_rank: int, lora_targets: Sequence[str]
) -> tuple[int, int]:
    """The parameters of a backbone, and of its adapters; rank 0 means no adapters."""
    with torch.device("meta"):
        # A configuration may name an attention implementation that would have to be downloaded.
        backbone = empty_model(shape, attn_implementation="eager")
        size = _size(backbone)
        if not lora_rank:
            return size, 0
        backbone.add_adapter(LoraConfig(r=lora_rank, target_modules=list(lora_targets)))
        return size, sum(p.numel() for n, p in backbone.named_parameters() if "lora_" in n)


def count_flops(
    config: SedemConfig,
    encoder: PretrainedConfig,
    decoder: PretrainedConfig,
    workload: Workload,
) -> dict[str, Any]:
    """The FLOPs of one query, online: read the context, select, restore, answer."""
    T, D = config.segment_length, decoder.hidden_size
    segments = -(-workload.context // T)
    # Without a decompressor a slot is one soft token.
    states = workload.k * (config.slots if config.decompressor == "none" else T)
    read = config.extract_layer * segments * layer_flops(encoder, T + 1)
    write = 2 * segments * config.slots * encoder.hidden_size * D
    question = config.extract_layer * layer_flops(encoder, workload.question + 1)
    heads = config.selector_heads * (config.selector_dim or D // config.selector_heads)
    project = 2 * heads * (workload.question * encoder.hidden_size + segments * config.slots * D)
    match = 2 * workload.question * segments * config.slots * heads
    hidden = config.decompressor_hidden or D
    restore = 0
    if config.decompressor == "mlp":
        restore = 2 * workload.k * config.slots * hidden * D * (1 + config.compression)
    lower, upper = config.inject_layer, decoder.num_hidden_layers - config.inject_layer
    prefix = workload.question + 1
    prefill = lower * layer_flops(decoder, prefix) + upper * layer_flops(decoder, states + prefix)
    head = 2 * D * decoder.vocab_size
    decode = sum(
        lower * layer_flops(decoder, 1, prefix + i)
        + upper * layer_flops(decoder, 1, states + prefix + i)
        + head
        for i in range(workload.answer - 1)
    )
    stages = {
        "read": read + write,
        "select": question + project + match,
        "restore": restore,
        "prefill": prefill + head,
        "decode": decode,
    }
    full = answer_flops(decoder, workload.context + prefix, 0, workload.answer)
    return {
        **{name: int(value) for name, value in stages.items()},
        "total": int(sum(stages.values())),
        "full_context_total": full,
        "assumptions": {
            "context_tokens": workload.context,
            "question_tokens": workload.question,
            "answer_tokens": workload.answer,
            "k": workload.k,
            "extract_layer": config.extract_layer,
            "inject_layer": config.inject_layer,
        },
    }


def answer_flops(shape: PretrainedConfig, prefix: int, before: int, answer: int) -> int:
    """The FLOPs of an answer through every layer.

    The prefix gives the first answer token, and the last token is not read. The head runs once for
    each answer token.

    Args:
        shape: configuration of the backbone.
        prefix: number of tokens in the prefix.
        before: number of cached tokens before the prefix.
        answer: number of answer tokens.
    """
    run = layer_flops(shape, prefix, before)
    run += sum(layer_flops(shape, 1, before + prefix + i) for i in range(answer - 1))
    return shape.num_hidden_layers * run + answer * 2 * shape.hidden_size * shape.vocab_size


def layer_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """The FLOPs of one decoder layer over new tokens.

    Args:
        shape: configuration of the backbone.
        tokens: number of new tokens.
        before: number of cached tokens before them.
    """
    return projection_flops(shape, tokens) + attention_flops(shape, tokens, before)


def projection_flops(shape: PretrainedConfig, tokens: int) -> int:
    """The FLOPs of the projections of attention and MLP in one layer."""
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = head_widths(shape)
    return 2 * tokens * (2 * width * queries + 2 * width * keys + 3 * width * inner)


def attention_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """The FLOPs of causal attention in one layer, without its projections.

    Token i attends to `before` + i + 1 keys, once for the scores and once for the values.

    Args:
        shape: configuration of the backbone.
        tokens: number of new tokens.
        before: number of cached tokens before them.
    """
    pairs = tokens * before + tokens * (tokens + 1) // 2
    return 4 * pairs * head_widths(shape)[0]


def head_widths(shape: PretrainedConfig) -> tuple[int, int]:
    """The widths of all query heads together, and of all key heads."""
    head = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return head * shape.num_attention_heads, head * shape.num_key_value_heads


def backbone_shape(name: str) -> PretrainedConfig:
    """The configuration of one backbone.

    Args:
        name: a preset, a backbone folder or a hub id.

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
        preset, encoder, decoder = PRESETS[name.lower()]
        return preset(), shape_file(encoder), shape_file(decoder)
    folder = Path(name)
    if (folder / "sedem.safetensors").is_file():
        return _checkpoint_shapes(folder)
    shape = _auto_config(name)
    # The proportions of the paper's 3B setting: layers 11 and 10 of 28.
    depth = shape.num_hidden_layers
    config = SedemConfig(
        encoder=name,
        extract_layers=(max(1, round(depth * 11 / 28)),),
        inject_layer=round(depth * 10 / 28),
    )
    return config, shape, shape


def _checkpoint_shapes(folder: Path) -> tuple[SedemConfig, PretrainedConfig, PretrainedConfig]:
    from sedem.checkpoint.folder import EXTRA_ENTRIES

    config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)

    def shape(name: str) -> PretrainedConfig:
        return _auto_config(str(folder / name) if (folder / name).is_dir() else name)

    return config, shape(config.encoder), shape(config.decoder or config.encoder)


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
    entries = json.loads((files("sedem") / "shapes" / f"{name}.json").read_text())
    return AutoConfig.for_model(**entries)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

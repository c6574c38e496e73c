"""What a model costs: parameters counted on the meta device, FLOPs from formulas.

Appendix Efficiency and Overhead. No weights are needed and none are made. One multiply-add is two
FLOPs; norms, activations, softmax and embeddings' look-ups are left out, as is usual.
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
"""Settings of the paper with the shapes of their encoder and decoder."""


@dataclass(frozen=True)
class Workload:
    """What one query is, for FLOPs; the defaults are the paper's assumptions.

    Attributes:
        context: document tokens.
        question: question tokens.
        answer: answer tokens.
        k: selected blocks.
    """

    context: int = 2048
    question: int = 30
    answer: int = 16
    k: int = 2


def cost(name: str, workload: Workload | None = None) -> dict[str, Any]:
    """Parameters and FLOPs of SeDeM on a backbone.

    Args:
        name: a preset, a checkpoint folder, a backbone folder or a hub id.
        workload: one query; the paper's if not given.

    Returns:
        `backbone`, `parameters` (by part, `total`, `backbone`, `percent`) and `flops` (by stage,
        with the assumptions).

    Raises:
        ConfigError: the name is none of these.
    """
    config, encoder, decoder = _shapes(name)
    workload = workload or Workload(k=config.k)
    return {
        "backbone": name,
        "parameters": count_parameters(config, encoder, decoder),
        "flops": count_flops(config, encoder, decoder, workload),
    }


def count_parameters(
    config: SedemConfig, encoder: PretrainedConfig, decoder: PretrainedConfig
) -> dict[str, Any]:
    """Parameters that SeDeM adds, from the very modules that a model is made of."""
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
    """Parameters of a backbone, and of adapters on it; rank 0 means none."""
    with torch.device("meta"):
        # Named here, since a configuration may name an implementation that has to be fetched.
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
    """FLOPs of one query, online: read the context, select, restore, answer."""
    T, D = config.segment_length, decoder.hidden_size
    segments = -(-workload.context // T)
    states = workload.k * T
    read = config.extract_layer * segments * layer_flops(encoder, T + 1)
    write = 2 * segments * config.slots * encoder.hidden_size * D
    question = config.extract_layer * layer_flops(encoder, workload.question + 1)
    heads = config.selector_heads * (config.selector_dim or D // config.selector_heads)
    project = 2 * heads * (workload.question * encoder.hidden_size + segments * config.slots * D)
    match = 2 * workload.question * segments * config.slots * heads
    hidden = config.decompressor_hidden or D
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
    """FLOPs of an answer from every layer: a prefix that follows others, then its tokens but one.

    The prefix gives the first answer token, and the last one is not read; each has a head.
    """
    run = layer_flops(shape, prefix, before)
    run += sum(layer_flops(shape, 1, before + prefix + i) for i in range(answer - 1))
    return shape.num_hidden_layers * run + answer * 2 * shape.hidden_size * shape.vocab_size


def layer_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """FLOPs of one decoder layer over some new tokens that follow others.

    Projections of attention and MLP, and causal attention: token i looks at `before` + i + 1 keys,
    once for the scores and once for the values.
    """
    width, inner = shape.hidden_size, shape.intermediate_size
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    queries, keys = head * shape.num_attention_heads, head * shape.num_key_value_heads
    weights = 2 * width * queries + 2 * width * keys + 3 * width * inner
    looked_at = tokens * before + tokens * (tokens + 1) // 2
    return 2 * tokens * weights + 4 * looked_at * queries


def backbone_shape(name: str) -> PretrainedConfig:
    """The shape of one backbone.

    Args:
        name: one whose shape the package holds, a backbone folder or a hub id.

    Raises:
        ConfigError: the name is none of these.
    """
    if name.lower() not in PRESETS:
        return _auto_config(name)
    _, encoder, decoder = PRESETS[name.lower()]
    if encoder != decoder:
        raise ConfigError(f"'{name}' is two backbones; give {encoder} or {decoder}")
    return shape_file(decoder)


def _shapes(name: str) -> tuple[SedemConfig, PretrainedConfig, PretrainedConfig]:
    if name.lower() in PRESETS:
        make, encoder, decoder = PRESETS[name.lower()]
        return make(), shape_file(encoder), shape_file(decoder)
    folder = Path(name)
    if (folder / "sedem.safetensors").is_file():
        return _of_checkpoint(folder)
    shape = _auto_config(name)
    # Layers in the proportions of the paper's 3B setting, 11 and 10 of 28.
    depth = shape.num_hidden_layers
    config = SedemConfig(
        encoder=name,
        extract_layers=(max(1, round(depth * 11 / 28)),),
        inject_layer=round(depth * 10 / 28),
    )
    return config, shape, shape


def _of_checkpoint(folder: Path) -> tuple[SedemConfig, PretrainedConfig, PretrainedConfig]:
    from sedem.inference.checkpoint import EXTRA_ENTRIES

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
            f"backbone '{name}' has the layout '{shape.model_type}'; sedem runs "
            f"{', '.join(FAMILIES)}"
        )
    return shape


def shape_file(name: str) -> PretrainedConfig:
    """The shape of a public backbone, as the package holds it."""
    entries = json.loads((files("sedem") / "shapes" / f"{name}.json").read_text())
    return AutoConfig.for_model(**entries)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

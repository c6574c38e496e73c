"""The cost of a model: parameters and FLOPs, counted on the meta device.

Appendix Efficiency and Overhead. Weights are neither needed nor created. One multiply-add is two
FLOPs. Norms, activations, softmax, rotary angles and embedding look-ups are not counted, as is
usual. Adapters count as merged.

`torch.utils.flop_counter` counts one token through a layer, without a cached token and after one.
A token after n others costs as much as those two say: attention to one more key always costs the
same. So a causal layer over many tokens is a sum, without the half of attention that its mask
hides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, DynamicCache, PretrainedConfig

from sedem.backbone.decoder import FAMILIES, LORA_TARGETS
from sedem.backbone.loading import empty_model, read_config
from sedem.config import SedemConfig, llama_1b, llama_1b_to_3b, llama_3b
from sedem.errors import ConfigError
from sedem.guidance.queries import READ_ONCE_RANK, Queries
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


def cost(name: str, workload: Workload | None = None) -> dict[str, Any]:
    """Parameters and FLOPs of SeDeM on a backbone.

    Args:
        name: a preset, a checkpoint folder, a backbone folder or a hub id.
        workload: the query; None means the paper's, with the model's own K.

    Returns:
        `backbone`, `parameters` (by part, `total`, `backbone`, `percent`) and `flops` (by stage,
        with the assumptions).

    Raises:
        ConfigError: the name is unknown.
    """
    config, encoder, decoder = model_shapes(name)
    if workload is None:
        blocks = -(-Workload.context // config.segment_length)
        # The maximum that "auto" may take, since the actual number depends on the question.
        own = {"all": blocks, "auto": config.auto_max}
        workload = Workload(k=own[config.k] if isinstance(config.k, str) else config.k)
    return {
        "backbone": name,
        "parameters": count_parameters(config, encoder, decoder),
        "flops": count_flops(config, encoder, decoder, workload),
    }


# Parameters


def count_parameters(
    config: SedemConfig, encoder: PretrainedConfig, decoder: PretrainedConfig
) -> dict[str, Any]:
    """The parameters that SeDeM adds, counted on the modules that a model has."""
    with torch.device("meta"):
        widths = encoder.hidden_size, decoder.hidden_size
        counts = {
            "compressor": size_of(build_compressor(config, *widths)),
            "decompressor": size_of(build_decompressor(config, decoder.hidden_size)),
            "selector": size_of(build_selector(config, *widths)),
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
        size = size_of(backbone)
        if not lora_rank:
            return size, 0
        backbone.add_adapter(LoraConfig(r=lora_rank, target_modules=list(lora_targets)))
        return size, sum(p.numel() for n, p in backbone.named_parameters() if "lora_" in n)


def size_of(module: nn.Module) -> int:
    """The parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


# FLOPs


def count_flops(
    config: SedemConfig,
    encoder: PretrainedConfig,
    decoder: PretrainedConfig,
    workload: Workload,
) -> dict[str, Any]:
    """The FLOPs of one query, online: read the context, select, restore, answer."""
    T, widths = config.segment_length, (encoder.hidden_size, decoder.hidden_size)
    segments = -(-workload.context // T)
    with torch.device("meta"):
        compressor = build_compressor(config, *widths)
        decompressor = build_decompressor(config, widths[1])
        selector = build_selector(config, *widths)
        own = Queries(selector, READ_ONCE_RANK)
        hidden_STE = torch.empty(segments, T, widths[0])
        every_ST = torch.ones(segments, T, dtype=torch.bool)
        question_QE = torch.empty(workload.question, widths[0])
        slots_JD = torch.empty(segments * config.slots, widths[1])
        chosen_JD = torch.empty(workload.k * config.slots, widths[1])
    states = len(chosen_JD) * decompressor.states_per_slot
    prefix, lower = workload.question + 1, config.inject_layer
    upper, head = decoder.num_hidden_layers - lower, head_flops(decoder)

    def run(tokens: int, before: int) -> int:
        """The prefix or a later token; the memory is before the injection layer in none of it."""
        memory = (states, 0) if before == 0 else (0, states)
        below = lower * layer_flops(decoder, tokens, before)
        return below + upper * layer_flops(decoder, tokens + memory[0], before + memory[1]) + head

    def asked() -> Tensor:
        if config.read_once:
            return own.queries(selector, question_QE)
        return selector.queries(question_QE)

    stages = {
        "read": config.extract_layer * segments * layer_flops(encoder, T + 1)
        + counted(lambda: compressor(hidden_STE, every_ST)),
        # The decoder reads the question anyway.
        "select": (0 if config.read_once else config.extract_layer * layer_flops(encoder, prefix))
        + counted(lambda: torch.einsum("qrh,jrh->rqj", asked(), selector.keys(slots_JD))),
        "restore": counted(lambda: decompressor(chosen_JD)),
        "prefill": run(prefix, 0),
        "decode": sum(run(1, prefix + i) for i in range(workload.answer - 1)),
    }
    return {
        **stages,
        "total": sum(stages.values()),
        "full_context_total": answer_flops(decoder, workload.context + prefix, 0, workload.answer),
        "assumptions": {
            **workload.assumptions(),
            "k": workload.k,
            "extract_layer": config.extract_layer,
            "inject_layer": config.inject_layer,
        },
    }


def answer_flops(shape: PretrainedConfig, prefix: int, before: int, answer: int) -> int:
    """The FLOPs of an answer through every layer.

    The prefix gives the first answer token, and the last token is not read. The head runs once for
    each answer token. `before` tokens are cached before the prefix.
    """
    run = layer_flops(shape, prefix + answer - 1, before)
    return shape.num_hidden_layers * run + answer * head_flops(shape)


def layer_flops(shape: PretrainedConfig, tokens: int, before: int = 0) -> int:
    """The FLOPs of one decoder layer over new tokens, after cached ones."""
    return _sum(_one_token(shape)[0], tokens, before)


def backward_flops(shape: PretrainedConfig, tokens: int) -> int:
    """The FLOPs of the gradient through one frozen layer."""
    return _sum(_one_token(shape)[1], tokens, 0)


def head_flops(shape: PretrainedConfig) -> int:
    """The FLOPs of the logits of one token."""
    with torch.device("meta"):
        head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        return counted(lambda: head(torch.empty(1, shape.hidden_size)))


def counted(run: Callable[[], object]) -> int:
    """The FLOPs that torch counts in a call."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _sum(one_token: tuple[int, int], tokens: int, before: int) -> int:
    """The sum over tokens: token i attends to `before` + i others and to itself."""
    first, key = one_token
    return tokens * first + key * (tokens * before + tokens * (tokens - 1) // 2)


def _one_token(shape: PretrainedConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Forward and backward: the FLOPs of a first token in a layer, and of each key before it."""
    return _one_token_of(shape.model_type, json.dumps(shape.to_dict(), default=str))


@lru_cache(16)
def _one_token_of(layout: str, entries: str) -> tuple[tuple[int, int], tuple[int, int]]:
    shape = AutoConfig.for_model(**{**json.loads(entries), "model_type": layout})
    single = deepcopy(shape)
    single.num_hidden_layers, single.vocab_size = 1, 8
    if getattr(single, "layer_types", None):
        single.layer_types = single.layer_types[:1]
    found = []
    with torch.device("meta"):
        decoder = empty_model(single, attn_implementation="eager").requires_grad_(False)
        decoder = decoder.get_decoder()
        hidden = torch.empty(1, 1, shape.hidden_size, requires_grad=True)
        rope = decoder.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
        cache = DynamicCache()
        for _ in range(2):
            with FlopCounterMode(display=False) as forward:
                after = decoder.layers[0](
                    hidden, position_embeddings=rope, past_key_values=cache, use_cache=True
                )
            found.append((forward.get_total_flops(), counted(after.sum().backward)))
            (kept,) = cache.layers
            kept.keys, kept.values = kept.keys.detach(), kept.values.detach()
    (first, back), (second, further) = found
    return (first, second - first), (back, further - back)


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
        preset, encoder, decoder = PRESETS[name.lower()]
        return preset(), shape_file(encoder), shape_file(decoder)
    folder = Path(name)
    if (folder / "sedem.safetensors").is_file():
        return _checkpoint_shapes(folder)
    shape = _auto_config(name)
    # The proportions of the paper's 3B setting: layers 14 and 10 of 28.
    depth = shape.num_hidden_layers
    config = SedemConfig(
        encoder=name,
        extract_layers=(max(1, depth // 2),),
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

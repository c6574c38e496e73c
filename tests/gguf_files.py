"""GGUF files of tiny backbones, as llama.cpp's own conversion writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from sedem.backbone.gguf import SETTINGS

Array = NDArray[np.float32]
MERGED = "th"
"""The only merge of the tokenizer; transformers reads no file without any."""


def write_gguf(
    backbone: str,
    file: Path,
    architecture: str = "llama",
    *,
    quantized: str = "",
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
) -> Path:
    """Write a backbone's folder as a GGUF file.

    Args:
        quantized: the type of matrices, such as Q8_0; float32 without one.
        changes: settings to add or replace, by their whole keys; None leaves one out.
        tensors: tensors to add.
    """
    model = AutoModelForCausalLM.from_pretrained(backbone)
    settings = {**_settings(model.config, architecture, backbone), **(changes or {})}
    writer = gguf.GGUFWriter(file, settings.pop("general.architecture", architecture))
    for key, value in settings.items():
        if value is not None:
            _add(writer, key, value)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture),
        model.config.num_hidden_layers,
    )
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for own, values in _as_written(name, weight.float().numpy(), model.config, architecture):
            stem, _, kind = own.rpartition(".")
            found = names.get_name(stem) or names.get_name(own)
            assert found, own
            target = f"{found}.{kind if kind in ('weight', 'bias') else 'weight'}"
            if quantized and values.ndim > 1:
                bits = gguf.GGMLQuantizationType[quantized]
                writer.add_tensor(target, gguf.quants.quantize(values, bits), raw_dtype=bits)
            else:
                writer.add_tensor(target, np.ascontiguousarray(values))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _settings(config: Any, architecture: str, backbone: str) -> dict[str, Any]:
    rope = config.rope_parameters
    theta = rope.get("full_attention", rope)["rope_theta"]
    found = {f"{architecture}.{key}": getattr(config, name, None) for key, name in SETTINGS.items()}
    found[f"{architecture}.rope.freq_base"] = theta
    if architecture != "llama":
        found.pop(f"{architecture}.rope.dimension_count")
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__), MERGED]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config.vocab_size)]
    special = set(tokenizer.all_special_ids)
    return {
        **found,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(MERGED)],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _as_written(
    name: str, values: Array, config: Any, architecture: str
) -> list[tuple[str, Array]]:
    """A weight under the names and in the order of the format."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if architecture == "gemma3" and "norm" in name:
        values = values + 1
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj", gate), (f"{stem}up_proj", up)]
    return [(name, values)]

"""The size of a memory, compared with the keys and values of its tokens and with their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from sedem_lab.evaluation.metrics import summarize
from sedem_lab.evaluation.records import Record, values

BFLOAT16 = 2


def kv_bytes_per_token(shape: PretrainedConfig) -> int:
    """Bytes of one token's keys and values in every layer, in bfloat16."""
    width = shape.num_key_value_heads * head_width(shape)
    return int(2 * BFLOAT16 * shape.num_hidden_layers * width)


def head_width(shape: PretrainedConfig) -> int:
    """Width of one head of attention."""
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def state_bytes_per_token(shape: PretrainedConfig) -> int:
    """Bytes of one token's state after one layer, in bfloat16."""
    return int(BFLOAT16 * shape.hidden_size)


def compression(records: Sequence[Record], shape: PretrainedConfig) -> dict[str, Any]:
    """How many times smaller a memory is than cached keys and values, and than states.

    Returns:
        Both factors with their intervals, and the bytes per token that the memory is compared with.
        Empty if the method does not report what it stores.
    """
    reported = [values(record).get("bytes_per_token") for record in records]
    sizes = [size for size in reported if size]
    if not sizes:
        return {}
    cache, states = kv_bytes_per_token(shape), state_bytes_per_token(shape)
    return {
        "times_smaller_than_kv_cache": summarize([cache / size for size in sizes]),
        "times_smaller_than_states": summarize([states / size for size in sizes]),
        "backbone_bytes_per_token": {"kv_cache": cache, "states": states},
    }

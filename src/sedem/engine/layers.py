"""Llama-style decoder layers for inference: fused matrices, few operations, no modules.

The arithmetic equals that of Hugging Face's layers, operation by operation. In float32 on a CPU,
the states of a batch without padding are bitwise equal.

Letters: B batch, P positions of one call, K keys, D width, F query heads, G query heads per key
head, H head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sedem.backbone.masks import KeyAxis

Bias = Tensor | None
"""Added to attention logits `[B, 1, P, K]`; None means plain causal attention."""

StoreKeyValue = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores a layer's new keys and values `[B, heads, P, H]` in a cache and returns those to attend
to; the first argument is the layer's index in its range."""

MATRICES = ("qkv", "out", "gate_up", "down")
"""Names of a layer's matrices."""


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer.

    Attributes:
        qkv: query, key and value projections, concatenated by rows.
        qkv_bias: their biases, or None.
        out_bias: its bias, or None.
        gate_up: gate and up projections, concatenated by rows.
        gate_up_bias: their biases, or None.
        down_bias: its bias, or None.
        attention_norm: scale of the norm before attention `[D]`.
        mlp_norm: scale of the norm before the MLP `[D]`.
        head_norm: scales of the norms of query and key heads `[heads + key_heads, H]`, or None.
        key_heads: number of key and of value heads.
        window: number of positions that attention sees, its own included; None means all.
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norm: Tensor | None
    heads: int
    key_heads: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    window: int | None

    @property
    def head_width(self) -> int:
        """H."""
        return self.qkv.shape[0] // (self.heads + 2 * self.key_heads)

    def linear(self, name: str, states: Tensor) -> Tensor:
        """Multiply states with one of `MATRICES` and add its bias."""
        return F.linear(states, getattr(self, name), getattr(self, f"{name}_bias"))

    def project(
        self, hidden_BPD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries `[B, F, P, H]`, rotated keys and values `[B, heads, P, H]`."""
        normed = F.rms_norm(hidden_BPD, self.attention_norm.shape, self.attention_norm, self.eps)
        heads = self.linear("qkv", normed).unflatten(-1, (-1, self.head_width))
        rotated, value = heads.split([self.heads + self.key_heads, self.key_heads], dim=2)
        if self.head_norm is not None:
            rotated = F.rms_norm(rotated, rotated.shape[-1:], None, self.eps) * self.head_norm
        rotated = rotate(rotated, rope)
        query, key = rotated.split([self.heads, self.key_heads], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, hidden_BPD: Tensor, mixed_BPD: Tensor) -> Tensor:
        """Return the states after this layer, from those before it and its heads' outputs."""
        hidden_BPD = hidden_BPD + self.linear("out", mixed_BPD)
        normed = F.rms_norm(hidden_BPD, self.mlp_norm.shape, self.mlp_norm, self.eps)
        gate, up = self.linear("gate_up", normed).chunk(2, dim=-1)
        return hidden_BPD + self.linear("down", self.activation(gate) * up)

    def finish_and_project(
        self,
        following: FusedLayer,
        hidden_BPD: Tensor,
        mixed_BPD: Tensor,
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run everything between the attention of this layer and that of the following one.

        Returns:
            The states after this layer, and `project` of the following one.
        """
        hidden_BPD = self.finish(hidden_BPD, mixed_BPD)
        return hidden_BPD, *following.project(hidden_BPD, rope)


def in_reading_order(
    hidden_BPD: Tensor, positions_BP: Tensor, valid_BP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Order columns by position, with padding last, where causal attention hides it.

    Args:
        positions_BP: their positions; those of each row's valid columns are 0, 1, 2, ..., in any
            order.
        valid_BP: False where a column is padding.

    Returns:
        States `[B, P, D]`, positions `[1, P]`, and which columns are valid `[B, P]`.
    """
    count_B1 = valid_BP.sum(1, keepdim=True)
    after_BP = count_B1 + (~valid_BP).cumsum(1) - 1
    place_BP = torch.where(valid_BP, positions_BP, after_BP)
    index = place_BP[..., None].expand(hidden_BPD.shape)
    ordered_BPD = torch.empty_like(hidden_BPD).scatter_(1, index, hidden_BPD)
    columns_1P = torch.arange(hidden_BPD.shape[1], device=hidden_BPD.device)[None]
    return ordered_BPD, columns_1P, columns_1P < count_B1


def rotate(heads_BPFH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to queries and keys at once; `rope` comes from `signed_rope`."""
    cosine, sine = rope
    half = heads_BPFH.shape[-1] // 2
    return (heads_BPFH * cosine).add_(heads_BPFH.roll(half, -1).mul_(sine))


def signed_rope(cosine_BPH: Tensor, sine_BPH: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors for `rotate`: the sine carries the sign of the half that rolls over."""
    first, second = sine_BPH.chunk(2, dim=-1)
    return cosine_BPH[:, :, None], torch.cat([-first, second], dim=-1)[:, :, None]


def attend(query_BFPH: Tensor, key: Tensor, value: Tensor, bias: Bias) -> Tensor:
    """Grouped-query attention `[B, P, F * H]`.

    A single position copies neither keys nor values: the query heads of a key head become its rows.
    Several positions with a bias repeat them, since fused kernels support no bias with groups. GPU
    kernels also do not support groups in float32.
    """
    rows, heads, count, width = query_BFPH.shape
    groups = heads // key.shape[1]
    if bias is None:
        if groups > 1 and query_BFPH.is_cuda and query_BFPH.dtype == torch.float32:
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(
            query_BFPH, key, value, is_causal=True, enable_gqa=key.shape[1] < heads
        )
    elif count == 1:
        grouped = query_BFPH.reshape(rows, -1, groups, width)
        mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=bias)
        return mixed.reshape(rows, 1, heads * width)
    else:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query_BFPH, key, value, attn_mask=bias)
    return mixed.transpose(1, 2).reshape(rows, count, heads * width)


def run_layers(
    layers: Sequence[FusedLayer],
    hidden_BPD: Tensor,
    rope: tuple[Tensor, Tensor],
    biases: Mapping[int | None, Bias],
    store: StoreKeyValue | None = None,
    last: Tensor | None = None,
) -> Tensor:
    """Run a range of layers.

    Args:
        rope: from `signed_rope`.
        biases: by window, from `biases_of`.
        store: stores keys and values in a cache; None attends only to those of this call.
        last: index of the only position of each row to compute in the last layer `[B]`; None
            means all.

    Returns:
        States after the range `[B, P or 1, D]`.
    """
    if not layers:
        return hidden_BPD
    query, key, value = layers[0].project(hidden_BPD, rope)
    for index, layer in enumerate(layers):
        bias = biases[layer.window]
        if store is not None:
            key, value = store(index, key, value)
        is_last = index == len(layers) - 1
        alone = last if is_last else None
        if alone is not None:
            hidden_BPD = torch.take_along_dim(hidden_BPD, alone[:, None, None], 1)
        if alone is not None and bias is not None:
            query, bias = (
                torch.take_along_dim(t, alone[:, None, None, None], 2) for t in (query, bias)
            )
        mixed = attend(query, key, value, bias)
        if alone is not None and bias is None:
            # Without a mask, all positions attend: causal attention counts from the first.
            mixed = torch.take_along_dim(mixed, alone[:, None, None], 1)
        if is_last:
            return layer.finish(hidden_BPD, mixed)
        hidden_BPD, query, key, value = layer.finish_and_project(
            layers[index + 1], hidden_BPD, mixed, rope
        )
    return hidden_BPD


def biases_of(
    layers: Sequence[FusedLayer],
    keys: KeyAxis,
    positions_BP: Tensor,
    valid_BP: Tensor,
    dtype: torch.dtype,
    block_BP: Tensor | None = None,
) -> dict[int | None, Bias]:
    """Return one bias for each window size among the layers.

    Args:
        valid_BP: False where a position is padding.
        block_BP: block of each position of this call, -1 for text; None if all are text.

    Returns:
        Biases by window; None where causal attention over this call's columns is enough, because
        `keys` is plain and spans no more than the window.
    """
    biases: dict[int | None, Bias] = {}
    for window in {layer.window for layer in layers}:
        if keys.plain and (window is None or keys.span <= window):
            biases[window] = None
            continue
        visible_BPK = keys.visible_to(positions_BP, valid_BP, window, block_BP)
        biases[window] = keys.added_to(visible_BPK, dtype, block_BP=block_BP)[:, None]
    return biases

"""Two-depth decoding: the question below the injection layer, memory and question above it.

Section 3.3, "For answer generation ..." and after. Memory comes before the question: [start;
restored; question; answer]. All layers share one stream of positions. The lower layers never see
the memory's positions; rotary positions are relative, so the gap hardly matters to them.

In the paper, every restored state attends to all states before it. Blocks can also be separate
(`SedemConfig.block_context`), and block scores can bias the attention of question and answer
(`guidance`). One mask does all of this here; `independent` is faster for independent blocks.

Letters: B batch, P positions of one call, U restored states, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.config import BlockContext

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass
class Stream:
    """State of one decoding; the layers of its cache differ in length.

    Attributes:
        cache: keys and values. Layers up to the injection layer hold question and answer; those
            above it hold the restored states too.
        lower: columns of the layers up to the injection layer.
        upper: columns of the layers above it.
        next_position: position of the next token of each row `[B]`.
    """

    cache: DynamicCache
    lower: KeyAxis
    upper: KeyAxis
    next_position: Tensor

    def row(self, index: int) -> Stream:
        """Return a copy of one row, which continues on its own."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for number, layer in enumerate(self.cache.layers):
            cache.update(layer.keys[index : index + 1], layer.values[index : index + 1], number)
        axes = self.lower.row(index), self.upper.row(index)
        return Stream(cache, *axes, self.next_position[index : index + 1])


@dataclass(frozen=True)
class Prefilled:
    """Result of a prefill.

    Attributes:
        prefix: states of the prefix after the last layer `[B, P, D]`.
        restored: states at the restored positions after the last layer `[B, U, D]`.
        stream: state to continue decoding from; None without a cache.
    """

    prefix: Tensor
    restored: Tensor
    stream: Stream | None


@dataclass(frozen=True)
class Blocks:
    """How the restored states of each row are divided into blocks.

    Attributes:
        number: block of each state `[B, U]`, from 0.
        context: what a state attends to, and its position; see `SedemConfig.block_context`.
        bias: added to the attention logits of question and answer on each state `[B, U]`; None adds
            nothing.
    """

    number: Tensor
    context: BlockContext = "joint"
    bias: Tensor | None = None


def positions(
    valid_BP: Tensor,
    restored_valid_BU: Tensor,
    apart_BU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions of prefix and restored states in the shared stream; padding takes none.

    The start token is at 0, memory from 1 on, and the question after it.

    Args:
        valid_BP: False where a prefix token is padding; the first valid one is the start token.
        restored_valid_BU: False where a restored state is padding.
        apart_BU: block of each state, if the positions of all blocks start at the same value;
            prefix positions then follow the longest block.

    Returns:
        Prefix positions `[B, P]` and restored positions `[B, U]`; 0 at padding.
    """
    prefix_BP = valid_BP.long().cumsum(1) - 1
    restored_BU = restored_valid_BU.long().cumsum(1) - 1
    if apart_BU is not None and restored_BU.shape[1]:
        # Counted from the first valid state of its own block.
        never = restored_BU.shape[1]
        first_BN = torch.full_like(restored_BU, never).scatter_reduce(
            1, apart_BU, restored_BU.masked_fill(~restored_valid_BU, never), "amin"
        )
        restored_BU = restored_BU - first_BN.gather(1, apart_BU)
    ends_BU = (restored_BU + 1) * restored_valid_BU
    count_B1 = ends_BU.amax(1, keepdim=True) if ends_BU.shape[1] else 0
    prefix_BP = prefix_BP + count_B1 * (prefix_BP > 0)
    return prefix_BP * valid_BP, (restored_BU + 1) * restored_valid_BU


def prefill(
    backbone: Backbone,
    inject_layer: int,
    ids_BP: Tensor,
    valid_BP: Tensor,
    restored_BUD: Tensor,
    restored_valid_BU: Tensor,
    *,
    blocks: Blocks | None = None,
    cache: DynamicCache | None = None,
    padded: bool | None = None,
) -> Prefilled:
    """Run a prefix through all layers and inject the restored states at the injection layer.

    Rows may differ in the number of restored states and in prefix length. Prefixes are padded on
    the left, restored states anywhere.

    Args:
        inject_layer: l_inject, the number of layers that see only the prefix.
        ids_BP: start token, question and, in training, answer.
        valid_BP: False where a token is padding.
        restored_BUD: H-hat, in the order in which the decoder sees the states.
        restored_valid_BU: False where a restored state is padding.
        blocks: how the states are divided into blocks; None is the paper's form.
        cache: an empty cache for later calls of `step`; None if there are none.
        padded: whether any token or state is padding. None looks, which waits for the device.
    """
    blocks = blocks or Blocks(torch.zeros_like(restored_valid_BU, dtype=torch.long))
    together = blocks.context == "joint"
    apart_BU = blocks.number if blocks.context == "independent" else None
    prefix_BP, memory_BU = positions(valid_BP, restored_valid_BU, apart_BU)
    if padded is None:
        padded = not (bool(valid_BP.all()) and bool(restored_valid_BU.all()))
    span = ids_BP.shape[1] + restored_BUD.shape[1]
    lower = KeyAxis(prefix_BP, valid_BP, padded, span)
    hidden_BPD = backbone.run(
        backbone.embed(ids_BP), 0, inject_layer, prefix_BP, valid_BP, lower, cache
    )
    # With a mask, positions decide what sees what; columns may be in any order, and memory goes
    # first. Without one, columns must be in reading order.
    unmasked = not padded and together and blocks.bias is None
    head = 1 if unmasked else 0

    def join(prefix: Tensor, memory: Tensor) -> Tensor:
        return torch.cat([prefix[:, :head], memory, prefix[:, head:]], dim=1)

    text_BP = torch.full_like(prefix_BP, -1)
    number_BL = join(text_BP, blocks.number)
    bias_BL = None
    if blocks.bias is not None:
        bias_BL = join(torch.zeros_like(prefix_BP).to(blocks.bias), blocks.bias)
    upper = KeyAxis(
        join(prefix_BP, memory_BU),
        join(valid_BP, restored_valid_BU),
        padded,
        span,
        None if together else number_BL,
        bias_BL,
    )
    joined_BLD = backbone.run(
        join(hidden_BPD, restored_BUD.to(hidden_BPD.dtype)),
        inject_layer,
        backbone.depth,
        upper.positions,
        upper.valid,
        upper,
        cache,
        number_BL,
    )
    count = restored_BUD.shape[1]
    first_BD, restored_BUD, rest_BD = joined_BLD.split(
        [head, count, joined_BLD.shape[1] - head - count], dim=1
    )
    next_B = torch.cat([prefix_BP, memory_BU], dim=1).amax(1) + 1
    stream = None if cache is None else Stream(cache, lower, upper, next_B)
    return Prefilled(torch.cat([first_BD, rest_BD], dim=1), restored_BUD, stream)


def step(backbone: Backbone, inject_layer: int, ids_B: Tensor, stream: Stream) -> Tensor:
    """Run one more token of each row through all layers.

    Args:
        stream: state of the rows; advanced by one position.

    Returns:
        States after the last layer `[B, D]`.
    """
    position_B1 = stream.next_position[:, None]
    valid_B1 = torch.ones_like(position_B1, dtype=torch.bool)
    stream.lower = stream.lower.extended(position_B1, valid_B1)
    stream.upper = stream.upper.extended(position_B1, valid_B1)
    stream.next_position = stream.next_position + 1
    hidden_B1D = backbone.embed(ids_B[:, None])
    hidden_B1D = backbone.run(
        hidden_B1D, 0, inject_layer, position_B1, valid_B1, stream.lower, stream.cache
    )
    hidden_B1D = backbone.run(
        hidden_B1D,
        inject_layer,
        backbone.depth,
        position_B1,
        valid_B1,
        stream.upper,
        stream.cache,
    )
    return hidden_B1D[:, 0]

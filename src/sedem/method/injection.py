"""From selected slots to an answer's states (section 3.3), with variants.

D_psi restores slots to states of the decoder. Then two depths: the question below the injection
layer, memory and question above it ("For answer generation ..." and after). Memory comes before the
question: [start; restored; question; answer]. All layers share one stream of positions. The lower
layers never see the memory's positions; rotary positions are relative, so the gap hardly matters to
them.

In the paper, every restored state attends to all states before it. Blocks can also be separate
(`SedemConfig.block_context`), and block scores can bias the attention of question and answer
(`guidance`). One mask in `prefill` does all of this; `keys_values` is faster for independent
blocks.

Every engine runs `prefill` and `step`. Engines differ in what runs the layers, and in the cache:
here it grows, in `engine.batch` it has a fixed size.

Letters: B batch, P prefix positions, J slots, C states per slot, U restored states, L columns of
both or tokens of a branch, K columns of a cache, N blocks, S branches, G key heads, H head width, Q
positions whose states are needed, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.backbone.decoder import KeyAxis, KeyValues
from sedem.config import BlockContext, SedemConfig
from sedem.method.compressor import LayerRunner

# D_psi, from slots to states


class Decompressor(nn.Module):
    """A shared two-layer MLP from each slot to C decoder states (section 3.3, equation 8).

    The output of the last layer is multiplied by a fixed vector, the spread of the decoder's own
    states at the injection layer. This is W_2 and b_2 of the paper in other units. The function
    class is the same, but optimizer steps match the size of the states, whose norms are hundreds.

    Args:
        hidden: width of the hidden layer; the paper's parameter count implies D.
    """

    spread: Tensor

    def __init__(self, d_dec: int, compression: int, hidden: int) -> None:
        super().__init__()
        self.states_per_slot = compression
        self.norm = nn.LayerNorm(d_dec)
        self.w_1 = nn.Linear(d_dec, hidden)
        self.w_2 = nn.Linear(hidden, compression * d_dec)
        self.register_buffer("spread", torch.ones(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """H-hat, the restored states `[..., J * C, D]` of slots `[..., J, D]`."""
        activation = F.gelu(self.w_1(self.norm(memory_JD)))
        states_JCD = self.w_2(activation).unflatten(-1, (self.states_per_slot, -1)) * self.spread
        return states_JCD.flatten(-3, -2)

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set spread and bias so that outputs start at the mean and scale of decoder states.

        Args:
            states_PD: a sample of decoder states at the injection layer.
        """
        self.spread.copy_(_spread(states_PD))
        centre_D = states_PD.float().mean(0) / self.spread
        self.w_2.bias.copy_(centre_D.repeat(self.states_per_slot))


class IdentityDecompressor(nn.Module):
    """The identity: each slot is used as one decoder state, so C is 1. Ours.

    With a compressor that starts as the identity too, it needs no training: states read after a
    layer are injected after the same layer.
    """

    spread: Tensor
    states_per_slot = 1

    def __init__(self, d_dec: int) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """H-hat, the slots `[..., J, D]` themselves."""
        return memory_JD

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set the spread, the unit of the regression loss; states do not change.

        Args:
            states_PD: a sample of decoder states at the injection layer.
        """
        self.spread.copy_(_spread(states_PD))


class SoftTokenDecompressor(nn.Module):
    """No decompression: each slot is one soft token at the decoder's input (section 7.1).

    The compressor maps into the decoder's embedding space. Two fixed vectors give each slot the
    mean and scale of the decoder's own embeddings, because states of a middle layer are hundreds of
    times larger.
    """

    spread: Tensor
    centre: Tensor
    states_per_slot = 1

    def __init__(self, d_dec: int) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(d_dec))
        self.register_buffer("centre", torch.zeros(d_dec))

    def forward(self, memory_JD: Tensor) -> Tensor:
        """Soft tokens `[..., J, D]` of slots `[..., J, D]`."""
        return F.layer_norm(memory_JD, memory_JD.shape[-1:]) * self.spread + self.centre

    @torch.no_grad()
    def calibrate(self, states_PD: Tensor) -> None:
        """Set the two vectors to the mean and scale of embeddings."""
        states_PD = states_PD.float()
        self.spread.copy_(states_PD.std(0))
        self.centre.copy_(states_PD.mean(0))


def build_decompressor(
    config: SedemConfig, d_dec: int
) -> Decompressor | IdentityDecompressor | SoftTokenDecompressor:
    """Build the decompressor that a configuration describes."""
    if config.decompressor == "none":
        return SoftTokenDecompressor(d_dec)
    if config.decompressor == "identity":
        return IdentityDecompressor(d_dec)
    return Decompressor(d_dec, config.compression, config.decompressor_hidden or d_dec)


def _spread(states_PD: Tensor) -> Tensor:
    return states_PD.float().std(0).clamp_min(1e-6)


# Two depths


class LayerColumns(KeyValues, Protocol):
    """Keys and values of the layers below the injection layer, or of those above it."""

    @property
    def axis(self) -> KeyAxis:
        """The columns that a later call sees."""
        ...

    def begin(self, axis: KeyAxis) -> None:
        """Make these the first columns; the layers then store theirs."""
        ...

    def extend(self, positions_B1: Tensor) -> KeyAxis:
        """Give each row one more column of text; return all columns."""
        ...

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer `[B, G, K, H]`."""
        ...


class Cache(Protocol):
    """What later steps of one decoding need; the layers below and above injection have their own.

    Attributes:
        next_position: position of the next token of each row `[B]`.
    """

    next_position: Tensor

    @property
    def lower(self) -> LayerColumns:
        """The layers up to the injection layer: question and answer."""
        ...

    @property
    def upper(self) -> LayerColumns:
        """The layers above it: the restored states too."""
        ...

    def begin(self, next_B: Tensor) -> None:
        """Set the position of the first token after the prefill."""
        ...

    def advance(self) -> None:
        """Go on to the next token."""
        ...


class GrowingColumns:
    """Keys and values in tensors that grow with every call."""

    axis: KeyAxis

    def __init__(self) -> None:
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, axis: KeyAxis) -> None:
        """Make these the first columns."""
        self.axis = axis

    def extend(self, positions_B1: Tensor) -> KeyAxis:
        """Give each row one more column of text; return all columns."""
        self.axis = self.axis.extended(positions_B1, torch.ones_like(positions_B1).bool())
        return self.axis

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values; return all of them."""
        if layer in self.stored:
            before = self.stored[layer]
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        self.stored[layer] = key, value
        return key, value

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer."""
        return self.stored[layer]


class GrowingCache:
    """A cache for one batch of any size, empty until a prefill; see `Cache`."""

    next_position: Tensor

    def __init__(self) -> None:
        self.lower, self.upper = GrowingColumns(), GrowingColumns()

    def begin(self, next_B: Tensor) -> None:
        """Set the position of the first token after the prefill."""
        self.next_position = next_B

    def advance(self) -> None:
        """Go on to the next token."""
        self.next_position = self.next_position + 1

    def begin_everywhere(self, axis: KeyAxis, next_B: Tensor) -> None:
        """Begin with the same columns in all layers, as without an injection layer."""
        self.lower.begin(axis)
        self.upper.begin(axis)
        self.begin(next_B)


@dataclass(frozen=True)
class Prefilled:
    """Result of a prefill.

    Attributes:
        prefix: states of the prefix after the last layer `[B, P, D]`.
        restored: states at the restored positions after the last layer `[B, U, D]`.
    """

    prefix: Tensor
    restored: Tensor


@dataclass(frozen=True)
class RestoredBlocks:
    """How the restored states of each row are divided into blocks.

    Attributes:
        number: block of each state `[B, U]`, from 0.
        context: what a state attends to, and its position; see `SedemConfig.block_context`.
        bias: added to the attention logits of question and answer on each state `[B, U]`; None adds
            nothing.
        room: number of states for which the positions of independent blocks leave room, if there is
            any; None means those of the longest block.
    """

    number: Tensor
    context: BlockContext = "joint"
    bias: Tensor | None = None
    room: int | None = None


def positions(
    valid_BP: Tensor, restored_valid_BU: Tensor, blocks: RestoredBlocks | None = None
) -> tuple[Tensor, Tensor]:
    """Positions of prefix and restored states in the shared stream; padding takes none.

    The start token is at 0, memory from 1 on, and the question after it. Independent blocks all
    start at 1, and the question follows the longest one.

    Args:
        valid_BP: False where a prefix token is padding; the first valid one is the start token.
        restored_valid_BU: False where a restored state is padding.

    Returns:
        Prefix positions `[B, P]` and restored positions `[B, U]`; 0 at padding.
    """
    restored_BU = restored_valid_BU.long().cumsum(1) - 1
    if blocks is not None and blocks.context == "independent" and restored_BU.shape[1]:
        # Counted from the first valid state of its own block.
        never = restored_BU.shape[1]
        first_BN = torch.full_like(restored_BU, never).scatter_reduce(
            1, blocks.number, restored_BU.masked_fill(~restored_valid_BU, never), "amin"
        )
        restored_BU = restored_BU - first_BN.gather(1, blocks.number)
    restored_BU = (restored_BU + 1) * restored_valid_BU
    end_B1 = F.pad(restored_BU, (1, 0)).amax(1, keepdim=True)  # 0 without any state
    if blocks is not None and blocks.room is not None:
        end_B1 = blocks.room * (end_B1 > 0)
    return prefix_positions(valid_BP, end_B1), restored_BU


def prefix_positions(valid_BP: Tensor, end_B1: Tensor) -> Tensor:
    """Positions of a prefix `[B, P]`: the start token is at 0, the question after the memory.

    Args:
        valid_BP: False where a prefix token is padding, whose position is 0.
        end_B1: the last position of the memory.
    """
    prefix_BP = valid_BP.long().cumsum(1) - 1
    return (prefix_BP + end_B1 * (prefix_BP > 0)) * valid_BP


def prefill(
    decoder: LayerRunner,
    inject_layer: int,
    ids_BP: Tensor,
    valid_BP: Tensor,
    restored_BUD: Tensor | None,
    restored_valid_BU: Tensor,
    *,
    blocks: RestoredBlocks | None = None,
    cache: Cache | None = None,
    padded: bool | None = None,
    below_BPD: Tensor | None = None,
    last: bool = False,
) -> Prefilled:
    """Run a prefix through all layers and inject the restored states at the injection layer.

    Rows may differ in the number of restored states and in prefix length.

    Args:
        inject_layer: l_inject, the number of layers that see only the prefix.
        ids_BP: start token, question and, in training, answer; padded on either side.
        valid_BP: False where a token is padding.
        restored_BUD: H-hat, in the order in which the decoder sees the states; None if the cache
            has their keys and values, as with independent blocks.
        restored_valid_BU: False where a restored state is padding, which may be anywhere.
        blocks: how the states are divided into blocks; None is the paper's form.
        cache: an empty cache for later calls of `step`; None if there are none.
        padded: whether padding has to be masked. It need not be if it is on the right of the
            prefixes. None looks whether there is any, which waits for the device.
        below_BPD: states of the prefix at the injection layer, if the cache has the keys and values
            of the layers below it; None runs them.
        last: whether only the state of each row's last token is needed.

    Returns:
        States after the last layer; with `last`, `[B, 1, D]` of the prefix and no others.
    """
    blocks = blocks or RestoredBlocks(torch.zeros_like(restored_valid_BU, dtype=torch.long))
    prefix_BP, memory_BU = positions(valid_BP, restored_valid_BU, blocks)
    if padded is None:
        padded = not (bool(valid_BP.all()) and bool(restored_valid_BU.all()))
    span = ids_BP.shape[1] + max(restored_valid_BU.shape[1], blocks.room or 0)
    lower, upper = (None, None) if cache is None else (cache.lower, cache.upper)

    # Below injection, only the prefix.
    axis = KeyAxis(prefix_BP, valid_BP, padded, span)
    if lower is not None:
        lower.begin(axis)
    if below_BPD is None:
        embedded_BPD = decoder.embed(ids_BP)
        below_BPD = decoder.run(embedded_BPD, 0, inject_layer, prefix_BP, valid_BP, axis, lower)

    # Above injection, memory too. It has the first columns, since only positions decide what sees
    # what. `place_BL` is where the state of each column is among those that run.
    count, hidden_BLD = restored_valid_BU.shape[1], below_BPD
    columns_BL = torch.cat([memory_BU, prefix_BP], dim=1)
    valid_BL = torch.cat([restored_valid_BU, valid_BP], dim=1)
    place_BL = torch.arange(columns_BL.shape[1], device=ids_BP.device).expand_as(columns_BL)
    block_BL = bias_BL = None
    if blocks.bias is not None:
        bias_BL = torch.cat([blocks.bias, torch.zeros_like(prefix_BP).to(blocks.bias)], dim=1)
    if restored_BUD is not None:
        hidden_BLD = torch.cat([restored_BUD.to(below_BPD.dtype), below_BPD], dim=1)
        if padded or bias_BL is not None or blocks.context != "joint":
            block_BL = torch.cat([blocks.number, torch.full_like(prefix_BP, -1)], dim=1)
        else:
            # Causal attention needs no mask if columns are in the order of their positions.
            place_BL = columns_BL
            hidden_BLD, columns_BL, valid_BL = in_reading_order(hidden_BLD, columns_BL, valid_BL)
    apart_BL = None if blocks.context == "joint" else block_BL
    axis = KeyAxis(columns_BL.expand_as(valid_BL), valid_BL, padded, span, apart_BL, bias_BL)
    if upper is not None:
        upper.begin(axis)

    # Keys and values that the cache has are not run again.
    own = slice(count if restored_BUD is None else 0, None)
    place_BU, place_BP = (place_BL - own.start).split([count, ids_BP.shape[1]], dim=1)
    last_B1 = place_BP.gather(1, (prefix_BP + valid_BP).argmax(1, keepdim=True))
    given = hidden_BLD, inject_layer, decoder.depth, columns_BL[:, own], valid_BL[:, own]
    hidden_BLD = decoder.run(*given, axis, upper, block_BL, last_B1 if last else None)
    if cache is not None:
        cache.begin(torch.cat([prefix_BP, memory_BU], dim=1).amax(1) + 1)
    if last or restored_BUD is None:
        return Prefilled(hidden_BLD, hidden_BLD[:, :0])
    places = (place_BP[..., None], place_BU[..., None])
    return Prefilled(*(torch.take_along_dim(hidden_BLD, place, 1) for place in places))


def in_reading_order(
    hidden_BLD: Tensor, positions_BL: Tensor, valid_BL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Order columns by position, with padding last, where causal attention hides it.

    Args:
        positions_BL: their positions; those of each row's valid columns are 0, 1, 2, ..., in any
            order.
        valid_BL: False where a column is padding.

    Returns:
        States `[B, L, D]`, positions `[1, L]`, and which columns are valid `[B, L]`.
    """
    count_B1 = valid_BL.sum(1, keepdim=True)
    after_BL = count_B1 + (~valid_BL).cumsum(1) - 1
    place_BL = torch.where(valid_BL, positions_BL, after_BL)
    index = place_BL[..., None].expand(hidden_BLD.shape)
    ordered_BLD = torch.empty_like(hidden_BLD).scatter_(1, index, hidden_BLD)
    columns_1L = torch.arange(hidden_BLD.shape[1], device=hidden_BLD.device)[None]
    return ordered_BLD, columns_1L, columns_1L < count_B1


def step(decoder: LayerRunner, inject_layer: int, ids_B: Tensor, cache: Cache) -> Tensor:
    """Run one more token of each row through all layers.

    Args:
        cache: what earlier calls filled; advanced by one position.

    Returns:
        States after the last layer `[B, D]`.
    """
    position_B1 = cache.next_position[:, None]
    valid_B1 = torch.ones_like(position_B1, dtype=torch.bool)
    hidden_B1D = decoder.embed(ids_B[:, None])
    depths = (0, inject_layer), (inject_layer, decoder.depth)
    for depth, columns in zip(depths, (cache.lower, cache.upper), strict=True):
        axis = columns.extend(position_B1)
        hidden_B1D = decoder.run(hidden_B1D, *depth, position_B1, valid_B1, axis, columns)
    cache.advance()
    return hidden_B1D[:, 0]


# Passes that see nothing of each other: blocks, prefixes and branches of an answer. Ours.
#
# Independent blocks: a restored state sees only the start token and its own block, and the
# positions of every block start at 1. What the upper layers compute for a block then depends
# neither on the question nor on other blocks. It can be kept, and the order of blocks does not
# matter. `prefill` with these keys and values equals one with the states themselves and context
# "independent".
#
# Branches: several continuations of one answer, read in one pass. Each sees memory, question and
# the answer so far, and itself, as if it were decoded alone. Nothing is stored, so the answer can
# go on in another way.

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values `[N, G, U, H]` of each layer above the injection layer."""


def start_state(decoder: LayerRunner, inject_layer: int) -> Tensor:
    """State of the start token at the injection layer `[1, 1, D]`; it is constant."""
    ids_11 = torch.full((1, 1), decoder.bos_token_id, device=decoder.device)
    return decoder.run(decoder.embed(ids_11), 0, inject_layer, torch.zeros_like(ids_11))


def keys_values(
    decoder: LayerRunner, inject_layer: int, restored_NUD: Tensor, start_11D: Tensor | None = None
) -> KeysValues:
    """Keys and values of blocks in the layers above the injection layer.

    Args:
        restored_NUD: restored states, one block per row, padded on the right; attention is causal,
            so padding does not affect the states before it.
        start_11D: the `start_state`, if it is known.

    Returns:
        Keys, rotated to positions from 1, and values, without the start token's.
    """
    count, length = restored_NUD.shape[:2]
    if start_11D is None:
        start_11D = start_state(decoder, inject_layer)
    start_N1D = start_11D.expand(count, -1, -1)
    hidden_NLD = torch.cat([start_N1D, restored_NUD.to(start_11D.dtype)], dim=1)
    positions_NL = torch.arange(length + 1, device=hidden_NLD.device).expand(count, -1)
    cache, nothing_N0 = GrowingColumns(), positions_NL[:, :0]
    decoder.run(
        *(hidden_NLD, inject_layer, decoder.depth, positions_NL), cache=cache, only_BQ=nothing_N0
    )
    return [(key[:, :, 1:], value[:, :, 1:]) for key, value in cache.stored.values()]


def real_first(
    restored_NUD: Tensor, real_NU: Tensor, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Move the states of real tokens to the front of each block, and cut the common padding.

    Args:
        length: number of states to keep; None means those of the longest block.

    Returns:
        States `[N, U, D]` and the mask of the real ones.
    """
    length = int(real_NU.sum(1).max()) if length is None else length
    order_NU = real_NU.long().argsort(dim=1, descending=True, stable=True)[:, :length]
    rows_N1 = torch.arange(len(real_NU), device=real_NU.device)[:, None]
    return restored_NUD[rows_N1, order_NU], real_NU[rows_N1, order_NU]


def read_prefix(
    decoder: LayerRunner,
    inject_layer: int,
    ids_P: Tensor,
    room: int,
    cache: KeyValues | None = None,
) -> Tensor:
    """States of a prefix at the injection layer `[P, D]`, before its blocks are known.

    Args:
        room: number of states for which its positions leave room.
        cache: takes the keys and values of the layers below injection.
    """
    ids_1P = ids_P[None].to(decoder.device)
    valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
    positions_1P = prefix_positions(valid_1P, torch.full_like(ids_1P[:, :1], room))
    axis = KeyAxis(positions_1P, valid_1P, padded=False, span=len(ids_P) + room)
    embedded_1PD = decoder.embed(ids_1P)
    return decoder.run(embedded_1PD, 0, inject_layer, positions_1P, valid_1P, axis, cache)[0]


class Beside:
    """The columns of one row, and new ones after them that are not stored."""

    def __init__(self, columns: LayerColumns, row: int) -> None:
        self.columns, self.row = columns, slice(row, row + 1)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the row, followed by new ones."""
        keys, values = self.columns.of(layer)
        return torch.cat([keys[self.row], key], 2), torch.cat([values[self.row], value], 2)


def run_branches(
    decoder: LayerRunner, inject_layer: int, ids_SL: Tensor, cache: Cache, row: int
) -> Tensor:
    """Run the branches of one row through all layers.

    Args:
        ids_SL: tokens, padded on the right, where causal attention hides the padding.
        cache: holds what the row has seen; it does not change.

    Returns:
        States after the last layer `[S, L, D]`.
    """
    branches, length = ids_SL.shape
    ahead_L = torch.arange(length, device=ids_SL.device)
    position_1P = (cache.next_position[row] + ahead_L).repeat(branches)[None]
    # The number of each branch tells its columns from those of the others; see `KeyAxis.block`.
    branch_S = -2 - torch.arange(branches, device=ids_SL.device)
    branch_1P = branch_S.repeat_interleave(length)[None]
    valid_1P = torch.ones_like(position_1P, dtype=torch.bool)
    hidden_1PD = decoder.embed(ids_SL.reshape(1, -1))
    depths = (0, inject_layer), (inject_layer, decoder.depth)
    for depth, columns in zip(depths, (cache.lower, cache.upper), strict=True):
        axis = columns.axis.row(row).extended(position_1P, valid_1P, branch_1P)
        beside = Beside(columns, row)
        hidden_1PD = decoder.run(hidden_1PD, *depth, position_1P, valid_1P, axis, beside, branch_1P)
    return hidden_1PD[0].unflatten(0, ids_SL.shape)

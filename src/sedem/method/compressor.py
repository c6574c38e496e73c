"""From the tokens of a segment to its memory slots (section 3.1), with variants.

An encoder gives the hidden states at the extraction layer, with early exit. C_theta makes slots of
them.

Letters: S segments, T tokens, C tokens per slot, M = T / C slots, E encoder width, D decoder width,
X extraction layers, K blocks, J slots per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import KeyAxis, KeyValues
from sedem.config import SedemConfig

# H_s, hidden states at the extraction layer


class LayerRunner(Protocol):
    """Runs a range of layers: `Backbone`, or an engine's fused form of it."""

    @property
    def bos_token_id(self) -> int:
        """The token before every text."""
        ...

    @property
    def depth(self) -> int:
        """Number of layers."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        ...

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Return token embeddings `[B, P, E]`."""
        ...

    def run(
        self,
        hidden_BPD: Tensor,
        first: int,
        last: int,
        positions_BP: Tensor,
        valid_BP: Tensor | None = None,
        keys: KeyAxis | None = None,
        cache: KeyValues | None = None,
        block_BP: Tensor | None = None,
        only_BQ: Tensor | None = None,
    ) -> Tensor:
        """Run layers first + 1 to last on the states after `first` layers; see `Backbone.run`."""
        ...

    def without_lora(self) -> AbstractContextManager[None]:
        """Run without adapters."""
        ...


def states_at(backbone: LayerRunner, ids_BP: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Hidden states after each of the given layers; deeper layers are not run.

    Args:
        backbone: runs with its adapters, if it has any.
        ids_BP: token ids without the start token, padded on the right.

    Returns:
        States `[B, 1 + P, E]` by number of layers run; the start token's state is the first.
    """
    start_B1 = ids_BP.new_full((ids_BP.shape[0], 1), backbone.bos_token_id)
    positions = torch.arange(ids_BP.shape[1] + 1, device=ids_BP.device).expand(len(ids_BP), -1)
    hidden = backbone.embed(torch.cat([start_B1, ids_BP], dim=1))
    states: dict[int, Tensor] = {}
    done = 0
    for layer in sorted(set(layers)):
        hidden = states[layer] = backbone.run(hidden, done, layer, positions)
        done = layer
    return states


@torch.no_grad()
def encode(backbone: LayerRunner, ids_ST: Tensor, layers: Sequence[int]) -> Tensor:
    """H_s at l_extract, the encoder's frozen hidden states (section 3.1, equation 1).

    A start token is put in front and its state is dropped: the first token of any sequence becomes
    an attention sink, whose state is many times larger than the others. Padding on the right has no
    effect, because attention is causal. Section 3.2 encodes questions the same way.

    Args:
        backbone: the encoder; its adapters are off while it runs.
        ids_ST: token ids, one segment per row, padded on the right.
        layers: l_extract; more than one for a mixture.

    Returns:
        States `[X, S, T, E]`, in the order of `layers`.
    """
    with backbone.without_lora():
        states = states_at(backbone, ids_ST, layers)
    return torch.stack([states[layer][:, 1:] for layer in layers])


class LayerMixture(nn.Module):
    """Weighted sum of several extraction layers, with a learned softmax or uniform weights.

    Appendix Extraction and Injection Depth, paragraph "Mixing extraction layers".

    Args:
        learned: whether the weights are trained; uniform weights have no parameter.
    """

    def __init__(self, count: int, *, learned: bool) -> None:
        super().__init__()
        self.count = count
        self.logits = nn.Parameter(torch.zeros(count)) if learned and count > 1 else None

    def weights(self) -> Tensor:
        """Normalised weights `[X]`."""
        if self.logits is None:
            return torch.full((self.count,), 1.0 / self.count)
        return self.logits.softmax(0)

    def forward(self, states_XSTE: Tensor) -> Tensor:
        """Sum states `[X, S, T, E]` over layers to `[S, T, E]`."""
        if self.count == 1:
            return states_XSTE[0]
        weights_X = self.weights().to(states_XSTE)
        return torch.einsum("x,xste->ste", weights_X, states_XSTE)


# M_s, memory slots


def pool(states_STE: Tensor, mask_ST: Tensor, compression: int) -> Tensor:
    """Mean of each run of C states: h-bar (section 3.1, equation 2), and Pool_C of section 4.

    A slot with some padding is the mean of its real tokens; a slot of only padding is zero.

    Args:
        mask_ST: False where a token is padding.

    Returns:
        Pooled states `[S, M, E]`.
    """
    mask_SMC1 = mask_ST.unflatten(1, (-1, compression))[..., None]
    states_SMCE = states_STE.unflatten(1, (-1, compression))
    total_SME = (states_SMCE * mask_SMC1).sum(2)
    return total_SME / mask_SMC1.sum(2).clamp_min(1)


def slot_tokens(mask_ST: Tensor, compression: int) -> Tensor:
    """Real tokens of each slot `[S, M]`: C, fewer at the end of a short segment, 0 for padding."""
    return mask_ST.unflatten(1, (-1, compression)).sum(2)


def state_mask(slot_tokens_KJ: Tensor, compression: int) -> Tensor:
    """Return which restored states stand for real tokens.

    Args:
        slot_tokens_KJ: real tokens of each slot `[..., K, J]`.

    Returns:
        `[..., K, J * C]`, False where a state stands for padding.
    """
    rank_C = torch.arange(compression, device=slot_tokens_KJ.device)
    return (rank_C < slot_tokens_KJ[..., None]).flatten(-2)


class PoolingCompressor(nn.Module):
    """Mean pooling, then the shared projection W_in (section 3.1, equations 3 and 4).

    Args:
        mlp: a two-layer MLP in place of W_in: the larger compressor of section 7.1.
    """

    def __init__(self, d_enc: int, d_dec: int, compression: int, *, mlp: bool = False) -> None:
        super().__init__()
        self.compression = compression
        self.w_in: nn.Module
        if mlp:
            self.w_in = nn.Sequential(
                nn.LayerNorm(d_enc), nn.Linear(d_enc, d_dec), nn.GELU(), nn.Linear(d_dec, d_dec)
            )
            return
        self.w_in = nn.Linear(d_enc, d_dec, bias=False)
        # With equal widths, training starts with encoder states used as decoder states.
        start = nn.init.eye_ if d_enc == d_dec else nn.init.orthogonal_
        start(self.w_in.weight)

    def forward(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """M_s, the memory slots m = h-bar W_in of each segment `[S, M, D]`.

        Args:
            hidden_STE: H_s.
            mask_ST: False where a token is padding.
        """
        return self.w_in(pool(hidden_STE, mask_ST, self.compression))

    def target(self, hidden_STE: Tensor) -> Tensor:
        """H-tilde = H_s W_in, projected but not pooled `[S, T, D]` (section 4, stage 1)."""
        return self.w_in(hidden_STE)


class QueryCompressor(nn.Module):
    """Learned queries that attend over the whole segment (appendix Learnable Compression).

    Multi-head attention from M learned queries to the segment's states, with slot competition, a
    residual from the queries and no output projection. A segment of n < T tokens uses only the
    first ceil(n / C) queries; the others do not compete.
    """

    epsilon = 1e-6

    def __init__(self, d_enc: int, d_dec: int, compression: int, slots: int, heads: int) -> None:
        super().__init__()
        self.compression = compression
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(slots, d_dec) * 0.02)
        self.norm_query = nn.LayerNorm(d_dec)
        self.norm_state = nn.LayerNorm(d_enc)
        self.w_query = nn.Linear(d_dec, d_dec, bias=False)
        self.w_key = nn.Linear(d_enc, d_dec, bias=False)
        self.w_value = nn.Linear(d_enc, d_dec, bias=False)

    def attention(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """A after slot competition `[S, heads, M, T]` (equation 19 and the two that follow it).

        The attention to each token sums to one over the slots.
        """
        used_SM = slot_tokens(mask_ST, self.compression) > 0
        keys_SThd = self._heads(self.w_key(self.norm_state(hidden_STE)))
        queries_MD = self.norm_query(self.queries[: used_SM.shape[1]])
        queries_Mhd = self._heads(self.w_query(queries_MD))
        logits_ShMT = torch.einsum("mhd,sthd->shmt", queries_Mhd, keys_SThd)
        logits_ShMT = logits_ShMT / keys_SThd.shape[-1] ** 0.5
        # Finite, so that a segment of only padding does not give NaN. If there is a real token, the
        # softmax of padding is zero.
        padding_S11T = ~mask_ST[:, None, None, :]
        lowest = torch.finfo(logits_ShMT.dtype).min
        initial_ShMT = logits_ShMT.masked_fill(padding_S11T, lowest).softmax(-1)
        initial_ShMT = initial_ShMT * used_SM[:, None, :, None]
        return initial_ShMT / (initial_ShMT.sum(2, keepdim=True) + self.epsilon)

    def forward(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """m = Q_0 + Concat_h(Z), the memory slots of each segment `[S, M, D]`."""
        values_SThd = self._heads(self.w_value(self.norm_state(hidden_STE)))
        attention_ShMT = self.attention(hidden_STE, mask_ST)
        mixed_SMhd = torch.einsum("shmt,sthd->smhd", attention_ShMT, values_SThd)
        used_SM1 = slot_tokens(mask_ST, self.compression)[..., None] > 0
        return (self.queries[: used_SM1.shape[1]] + mixed_SMhd.flatten(2)) * used_SM1

    def target(self, hidden_STE: Tensor) -> Tensor:
        """The value projection of each state `[S, T, D]`, used in place of W_in."""
        return self.w_value(self.norm_state(hidden_STE))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1))


Compressor = PoolingCompressor | QueryCompressor


def build_compressor(config: SedemConfig, d_enc: int, d_dec: int) -> Compressor:
    """Build the compressor that a configuration names."""
    if config.compressor == "query":
        return QueryCompressor(
            d_enc, d_dec, config.compression, config.slots, config.compressor_heads
        )
    return PoolingCompressor(d_enc, d_dec, config.compression, mlp=config.compressor == "mlp")

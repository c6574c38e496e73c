"""Hidden states of a segment into memory slots: C_theta (section 3.1 and its variants).

Letters: S segments, T tokens, C tokens of a slot, M = T / C slots, E encoder width,
D decoder width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sedem.config import SedemConfig
from sedem.method.pooling import pool, slot_tokens


class LinearCompressor(nn.Module):
    """Mean pool, then the shared projection W_in (section 3.1). No token-to-token attention."""

    def __init__(self, d_enc: int, d_dec: int, compression: int) -> None:
        super().__init__()
        self.compression = compression
        self.w_in = nn.Linear(d_enc, d_dec, bias=False)
        _start_as_identity(self.w_in)

    def forward(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """Memory slots `[S, M, D]`."""
        return self.w_in(pool(hidden_STE, mask_ST, self.compression))

    def target(self, hidden_STE: Tensor) -> Tensor:
        """H-tilde of section 4: projected but not pooled `[S, T, D]`."""
        return self.w_in(hidden_STE)


class MLPCompressor(nn.Module):
    """Mean pool, then a two-layer MLP: the higher-capacity writer of the decompression ablation."""

    def __init__(self, d_enc: int, d_dec: int, compression: int) -> None:
        super().__init__()
        self.compression = compression
        self.w_in = nn.Sequential(
            nn.LayerNorm(d_enc), nn.Linear(d_enc, d_dec), nn.GELU(), nn.Linear(d_dec, d_dec)
        )

    def forward(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """Memory slots `[S, M, D]`."""
        return self.w_in(pool(hidden_STE, mask_ST, self.compression))

    def target(self, hidden_STE: Tensor) -> Tensor:
        """The same MLP on each state, unpooled `[S, T, D]`."""
        return self.w_in(hidden_STE)


class QueryCompressor(nn.Module):
    """Learned queries that attend over the whole segment (appendix Learnable Compression).

    Multi-head attention from M learned queries to the segment's states, slot competition, a
    residual from the queries and no output projection. A segment of n < T tokens uses the first
    ceil(n / C) queries alone; no other competes.

    Args:
        d_enc: E.
        d_dec: D.
        compression: C.
        slots: M.
        heads: attention heads.
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
        """A after slot competition `[S, heads, M, T]`: each token's mass sums to one over slots."""
        used_SM = slot_tokens(mask_ST, self.compression) > 0
        keys_SThd = self._heads(self.w_key(self.norm_state(hidden_STE)))
        queries_MD = self.norm_query(self.queries[: used_SM.shape[1]])
        queries_Mhd = self._heads(self.w_query(queries_MD))
        logits_ShMT = torch.einsum("mhd,sthd->shmt", queries_Mhd, keys_SThd)
        logits_ShMT = logits_ShMT / keys_SThd.shape[-1] ** 0.5
        # A finite logit, so that a segment of padding alone has no empty row; beside a real token
        # its softmax is zero.
        padding_S11T = ~mask_ST[:, None, None, :]
        lowest = torch.finfo(logits_ShMT.dtype).min
        initial_ShMT = logits_ShMT.masked_fill(padding_S11T, lowest).softmax(-1)
        initial_ShMT = initial_ShMT * used_SM[:, None, :, None]
        return initial_ShMT / (initial_ShMT.sum(2, keepdim=True) + self.epsilon)

    def forward(self, hidden_STE: Tensor, mask_ST: Tensor) -> Tensor:
        """Memory slots `[S, M, D]`."""
        values_SThd = self._heads(self.w_value(self.norm_state(hidden_STE)))
        attention_ShMT = self.attention(hidden_STE, mask_ST)
        mixed_SMhd = torch.einsum("shmt,sthd->smhd", attention_ShMT, values_SThd)
        used_SM1 = slot_tokens(mask_ST, self.compression)[..., None] > 0
        return (self.queries[: used_SM1.shape[1]] + mixed_SMhd.flatten(2)) * used_SM1

    def target(self, hidden_STE: Tensor) -> Tensor:
        """The value projection of each state `[S, T, D]`: what W_in is to the block compressor."""
        return self.w_value(self.norm_state(hidden_STE))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (self.heads, -1))


Compressor = LinearCompressor | MLPCompressor | QueryCompressor


def build_compressor(config: SedemConfig, d_enc: int, d_dec: int) -> Compressor:
    """The compressor that a configuration names."""
    if config.compressor == "query":
        return QueryCompressor(
            d_enc, d_dec, config.compression, config.slots, config.compressor_heads
        )
    kind = LinearCompressor if config.compressor == "linear" else MLPCompressor
    return kind(d_enc, d_dec, config.compression)


def _start_as_identity(projection: nn.Linear) -> None:
    # With equal widths encoder states already are decoder states; training starts from them.
    if projection.in_features == projection.out_features:
        nn.init.eye_(projection.weight)
    else:
        nn.init.orthogonal_(projection.weight)

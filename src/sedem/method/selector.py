"""R_phi: selects memory blocks for a question by late interaction and top-K (section 3.2).

Letters: B batch, Q question tokens, N blocks, J slots per block, R heads, H head width, E encoder
width, D decoder width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.tensors import weights_digest

ALL = "all"

SelectorStart = Literal["independent", "shared"]
"""How the two projections of a head start."""


COLUMNS = 64
"""On a CPU, a product has a multiple of this many columns: leftover columns would be summed in
another order. So a block's score is bit-identical in any part of its bank."""
PRODUCTS = 2**16
"""Cosines of one head that are computed at once on a CPU; more would not fit its cache."""
PRODUCTS_ON_GPU = 2**24
"""The same for a GPU, which is faster on large products: 256 MB with four heads."""


def block_scores(
    query_BQRH: Tensor,
    query_mask_BQ: Tensor,
    keys_BNJRH: Tensor,
    slot_mask_BNJ: Tensor,
    scales_BNJR: Tensor | None = None,
) -> Tensor:
    """s_n, the late-interaction score of each block (section 3.2, equations 5 to 7).

    alpha are the cosines, alpha^max is the largest over the slots of a block, and s_n sums it over
    question tokens and averages it over heads. A part of the blocks is scored at a time, so a bank
    of any size takes little memory.

    Args:
        query_BQRH: q, unit vectors, one per question token and head.
        query_mask_BQ: False where a question token is padding.
        keys_BNJRH: k, unit vectors, one per slot and head, in any type. One row of blocks may be
            for all questions.
        slot_mask_BNJ: False where a slot is padding.
        scales_BNJR: factors of the keys, if their type needs them.

    Returns:
        Scores `[B, N]` in float32; -inf for a block of only padding.
    """
    (questions, tokens), (blocks, slots, heads) = query_mask_BQ.shape, keys_BNJRH.shape[1:4]
    # A token of padding is a vector of zeros, which adds nothing to a score.
    query_BRQH = (query_BQRH.float() * query_mask_BQ[:, :, None, None]).transpose(1, 2)
    if len(keys_BNJRH) < questions:  # the tokens of all questions, as if they were one question
        query_BRQH = query_BRQH.transpose(0, 1).flatten(1, 2)[None]
    fits = _must_fit_cache(query_BRQH)
    whole, at_once = (COLUMNS // math.gcd(slots, COLUMNS), 1) if fits else (1, heads)
    room = (PRODUCTS if fits else PRODUCTS_ON_GPU) // max(1, slots * questions * tokens)
    step = max(1, room // whole) * whole
    scores = []
    for start in range(0, max(1, blocks), step):
        part = slice(start, start + step)
        keys_BnJRH = keys_BNJRH[:, part]
        if keys_BnJRH.dtype != torch.float32:
            # Both represent int8 and fp8 exactly, so scales can be applied to the products.
            keys_BnJRH = keys_BnJRH.to(torch.float32 if keys_BnJRH.is_cpu else torch.bfloat16)
        if missing := -keys_BnJRH.shape[1] % whole:
            keys_BnJRH = F.pad(keys_BnJRH, (0, 0, 0, 0, 0, 0, 0, missing))
        # A view: the keys of one head are a strided matrix, which the product does not copy.
        keys_BRHL = keys_BnJRH.permute(0, 3, 4, 1, 2).flatten(3)
        slot_mask_BL = slot_mask_BNJ[:, part].flatten(1)
        padding_B11L = query_BRQH.new_zeros(()).where(slot_mask_BL, -torch.inf)[:, None, None]
        best = []
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            # Equation 5.
            alpha_BRQL = _products(query_BRQH[:, some], keys_BRHL[:, some])
            alpha_BRQL = alpha_BRQL[..., : slot_mask_BL.shape[1]]
            if scales_BNJR is not None:
                alpha_BRQL *= scales_BNJR[:, part, :, some].movedim(3, 1).flatten(2)[:, :, None]
            # Equation 6. Without -inf, a padded slot at 0 would beat a negative cosine.
            alpha_BRQL += padding_B11L
            best.append(alpha_BRQL.unflatten(-1, (-1, slots)).amax(-1).sum(1))
        # Equation 7.
        best_BQN = _sum_in_order(best).reshape(questions, tokens, -1)
        total_BN = _sum_in_order(best_BQN.unbind(1)) if fits else best_BQN.sum(1)
        scores.append(total_BN / heads)
    return torch.cat(scores, 1)


def _must_fit_cache(tensor: Tensor) -> bool:
    """Whether a processor computes products: one head and few blocks at a time fit its cache.

    On a GPU, a call costs more than a little arithmetic.
    """
    return tensor.device.type == "cpu"


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Sum tensors; `Tensor.sum` would add the last of many columns in another order."""
    return sum(parts[1:], parts[0])


def _products(query_BRQH: Tensor, keys_BRHL: Tensor) -> Tensor:
    """Products in float32.

    Autocast would multiply in and return bfloat16. A score is a sum over question tokens that
    L_InfoNCE divides by tau = 0.07, so its rounding alone would move the logits by 0.2 nats.
    """
    with torch.autocast(query_BRQH.device.type, enabled=False):
        if keys_BRHL.dtype == torch.float32:
            return query_BRQH @ keys_BRHL
        query_XQH, keys_XHL = query_BRQH.flatten(0, 1).to(keys_BRHL.dtype), keys_BRHL.flatten(0, 1)
        alpha_XQL = torch.bmm(query_XQH, keys_XHL, out_dtype=torch.float32)
        return alpha_XQL.unflatten(0, query_BRQH.shape[:2])


class Selector(nn.Module):
    """Projections of question states and memory slots into R scoring spaces (equation 5).

    Args:
        start: how W_Q and W_K of a head start: as independent random orthogonal projections, or as
            the same one if the widths agree, so that selection works before any training;
            docs/deviations.md has the measurement.
    """

    def __init__(
        self, d_enc: int, d_dec: int, heads: int, dim: int, start: SelectorStart = "shared"
    ) -> None:
        super().__init__()
        self.heads = heads
        self._digest: tuple[tuple[int, ...], str] | None = None
        self.norm_query = nn.LayerNorm(d_enc)
        self.norm_key = nn.LayerNorm(d_dec)
        self.w_query = nn.Linear(d_enc, heads * dim, bias=False)
        self.w_key = nn.Linear(d_dec, heads * dim, bias=False)
        with torch.no_grad():
            for head in range(heads):
                rows = slice(head * dim, (head + 1) * dim)
                nn.init.orthogonal_(self.w_query.weight[rows])
                nn.init.orthogonal_(self.w_key.weight[rows])
            if start == "shared" and d_enc == d_dec:
                self.w_key.weight.copy_(self.w_query.weight)

    def restart(self, start: SelectorStart, seed: int) -> None:
        """Replace all weights with initial ones, which depend only on the seed."""
        sizes = self.w_query.in_features, self.w_key.in_features
        dim = self.w_key.out_features // self.heads
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            new = Selector(*sizes, self.heads, dim, start)
        self.load_state_dict(new.state_dict())

    def digest(self) -> str:
        """Hash of the weights that keys depend on; keys of another selector cannot be used."""
        tensors = {
            "norm.weight": self.norm_key.weight,
            "norm.bias": self.norm_key.bias,
            "projection": self.w_key.weight,
        }
        state = tuple(value for t in tensors.values() for value in (t.data_ptr(), t._version))
        if self._digest is None or self._digest[0] != state:
            self._digest = (state, weights_digest(tensors, f"{self.heads} heads"))
        return self._digest[1]

    def queries(self, hidden_QE: Tensor) -> Tensor:
        """q = LN(H_Q) W_Q as unit vectors `[..., Q, R, H]`, from question states `[..., Q, E]`."""
        return self.unit_heads(self.w_query(self.norm_query(hidden_QE)))

    def keys(self, memory_NJD: Tensor) -> Tensor:
        """k = LN(B_n) W_K as unit vectors `[..., J, R, H]`, from memory slots `[..., J, D]`."""
        return self.unit_heads(self.w_key(self.norm_key(memory_NJD)))

    def unit_heads(self, projected: Tensor) -> Tensor:
        """Unit vectors of each head `[..., R, H]` from projections `[..., R * H]`."""
        # Float32 from here on, so that the vectors have length one under autocast too. Autocast may
        # round the projections themselves: the states they project are no more exact than that.
        return F.normalize(projected.float().unflatten(-1, (self.heads, -1)), dim=-1)

    def forward(
        self,
        hidden_BQE: Tensor,
        query_mask_BQ: Tensor,
        memory_BNJD: Tensor,
        slot_mask_BNJ: Tensor,
    ) -> Tensor:
        """s_n of each question for its own blocks `[B, N]`.

        Args:
            hidden_BQE: H_Q, states of the question tokens.
            query_mask_BQ: False where a question token is padding.
            slot_mask_BNJ: False where a slot is padding.
        """
        return block_scores(
            self.queries(hidden_BQE), query_mask_BQ, self.keys(memory_BNJD), slot_mask_BNJ
        )


def build_selector(config: SedemConfig, d_enc: int, d_dec: int) -> Selector:
    """Build the selector that a configuration describes; R * H is D by default."""
    return Selector(
        d_enc, d_dec, config.selector_heads, config.selector_dim or d_dec // config.selector_heads
    )


def resolve_budget(k: object, blocks: int) -> int:
    """Number of blocks to select for a fixed budget: k, or all blocks if there are fewer.

    Args:
        k: a whole number of at least 1, or "all" for the full bank.

    Raises:
        ConfigError: k is neither.
    """
    if k == ALL:
        return blocks
    if not isinstance(k, int) or not is_count(k):
        raise ConfigError(
            f"k is {k!r}; it must be a whole number of at least 1, or 'all', or 'auto' for SeDeM"
        )
    return min(k, blocks)


def is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    # A bool is an int in Python, but not a count.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


SMALL_SHARE = 64
"""If fewer than one block in this many is selected, only the best are sorted."""


def top_k(scores_N: Tensor, count: int) -> Tensor:
    """I(Q), the indices of the `count` best blocks, best first; ties go to the earlier block."""
    if 0 < count * SMALL_SHARE < len(scores_N):
        # Sort only blocks that reach the lowest selected score.
        lowest = scores_N.topk(count).values[-1]
        candidates = (scores_N >= lowest).nonzero()[:, 0]
        return candidates[scores_N[candidates].sort(descending=True, stable=True).indices[:count]]
    return scores_N.sort(descending=True, stable=True).indices[:count]

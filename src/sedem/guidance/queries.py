"""Queries from other states than those that W_Q was trained on. Ours, not in the paper.

In the paper, the frozen encoder reads the question to select blocks, and the decoder's own lower
layers read it again to answer. `read_once` spares the first pass: the queries come from the states
at the injection layer, which the answer needs anyway. A product of low rank is added to W_Q for it.

Letters: B questions, Q question tokens, E width, R heads, H width of a head.
"""

from __future__ import annotations

from torch import Tensor, nn

from sedem.method.selector import Selector

READ_ONCE_RANK = 32
"""Rank of what is added to W_Q for the decoder's states."""


class Queries(nn.Module):
    """W_Q for other states: the selector's, plus a product of low rank.

    Args:
        selector: the selector whose keys the queries are compared with.

    Attributes:
        down, up: the two factors of what is added.
    """

    def __init__(self, selector: Selector, rank: int) -> None:
        super().__init__()
        own = selector.w_query
        self.down = nn.Linear(own.in_features, rank, bias=False)
        self.up = nn.Linear(rank, own.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def queries(self, selector: Selector, hidden_BQE: Tensor) -> Tensor:
        """Queries `[B, Q, R, H]` from the states of question tokens."""
        hidden_BQE = selector.norm_query(hidden_BQE)
        return selector.unit_heads(selector.w_query(hidden_BQE) + self.up(self.down(hidden_BQE)))

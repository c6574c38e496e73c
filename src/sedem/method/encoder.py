"""Hidden states of segments at the extraction layer, with early exit (section 3.1, equation 1).

Letters: S segments, T tokens, E encoder width, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import KeyAxis, KeyValues


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

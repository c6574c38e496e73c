"""Next-token predictions and their losses, all at once or a few positions at a time.

The logits of one position have the size of the vocabulary. At paper scale the logits of a batch, in
the types of all losses, take more memory than the layers. Computed a few positions at a time, they
are not kept but recomputed in the backward pass. The losses are those of `losses`.

Letters: B batch, P positions, D decoder width, V vocabulary, L positions that count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sedem.method.losses import (
    IGNORED,
    distillation_loss,
    divergences,
    mean_over_rows,
    next_token_loss,
)


class Predictions:
    """What a decoder predicts at some positions.

    Args:
        head: from states `[..., D]` to logits `[..., V]`: final norm and output matrix.
        states_BPD: states after the last layer.
        at_once: positions whose logits are computed at a time; None computes and keeps all.
    """

    def __init__(
        self, head: Callable[[Tensor], Tensor], states_BPD: Tensor, at_once: int | None = None
    ) -> None:
        self.head = head
        self.states = states_BPD
        self.at_once = at_once

    @cached_property
    def logits(self) -> Tensor:
        """All logits `[B, P, V]`."""
        return self.head(self.states)

    def next_token_loss(self, labels_BP: Tensor) -> Tensor:
        """`losses.next_token_loss` of these predictions."""
        if self.at_once is None:
            return next_token_loss(self.logits, labels_BP)
        counts_BP = labels_BP != IGNORED

        def of_chunk(head: Callable[[Tensor], Tensor], own_LD: Tensor, labels_L: Tensor) -> Tensor:
            return F.cross_entropy(head(own_LD).float(), labels_L, reduction="none")

        loss_L = self._in_chunks(of_chunk, self.states[counts_BP], labels_BP[counts_BP])
        zero_BP = torch.zeros(labels_BP.shape, dtype=loss_L.dtype, device=loss_L.device)
        return mean_over_rows(zero_BP.masked_scatter(counts_BP, loss_L), labels_BP)

    def distillation_loss(
        self, teacher: Predictions, mask_BP: Tensor, temperature: float
    ) -> Tensor:
        """`losses.distillation_loss` from a teacher's predictions, without gradient, to these.

        Args:
            teacher: predictions at the same positions, by the same head.
        """
        if self.at_once is None:
            with torch.no_grad():
                teacher_BPV = teacher.logits
            return distillation_loss(self.logits, teacher_BPV, mask_BP, temperature)

        def of_chunk(head: Callable[[Tensor], Tensor], own_LD: Tensor, other_LD: Tensor) -> Tensor:
            with torch.no_grad():
                teacher_LV = head(other_LD)
            return divergences(head(own_LD), teacher_LV, temperature)

        loss_L = self._in_chunks(of_chunk, self.states[mask_BP], teacher.states[mask_BP])
        return loss_L.sum() / mask_BP.sum().clamp_min(1)

    def _in_chunks(self, of_chunk: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """The losses of all rows `[L]`, computed for a few rows at a time."""
        assert self.at_once is not None
        chunks = zip(*(tensor.split(self.at_once) for tensor in rows), strict=True)
        return torch.cat(
            [
                checkpoint(
                    of_chunk, self.head, *chunk, use_reentrant=False, preserve_rng_state=False
                )
                for chunk in chunks
            ]
        )

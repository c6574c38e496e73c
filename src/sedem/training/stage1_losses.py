"""The weights of stage 1's losses, and the switches of what they cover."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from sedem.validation import Number, NumberAbove0, Settings, Share


class Stage1Losses(Settings):
    """Weights and temperatures of stage 1.

    Attributes:
        distill: lambda_distill; 0.5 is in a commented-out line of the paper's source.
        reconstruct: lambda_rec of stage 1; 1.0 in the same line.
        pool_weight: gamma of L_rec.
        distill_temperature: tau of L_distill.
        context: weight of L_ctx; the paper's is 1.
        regress: weight of the regression of restored states onto the decoder's own states at the
            injection layer. Ours, not the paper's; 0 turns it off.
        regress_first: share of the training, at its start, that uses only this regression. It
            skips the upper layers, so it is several times faster.
        recall: share of windows whose continuation is replaced by a separator and a span of the
            context itself, which trains copying from memory. The separator distinguishes the two
            kinds and is not a target. Ours, not the paper's; 0 turns it off.
    """

    distill: Number = 0.5
    reconstruct: Number = 1.0
    pool_weight: Number = 1.0
    distill_temperature: NumberAbove0 = 1.0
    context: Number = 1.0
    regress: Number = 0.0
    regress_first: Share = 0.0
    recall: Share = 0.0

    @model_validator(mode="after")
    def _regression_has_a_weight(self) -> Self:
        if self.regress_first and not self.regress:
            raise ValueError(
                f"regress_first is {self.regress_first} but regress is 0; give the regression a "
                "weight"
            )
        return self

"""The weights of stage 1's losses, and the switches of what they cover."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from sedem.validation import Flag, Number, NumberAbove0, Settings, Share, WholeFrom0


class Stage1Losses(Settings):
    """Weights and temperatures of stage 1.

    Attributes:
        distill: lambda_distill; 0.5 is in a commented-out line of the paper's source.
        reconstruct: lambda_rec of stage 1; 1.0 in the same line.
        pool_weight: gamma of L_rec.
        distill_temperature: tau of L_distill.
        context: weight of L_ctx; the paper's is 1.
        context_at_restored: L_ctx also covers the context itself: each restored state predicts the
            token after its own. The paper does not say; if off, only the continuation counts.
        distill_recall: include recall windows in L_distill. Their teacher has to search the whole
            context, and memory may recall better than it does.
        regress: weight of the regression of restored states onto the decoder's own states at the
            injection layer. Ours, not the paper's; 0 turns it off.
        regress_first: share of the training, at its start, that uses only this regression. It
            skips the upper layers, so it is several times faster.
        recall: share of windows whose continuation is replaced by a separator and a span of the
            context itself, which trains copying from memory. The separator distinguishes the two
            kinds and is not a target. Ours, not the paper's; 0 turns it off.
        distractors: other windows of the batch whose memory is placed next to a window's own, so
            that the decoder learns to ignore a block. Ours, not the paper's; 0 turns it off.
        cue: tokens before the target that show which window continues, and where. They are not
            targets. Needed with distractors.
    """

    distill: Number = 0.5
    reconstruct: Number = 1.0
    pool_weight: Number = 1.0
    distill_temperature: NumberAbove0 = 1.0
    context: Number = 1.0
    context_at_restored: Flag = False
    distill_recall: Flag = True
    regress: Number = 0.0
    regress_first: Share = 0.0
    recall: Share = 0.0
    distractors: WholeFrom0 = 0
    cue: WholeFrom0 = 0

    @model_validator(mode="after")
    def _regression_has_a_weight(self) -> Self:
        if self.regress_first and not self.regress:
            raise ValueError(
                f"regress_first is {self.regress_first} but regress is 0; give the regression a "
                "weight"
            )
        return self

    @model_validator(mode="after")
    def _distractors_have_a_cue(self) -> Self:
        if bool(self.distractors) != bool(self.cue):
            raise ValueError(
                f"distractors is {self.distractors} and cue {self.cue}; among distractors only "
                "a cue says which block continues: set both, or neither"
            )
        return self

"""The losses of section 4 and of the appendix Selection Supervision, as pure functions.

Letters: B batch, S segments, T tokens, M slots, N blocks, P positions, D decoder width,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sedem.method.compressor import pool

IGNORED = -100
"""Label of a position that the loss ignores."""


def direction_loss(restored_STD: Tensor, target_STD: Tensor, mask_ST: Tensor) -> Tensor:
    """L_dir (section 4, equation 9): 1 - mean cosine of restored and target states.

    Mean over segments; a segment of only padding does not count.

    Args:
        target_STD: H-tilde.
        mask_ST: False where a token is padding.
    """
    cosine_ST = F.cosine_similarity(restored_STD.float(), target_STD.float(), dim=-1)
    mean_S = (cosine_ST * mask_ST).sum(1) / mask_ST.sum(1).clamp_min(1)
    return mean_where(1 - mean_S, mask_ST.any(1))


def pooled_direction_loss(
    restored_STD: Tensor, target_STD: Tensor, mask_ST: Tensor, compression: int
) -> Tensor:
    """L_pool (section 4, equation 10): L_dir between the pooled states of both."""
    return direction_loss(
        pool(restored_STD.float(), mask_ST, compression),
        pool(target_STD.float(), mask_ST, compression),
        mask_ST.unflatten(1, (-1, compression)).any(2),
    )


def reconstruction_loss(
    restored_STD: Tensor,
    target_STD: Tensor,
    mask_ST: Tensor,
    compression: int,
    pool_weight: float,
) -> Tensor:
    """L_rec (section 4, equation 11): L_dir + gamma L_pool; `pool_weight` is this gamma."""
    direction = direction_loss(restored_STD, target_STD, mask_ST)
    pooled = pooled_direction_loss(restored_STD, target_STD, mask_ST, compression)
    return direction + pool_weight * pooled


def next_token_loss(logits_BPV: Tensor, labels_BP: Tensor) -> Tensor:
    """L_ctx of stage 1, and L_LM of stage 2 (section 4, equation 13).

    Mean over the labelled tokens of a row, then over rows; a row without labels does not count.

    Args:
        logits_BPV: prediction of the next token at each position.
        labels_BP: the next token; `IGNORED` where a position does not count.
    """
    loss_BP = F.cross_entropy(
        logits_BPV.flatten(0, 1).float(), labels_BP.flatten(), reduction="none"
    ).view_as(labels_BP)
    return mean_over_rows(loss_BP, labels_BP)


def mean_over_rows(loss_BP: Tensor, labels_BP: Tensor) -> Tensor:
    """Mean over the labelled tokens of a row, then over the rows that have any.

    Args:
        loss_BP: loss of each token; 0 where it has no label.
        labels_BP: `IGNORED` where a token has no label.
    """
    counts_B = (labels_BP != IGNORED).sum(1)
    return mean_where(loss_BP.sum(1) / counts_B.clamp_min(1), counts_B > 0)


def distillation_loss(
    student_BPV: Tensor, teacher_BPV: Tensor, mask_BP: Tensor, temperature: float
) -> Tensor:
    """L_distill (section 4, stage 1): KL from teacher to student, mean over continuation tokens.

    Args:
        student_BPV: logits of the decoder on restored states.
        teacher_BPV: logits of the same decoder on the raw context.
        temperature: tau of this loss, for both distributions.
    """
    return mean_where(divergences(student_BPV, teacher_BPV, temperature), mask_BP)


def divergences(student_PV: Tensor, teacher_PV: Tensor, temperature: float) -> Tensor:
    """KL from teacher to student at each position `[..., P]`, from logits `[..., P, V]`."""
    student = (student_PV.float() / temperature).log_softmax(-1)
    teacher = (teacher_PV.float() / temperature).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def info_nce_loss(
    scores_BN: Tensor, evidence_BN: Tensor, blocks_BN: Tensor, temperature: float | Tensor
) -> Tensor:
    """L_InfoNCE (appendix Selection Supervision, equation 17): evidence against all blocks.

    Args:
        blocks_BN: False where a block is padding.
        temperature: tau of this loss; `[B, 1]` for one per example.

    Returns:
        Mean over the examples that have evidence; zero if there are none.
    """
    logits_BN = (scores_BN / temperature).masked_fill(~blocks_BN, -torch.inf)
    log_p_BN = logits_BN.log_softmax(-1).masked_fill(~evidence_BN, 0.0)
    positives_B = evidence_BN.sum(1)
    loss_B = -log_p_BN.sum(1) / positives_B.clamp_min(1)
    return mean_where(loss_B, positives_B > 0)


def margin_loss(scores_BN: Tensor, evidence_BN: Tensor, blocks_BN: Tensor, margin: float) -> Tensor:
    """L_margin (equation 18): mean hinge over all pairs of an evidence block and another block.

    Args:
        blocks_BN: False where a block is padding.
        margin: gamma of this loss, the gap to reach.

    Returns:
        Mean over the examples that have both kinds of block; zero if there are none.
    """
    negative_BN = blocks_BN & ~evidence_BN
    pair_BNN = evidence_BN[:, :, None] & negative_BN[:, None, :]
    scores_BN = scores_BN.masked_fill(~blocks_BN, 0.0)
    hinge_BNN = (margin - scores_BN[:, :, None] + scores_BN[:, None, :]).clamp_min(0)
    pairs_B = pair_BNN.sum((1, 2))
    loss_B = (hinge_BNN * pair_BNN).sum((1, 2)) / pairs_B.clamp_min(1)
    return mean_where(loss_B, pairs_B > 0)


def selection_loss(
    scores_BN: Tensor,
    evidence_BN: Tensor,
    blocks_BN: Tensor,
    *,
    temperature: float | Tensor,
    margin: float,
    margin_weight: float,
) -> Tensor:
    """L_ret (equation 16): L_InfoNCE + lambda_margin L_margin.

    Args:
        blocks_BN: False where a block is padding.
    """
    contrast = info_nce_loss(scores_BN, evidence_BN, blocks_BN, temperature)
    return contrast + margin_weight * margin_loss(scores_BN, evidence_BN, blocks_BN, margin)


def mean_where(loss_B: Tensor, counts_B: Tensor) -> Tensor:
    """Mean of the losses that count; zero if none does.

    Losses are not picked by the mask, because their number would have to be known to the host.
    """
    return torch.where(counts_B, loss_B, 0.0).sum() / counts_B.sum().clamp_min(1)


def state_regression_loss(
    restored_STD: Tensor, own_STD: Tensor, mask_ST: Tensor, spread_D: Tensor
) -> Tensor:
    """Regression of restored states onto the decoder's own states at the injection layer.

    Not in the paper, whose reconstruction losses are cosines and never correct the scale. The loss
    is the squared error in units of the states' spread, plus L_dir.

    Args:
        own_STD: the decoder's states of the same tokens.
        mask_ST: False where a token is padding.
        spread_D: standard deviation of each dimension of the decoder's states.
    """
    error_STD = (restored_STD.float() - own_STD.float()) / spread_D
    square_ST = error_STD.square().mean(-1)
    return mean_where(square_ST, mask_ST) + direction_loss(restored_STD, own_STD, mask_ST)

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sedem.method.losses import (
    IGNORED,
    direction_loss,
    distillation_loss,
    info_nce_loss,
    margin_loss,
    next_token_loss,
    pooled_direction_loss,
    reconstruction_loss,
    selection_loss,
    state_regression_loss,
)

LENGTHS = [6, 5, 1]
MASK_ST = torch.arange(6)[None, :] < torch.tensor(LENGTHS)[:, None]


def states(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 6, 4, generator=generator).double()


RESTORED_STD, TARGET_STD = states(0), states(1)


def naive_direction(restored: list[Tensor], target: list[Tensor]) -> float:
    """Mean over segments of 1 - mean cosine; segments without their padding."""
    losses = []
    for own_TD, other_TD in zip(restored, target, strict=True):
        dots_T = (own_TD * other_TD).sum(1) / (own_TD.norm(dim=1) * other_TD.norm(dim=1))
        losses.append(float(1 - dots_T.mean()))
    return sum(losses) / len(losses)


def real(states_STD: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(states_STD, LENGTHS, strict=True)]


def pooled(segments: list[Tensor], compression: int) -> list[Tensor]:
    return [torch.stack([run.mean(0) for run in one.split(compression)]) for one in segments]


def test_direction_loss_is_one_minus_the_mean_cosine_of_real_tokens() -> None:
    expected = naive_direction(real(RESTORED_STD), real(TARGET_STD))
    loss = direction_loss(RESTORED_STD, TARGET_STD, MASK_ST)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("compression", [1, 2, 3, 6])
def test_pooled_direction_loss_is_the_direction_loss_of_slot_means(compression: int) -> None:
    expected = naive_direction(
        pooled(real(RESTORED_STD), compression), pooled(real(TARGET_STD), compression)
    )
    loss = pooled_direction_loss(RESTORED_STD, TARGET_STD, MASK_ST, compression)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("pool_weight", [0.0, 0.5, 1.0])
def test_reconstruction_loss_adds_the_weighted_pooled_part(pool_weight: float) -> None:
    expected = naive_direction(real(RESTORED_STD), real(TARGET_STD)) + pool_weight * (
        naive_direction(pooled(real(RESTORED_STD), 2), pooled(real(TARGET_STD), 2))
    )
    loss = reconstruction_loss(RESTORED_STD, TARGET_STD, MASK_ST, 2, pool_weight)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_a_segment_of_padding_alone_does_not_count() -> None:
    mask_ST = MASK_ST.clone()
    mask_ST[2] = False
    two = reconstruction_loss(RESTORED_STD[:2], TARGET_STD[:2], MASK_ST[:2], 2, 1.0)
    three = reconstruction_loss(RESTORED_STD, TARGET_STD, mask_ST, 2, 1.0)
    assert three.item() == pytest.approx(two.item(), abs=1e-7)


def test_padding_changes_neither_the_reconstruction_loss_nor_its_gradient() -> None:
    gradients = []
    for filler in (0.0, 1e4):
        restored = torch.where(MASK_ST[..., None], RESTORED_STD, filler).requires_grad_()
        loss = reconstruction_loss(restored, TARGET_STD, MASK_ST, 2, 1.0)
        (gradient,) = torch.autograd.grad(loss, restored)
        gradients.append((loss.item(), gradient))
    assert gradients[0][0] == gradients[1][0]
    assert torch.equal(gradients[0][1], gradients[1][1])
    assert gradients[0][1][~MASK_ST].eq(0).all()


def test_next_token_loss_is_the_mean_over_a_row_and_then_over_rows() -> None:
    logits_BPV = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2)).double()
    labels_BP = torch.tensor([[3, IGNORED, 0, 4], [IGNORED, IGNORED, 1, IGNORED]])
    logs = logits_BPV.log_softmax(-1)
    rows = [-(logs[0, 0, 3] + logs[0, 2, 0] + logs[0, 3, 4]) / 3, -logs[1, 2, 1]]
    loss = next_token_loss(logits_BPV, labels_BP)
    assert loss.item() == pytest.approx(float(sum(rows)) / 2, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distillation_is_kl_from_teacher_to_student_at_one_temperature(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    student_BPV = torch.randn(2, 3, 5, generator=generator).double()
    teacher_BPV = torch.randn(2, 3, 5, generator=generator).double()
    mask_BP = torch.tensor([[True, True, False], [False, True, True]])
    terms = []
    for b, p in mask_BP.nonzero().tolist():
        student_V, teacher_V = (
            (logits[b, p] / temperature).softmax(0) for logits in (student_BPV, teacher_BPV)
        )
        terms.append(float((teacher_V * (teacher_V / student_V).log()).sum()))
    loss = distillation_loss(student_BPV, teacher_BPV, mask_BP, temperature)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), abs=1e-6)


SCORES_BN = torch.tensor(
    [
        [2.0, 0.5, -1.0, 1.5, 0.0],  # two evidence blocks
        [0.3, 0.2, 0.1, 50.0, -torch.inf],  # one, and two blocks of padding
        [1.0, 2.0, 3.0, 4.0, -torch.inf],  # none
        [0.5, -0.5, 0.0, -torch.inf, 50.0],  # evidence alone
    ]
)
EVIDENCE_BN = torch.tensor(
    [
        [True, False, True, False, False],
        [False, True, False, False, False],
        [False] * 5,
        [True, True, False, False, False],
    ]
)
BLOCKS_BN = torch.tensor(
    [[True] * 5, [True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 2 + [False] * 3]
)


WEIGHTS = {"temperature": 0.07, "margin": 2.0, "margin_weight": 0.5}


def pairs() -> list[tuple[list[float], list[float]]]:
    """Scores of the evidence and of the other blocks of each example, without padding."""
    return [
        (scores[blocks & evidence].tolist(), scores[blocks & ~evidence].tolist())
        for scores, evidence, blocks in zip(SCORES_BN, EVIDENCE_BN, BLOCKS_BN, strict=True)
    ]


def naive_info_nce(temperature: float) -> float:
    losses = []
    for positives, negatives in pairs():
        if positives:
            below = sum(math.exp(score / temperature) for score in positives + negatives)
            logs = [math.log(math.exp(score / temperature) / below) for score in positives]
            losses.append(-sum(logs) / len(logs))
    return sum(losses) / len(losses)


def naive_margin(margin: float) -> float:
    losses = []
    for positives, negatives in pairs():
        terms = [max(0.0, margin - p + n) for p in positives for n in negatives]
        if terms:
            losses.append(sum(terms) / len(terms))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("temperature", [0.07, 1.0, 3.0])
def test_info_nce_equals_its_equation(temperature: float) -> None:
    loss = info_nce_loss(SCORES_BN, EVIDENCE_BN, BLOCKS_BN, temperature)
    assert loss.item() == pytest.approx(naive_info_nce(temperature), rel=1e-5)


def test_info_nce_takes_one_temperature_per_example() -> None:
    temperature_B1 = torch.tensor([[0.5], [1.0], [2.0], [3.0]])
    rows = [
        info_nce_loss(
            SCORES_BN[b : b + 1], EVIDENCE_BN[b : b + 1], BLOCKS_BN[b : b + 1], temperature
        )
        for b, temperature in enumerate([0.5, 1.0, 2.0, 3.0])
        if b != 2
    ]
    loss = info_nce_loss(SCORES_BN, EVIDENCE_BN, BLOCKS_BN, temperature_B1)
    torch.testing.assert_close(loss, torch.stack(rows).mean())


@pytest.mark.parametrize("margin", [0.0, 0.1, 2.0])
def test_margin_loss_equals_its_equation(margin: float) -> None:
    loss = margin_loss(SCORES_BN, EVIDENCE_BN, BLOCKS_BN, margin)
    assert loss.item() == pytest.approx(naive_margin(margin), rel=1e-5)


def test_selection_loss_adds_the_weighted_margin() -> None:
    loss = selection_loss(SCORES_BN, EVIDENCE_BN, BLOCKS_BN, **WEIGHTS)
    expected = naive_info_nce(0.07) + 0.5 * naive_margin(2.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("row", [2, 3])
def test_an_example_without_pairs_has_no_margin_loss(row: int) -> None:
    part = slice(row, row + 1)
    assert margin_loss(SCORES_BN[part], EVIDENCE_BN[part], BLOCKS_BN[part], 2.0).item() == 0


def test_a_batch_without_evidence_has_a_zero_loss_and_zero_gradients() -> None:
    scores_BN = SCORES_BN[2:3].clone().requires_grad_()
    loss = selection_loss(scores_BN, EVIDENCE_BN[2:3], BLOCKS_BN[2:3], **WEIGHTS)
    (gradient,) = torch.autograd.grad(loss, scores_BN)
    assert loss.item() == 0
    assert gradient.eq(0).all()


def test_padded_blocks_get_no_gradient_and_no_block_gets_nan() -> None:
    scores_BN = SCORES_BN.clone().requires_grad_()
    loss = selection_loss(scores_BN, EVIDENCE_BN, BLOCKS_BN, **WEIGHTS)
    (gradient,) = torch.autograd.grad(loss, scores_BN)
    assert gradient[~BLOCKS_BN].eq(0).all()
    assert gradient.isfinite().all()
    assert gradient[0].ne(0).any()


def test_state_regression_is_squared_error_in_units_of_the_spread_plus_direction() -> None:
    spread_D = torch.tensor([0.5, 2.0, 10.0, 1.0])
    squares = [
        ((own_TD - other_TD) / spread_D).square().mean(1)
        for own_TD, other_TD in zip(real(RESTORED_STD), real(TARGET_STD), strict=True)
    ]
    expected = float(torch.cat(squares).mean())
    expected += naive_direction(real(RESTORED_STD), real(TARGET_STD))
    loss = state_regression_loss(RESTORED_STD, TARGET_STD, MASK_ST, spread_D)
    assert loss.item() == pytest.approx(expected, rel=1e-5)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

Vector = list[float]

LENGTHS = [6, 5, 1]
MASK_ST = torch.arange(6)[None, :] < torch.tensor(LENGTHS)[:, None]


def states(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 6, 4, generator=generator).double()


RESTORED_STD, TARGET_STD = states(0), states(1)


def cosine(first: Vector, second: Vector) -> float:
    dot = sum(a * b for a, b in zip(first, second, strict=True))
    lengths = [math.sqrt(sum(a * a for a in vector)) for vector in (first, second)]
    return dot / (lengths[0] * lengths[1])


def mean_of(vectors: list[Vector]) -> Vector:
    return [sum(values) / len(vectors) for values in zip(*vectors, strict=True)]


def naive_direction(restored: list[list[Vector]], target: list[list[Vector]]) -> float:
    """Mean over segments of 1 - mean cosine; segments without their padding."""
    losses = []
    for own, other in zip(restored, target, strict=True):
        total = 0.0
        for t in range(len(own)):
            total += cosine(own[t], other[t])
        losses.append(1 - total / len(own))
    return sum(losses) / len(losses)


def real(states_STD: Tensor) -> list[list[Vector]]:
    return [row[:length] for row, length in zip(states_STD.tolist(), LENGTHS, strict=True)]


def pooled(segments: list[list[Vector]], compression: int) -> list[list[Vector]]:
    return [
        [mean_of(segment[at : at + compression]) for at in range(0, len(segment), compression)]
        for segment in segments
    ]


def test_direction_loss_is_one_minus_the_mean_cosine_of_real_tokens() -> None:
    expected = naive_direction(real(RESTORED_STD), real(TARGET_STD))
    loss = direction_loss(RESTORED_STD, TARGET_STD, MASK_ST)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 0.0), (-1.0, 2.0)])
def test_direction_loss_ignores_scale(sign: float, expected: float) -> None:
    loss = direction_loss(sign * 300 * TARGET_STD, TARGET_STD, MASK_ST)
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


def log_softmax(logits: Vector) -> Vector:
    total = math.log(sum(math.exp(value) for value in logits))
    return [value - total for value in logits]


def test_next_token_loss_is_the_mean_over_a_row_and_then_over_rows() -> None:
    logits_BPV = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2)).double()
    labels_BP = torch.tensor([[3, IGNORED, 0, 4], [IGNORED, IGNORED, 1, IGNORED]])
    rows = []
    for row, labels in zip(logits_BPV.tolist(), labels_BP.tolist(), strict=True):
        losses = [
            -log_softmax(logits)[label]
            for logits, label in zip(row, labels, strict=True)
            if label != -100
        ]
        rows.append(sum(losses) / len(losses))
    loss = next_token_loss(logits_BPV, labels_BP)
    assert loss.item() == pytest.approx(sum(rows) / 2, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distillation_is_kl_from_teacher_to_student_at_one_temperature(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    student_BPV = torch.randn(2, 3, 5, generator=generator).double()
    teacher_BPV = torch.randn(2, 3, 5, generator=generator).double()
    mask_BP = torch.tensor([[True, True, False], [False, True, True]])
    terms = []
    for b in range(2):
        for p in range(3):
            if not mask_BP[b, p]:
                continue
            student = log_softmax([v / temperature for v in student_BPV[b, p].tolist()])
            teacher = log_softmax([v / temperature for v in teacher_BPV[b, p].tolist()])
            terms.append(sum(math.exp(t) * (t - s) for s, t in zip(student, teacher, strict=True)))
    loss = distillation_loss(student_BPV, teacher_BPV, mask_BP, temperature)
    assert loss.item() == pytest.approx(sum(terms) / len(terms), abs=1e-6)


def test_distillation_of_equal_logits_is_zero() -> None:
    logits_BPV = torch.randn(2, 3, 5)
    loss = distillation_loss(logits_BPV, logits_BPV, torch.ones(2, 3, dtype=torch.bool), 2.0)
    assert loss.item() == pytest.approx(0, abs=1e-7)


SCORES_BN = torch.tensor(
    [
        [2.0, 0.5, -1.0, 1.5, 0.0],  # two evidence blocks
        [0.3, 0.2, 0.1, -torch.inf, -torch.inf],  # one, and two blocks of padding
        [1.0, 2.0, 3.0, 4.0, -torch.inf],  # none
        [0.5, -0.5, -torch.inf, -torch.inf, -torch.inf],  # evidence alone
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


def rows_of_blocks() -> list[tuple[Vector, list[bool]]]:
    """Scores and evidence of each example, without padded blocks."""
    return [
        (
            [s for s, block in zip(scores, blocks, strict=True) if block],
            [e for e, block in zip(evidence, blocks, strict=True) if block],
        )
        for scores, evidence, blocks in zip(
            SCORES_BN.tolist(), EVIDENCE_BN.tolist(), BLOCKS_BN.tolist(), strict=True
        )
    ]


def naive_info_nce(temperature: float) -> float:
    losses = []
    for scores, evidence in rows_of_blocks():
        positives = [n for n in range(len(scores)) if evidence[n]]
        if not positives:
            continue
        total = 0.0
        for n in positives:
            below = sum(math.exp(score / temperature) for score in scores)
            total += math.log(math.exp(scores[n] / temperature) / below)
        losses.append(-total / len(positives))
    return sum(losses) / len(losses)


def naive_margin(margin: float) -> float:
    losses = []
    for scores, evidence in rows_of_blocks():
        positives = [n for n in range(len(scores)) if evidence[n]]
        negatives = [n for n in range(len(scores)) if not evidence[n]]
        if not positives or not negatives:
            continue
        total = 0.0
        for p in positives:
            for n in negatives:
                total += max(0.0, margin - scores[p] + scores[n])
        losses.append(total / (len(positives) * len(negatives)))
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
    loss = selection_loss(
        SCORES_BN, EVIDENCE_BN, BLOCKS_BN, temperature=0.07, margin=2.0, margin_weight=0.5
    )
    expected = naive_info_nce(0.07) + 0.5 * naive_margin(2.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("row", [2, 3])
def test_an_example_without_pairs_has_no_margin_loss(row: int) -> None:
    part = slice(row, row + 1)
    assert margin_loss(SCORES_BN[part], EVIDENCE_BN[part], BLOCKS_BN[part], 2.0).item() == 0


def test_a_batch_without_evidence_has_a_zero_loss_and_zero_gradients() -> None:
    scores_BN = SCORES_BN[2:3].clone().requires_grad_()
    loss = selection_loss(
        scores_BN,
        EVIDENCE_BN[2:3],
        BLOCKS_BN[2:3],
        temperature=0.07,
        margin=2.0,
        margin_weight=0.5,
    )
    (gradient,) = torch.autograd.grad(loss, scores_BN)
    assert loss.item() == 0
    assert gradient.eq(0).all()


def test_padded_blocks_get_no_gradient_and_no_block_gets_nan() -> None:
    scores_BN = SCORES_BN.clone().requires_grad_()
    loss = selection_loss(
        scores_BN, EVIDENCE_BN, BLOCKS_BN, temperature=0.07, margin=2.0, margin_weight=0.5
    )
    (gradient,) = torch.autograd.grad(loss, scores_BN)
    assert gradient[~BLOCKS_BN].eq(0).all()
    assert gradient.isfinite().all()
    assert gradient[0].ne(0).any()


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    more=st.integers(0, 4),
    filler=st.sampled_from([0.0, 50.0, -math.inf]),
)
def test_padded_blocks_never_change_the_selection_loss(seed: int, more: int, filler: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_BN = torch.randn(2, 4, generator=generator)
    evidence_BN = torch.rand(2, 4, generator=generator) < 0.5
    wide_scores = torch.full((2, 4 + more), filler)
    wide_scores[:, :4] = scores_BN
    wide_evidence = torch.zeros(2, 4 + more, dtype=torch.bool)
    wide_evidence[:, :4] = evidence_BN
    wide_blocks = (torch.arange(4 + more) < 4).expand(2, -1)

    def loss(scores: Tensor, evidence: Tensor, blocks: Tensor) -> Tensor:
        return selection_loss(
            scores, evidence, blocks, temperature=0.5, margin=1.0, margin_weight=0.5
        )

    torch.testing.assert_close(
        loss(wide_scores, wide_evidence, wide_blocks),
        loss(scores_BN, evidence_BN, torch.ones(2, 4, dtype=torch.bool)),
    )


def test_state_regression_is_squared_error_in_units_of_the_spread_plus_direction() -> None:
    spread = [0.5, 2.0, 10.0, 1.0]
    squares = []
    for own, other in zip(real(RESTORED_STD), real(TARGET_STD), strict=True):
        for t in range(len(own)):
            errors = [((a - b) / s) ** 2 for a, b, s in zip(own[t], other[t], spread, strict=True)]
            squares.append(sum(errors) / len(errors))
    expected = sum(squares) / len(squares) + naive_direction(real(RESTORED_STD), real(TARGET_STD))
    loss = state_regression_loss(RESTORED_STD, TARGET_STD, MASK_ST, torch.tensor(spread))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_state_regression_corrects_scale_where_the_direction_loss_does_not() -> None:
    spread_D = torch.ones(4)
    assert direction_loss(2 * TARGET_STD, TARGET_STD, MASK_ST).item() == pytest.approx(0, abs=1e-6)
    assert state_regression_loss(2 * TARGET_STD, TARGET_STD, MASK_ST, spread_D).item() > 0.5

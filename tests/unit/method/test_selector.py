from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.method.conftest import case, unit

from sedem.config import SedemConfig
from sedem.method import selector as module
from sedem.method.selector import (
    Selector,
    block_scores,
    build_selector,
    resolve_budget,
    top_k,
)
from sedem.tensors import DTYPES, Quantized, quantize

Vector = list[float]


def naive_score(
    query: list[list[Vector]],
    query_real: list[bool],
    keys: list[list[list[Vector]]],
    slot_real: list[list[bool]],
) -> list[float]:
    """s_n of every block: four nested loops over heads, question tokens, blocks and slots."""
    heads = len(query[0])
    scores = []
    for n in range(len(keys)):
        total = 0.0
        for r in range(heads):
            for q in range(len(query)):
                if not query_real[q]:
                    continue
                best = -math.inf
                for j in range(len(keys[n])):
                    if slot_real[n][j]:
                        pairs = zip(query[q][r], keys[n][j][r], strict=True)
                        best = max(best, sum(a * b for a, b in pairs))
                total += best
        scores.append(total / heads)
    return scores


@pytest.mark.parametrize("seed", range(5))
def test_block_scores_equal_four_nested_loops(seed: int) -> None:
    tensors = case(seed)
    expected = [naive_score(*row) for row in zip(*(t.tolist() for t in tensors), strict=True)]
    torch.testing.assert_close(block_scores(*tensors), torch.tensor(expected))


def test_a_padded_slot_never_beats_a_negative_cosine() -> None:
    query_BQRH = torch.tensor([[[[1.0, 0.0]]]])
    keys_BNJRH = torch.tensor([[[[[-1.0, 0.0]], [[0.0, 0.0]]]]])
    masked = torch.tensor([[[True, False]]])
    scores = block_scores(query_BQRH, torch.ones(1, 1, dtype=torch.bool), keys_BNJRH, masked)
    assert scores.tolist() == [[-1.0]]


def test_a_block_of_padding_alone_scores_minus_infinity() -> None:
    assert block_scores(*case())[1, 3] == -torch.inf


@pytest.mark.parametrize("in_cache", [True, False])
@pytest.mark.parametrize("room", [1, 40, 2**16])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_blocks_for_all_questions_are_scored_in_parts_of_any_size(
    dtype: str | None, room: int, in_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_must_fit_cache", lambda _: in_cache)
    query_BQRH, query_mask_BQ, keys_BNJRH, slot_mask_BNJ = case()
    keys_1NJRH, slots_1NJ = keys_BNJRH[1:], slot_mask_BNJ[1:]
    stored = Quantized(keys_1NJRH) if dtype is None else quantize(keys_1NJRH, dtype)
    exact_BNJRH = stored.dequantize().float().expand_as(keys_BNJRH)
    expected_BN = block_scores(
        query_BQRH, query_mask_BQ, exact_BNJRH, slots_1NJ.expand_as(slot_mask_BNJ)
    )
    monkeypatch.setattr(module, "PRODUCTS", room)
    monkeypatch.setattr(module, "PRODUCTS_ON_GPU", room)
    found_BN = block_scores(query_BQRH, query_mask_BQ, stored.values, slots_1NJ, stored.scales)
    torch.testing.assert_close(found_BN, expected_BN)
    assert found_BN[:, 3].eq(-torch.inf).all(), "padding alone"


@pytest.mark.parametrize("slots", [3, 8])
def test_a_score_is_the_same_to_the_bit_in_any_part_of_a_bank(slots: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query_1QRH, keys_1NJRH = unit(generator, 1, 7, 2, 32), unit(generator, 1, 300, slots, 2, 32)
    mask_1Q = torch.ones(1, 7, dtype=torch.bool)
    slots_1NJ = torch.rand(1, 300, slots, generator=generator) > 0.1
    whole_1N = block_scores(query_1QRH, mask_1Q, keys_1NJRH, slots_1NJ)
    for part in (slice(0, 1), slice(1, 150), slice(150, 299), slice(7, 300)):
        found_1n = block_scores(query_1QRH, mask_1Q, keys_1NJRH[:, part], slots_1NJ[:, part])
        assert torch.equal(found_1n, whole_1N[:, part])


def test_scores_are_float32_of_bfloat16_vectors_and_under_autocast() -> None:
    query_BQRH, query_mask_BQ, keys_BNJRH, slot_mask_BNJ = case()
    low = (query_BQRH.bfloat16(), query_mask_BQ, keys_BNJRH.bfloat16(), slot_mask_BNJ)
    exact = (low[0].float(), query_mask_BQ, low[2].float(), slot_mask_BNJ)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = block_scores(*exact)
    for scores in (block_scores(*low), under_autocast):
        assert scores.dtype == torch.float32
        assert torch.equal(scores, block_scores(*exact))


def test_the_selector_equals_norm_projection_cosine_and_four_loops() -> None:
    torch.manual_seed(3)
    selector = Selector(d_enc=5, d_dec=4, heads=2, dim=3)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.copy_(torch.randn_like(parameter))
    hidden_BQE, memory_BNJD = torch.randn(2, 3, 5), torch.randn(2, 4, 3, 4)

    def heads(states: Tensor, norm: torch.nn.LayerNorm, weight: Tensor) -> Tensor:
        """LN(state) W^(r) for every head r, each scaled to length one."""
        normed = F.layer_norm(states, (states.shape[-1],), norm.weight, norm.bias, norm.eps)
        projected = (normed @ weight.T).unflatten(-1, (2, 3))
        return projected / projected.norm(dim=-1, keepdim=True)

    _, query_mask_BQ, _, slot_mask_BNJ = case()
    tensors = (
        heads(hidden_BQE, selector.norm_query, selector.w_query.weight),
        query_mask_BQ,
        heads(memory_BNJD, selector.norm_key, selector.w_key.weight),
        slot_mask_BNJ,
    )
    expected = [naive_score(*row) for row in zip(*(t.tolist() for t in tensors), strict=True)]
    scores = selector(hidden_BQE, query_mask_BQ, memory_BNJD, slot_mask_BNJ)
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_queries_and_keys_have_length_one_under_autocast() -> None:
    """Rounding of the projections may turn them a little; it must not change their length."""
    selector = Selector(8, 8, heads=2, dim=4)
    states = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    for project in (selector.queries, selector.keys):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            vectors = project(states)
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(50, 2), rtol=0, atol=1e-6)
        torch.testing.assert_close(vectors, project(states), rtol=0, atol=0.03)


def test_a_selector_restarts_with_weights_that_depend_only_on_the_seed() -> None:
    torch.manual_seed(3)
    selector = Selector(8, 8, heads=2, dim=4)
    torch.nn.init.zeros_(selector.norm_key.weight)
    digest, state = selector.digest(), torch.get_rng_state()
    selector.restart("independent", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert selector.digest() != digest
    assert torch.equal(selector.norm_key.weight, torch.ones(8))
    weights = selector.w_query.weight, selector.w_key.weight
    for weight in weights:
        for head in weight.unflatten(0, (2, 4)):
            torch.testing.assert_close(head @ head.T, torch.eye(4))
    assert not torch.isclose(*weights).any(1).all()
    drawn = weights[0].clone()
    selector.restart("shared", seed=3)
    assert torch.equal(selector.w_key.weight, selector.w_query.weight)
    selector.restart("independent", seed=3)
    assert torch.equal(selector.w_query.weight, drawn)


def test_both_projections_start_as_the_same_orthogonal_one_when_widths_agree() -> None:
    selector = Selector(8, 8, heads=2, dim=4)
    assert torch.equal(selector.w_query.weight, selector.w_key.weight)
    for head in selector.w_query.weight.unflatten(0, (2, 4)):
        torch.testing.assert_close(head @ head.T, torch.eye(4), atol=1e-5, rtol=0)
    state = torch.randn(1, 8)
    score = selector(
        state[None],
        torch.ones(1, 1, dtype=torch.bool),
        state[None, None],
        torch.ones(1, 1, 1, dtype=torch.bool),
    )
    torch.testing.assert_close(score, torch.ones(1, 1))


def test_a_selector_projects_from_both_widths_to_heads_of_the_dimension_that_is_set() -> None:
    config = SedemConfig(encoder="-", extract_layers=(1,), inject_layer=1, selector_heads=2)
    selector = build_selector(config, 6, 8)
    assert selector.w_query.weight.shape == (8, 6)
    assert selector.w_key.weight.shape == (8, 8)
    narrow = build_selector(config.with_changes(selector_dim=3), 6, 8)
    assert narrow.keys(torch.randn(1, 8)).shape == (1, 2, 3)


def test_select_gives_the_best_blocks_best_first() -> None:
    scores = [0.5, -2.0, 3.0, 1.0, -torch.inf]
    expected = sorted(range(5), key=lambda n: -scores[n])
    for count in range(6):
        assert top_k(torch.tensor(scores), count).tolist() == expected[:count]


def test_ties_go_to_the_earlier_block() -> None:
    scores_N = torch.tensor([1.0, 2.0] * 50)
    assert top_k(scores_N, 60).tolist() == [*range(1, 100, 2), *range(0, 20, 2)]


@pytest.mark.parametrize(
    ("k", "blocks", "expected"), [(1, 5, 1), (5, 5, 5), (9, 5, 5), ("all", 17, 17)]
)
def test_a_budget_is_never_more_than_the_bank(k: int | str, blocks: int, expected: int) -> None:
    assert resolve_budget(k, blocks) == expected

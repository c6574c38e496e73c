"""Selection by parts is that of the whole bank, for every way to split it and every tie."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sedem.answering.requests import Request
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.errors import ConfigError
from sedem.guidance.budgets import Auto
from sedem.method.selector import select
from sedem.model import SeDeM
from sedem.scale.partitions import Found, best, merge, needed


def split(blocks: int, parts: int, *files: int) -> list[range]:
    """Split a bank whose files end after these blocks."""
    views = [range(*pair) for pair in pairwise([0, *files, blocks])]
    return Snapshot(views, BankFile()).split(parts)  # type: ignore[arg-type]


def by_parts(scores_N: torch.Tensor, parts: int, count: int | None) -> Found:
    """The best blocks, as `parts` selectors find them and an engine merges them."""
    ranges = split(len(scores_N), parts)
    found = [best(scores_N[one.start : one.stop], one.start, count) for one in ranges]
    return merge(found[::-1], count)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 10, 101])
def test_a_split_is_in_order_whole_and_even(blocks: int, parts: int) -> None:
    ranges = split(blocks, parts)
    assert len(ranges) == parts
    assert [block for one in ranges for block in one] == list(range(blocks))
    sizes = [len(one) for one in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_a_bank_of_many_files_is_split_between_files() -> None:
    assert split(100, 2, 20, 55) == [range(55), range(55, 100)]
    assert split(100, 3, 20, 55) == [range(20), range(20, 55), range(55, 100)]
    assert split(100, 4, 20, 55) == [range(25), range(25, 50), range(50, 75), range(75, 100)]
    every = [block for one in split(100, 3, 96, 97, 98) for block in one]
    assert every == list(range(100))


def test_every_pattern_of_ties_is_merged_as_one_machine_selects() -> None:
    values = (0.5, -0.5, 0.0, -torch.inf)
    checked = 0
    for pattern in product(values, repeat=4):
        scores_N = torch.tensor(pattern)
        candidates = int((scores_N > -torch.inf).sum())
        for parts, count in product((1, 2, 3, 5), (1, 2, 3, None)):
            found = by_parts(scores_N, parts, count)
            most = candidates if count is None else min(count, candidates)
            assert found.blocks.tolist() == select(scores_N, most).tolist()
            checked += 1
    assert checked == 4**4 * 16


@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -3.5, 7.0]), min_size=1),
    parts=st.integers(1, 9),
    count=st.integers(1, 20),
)
def test_merged_blocks_and_scores_are_those_of_the_whole(
    scores: list[float], parts: int, count: int
) -> None:
    scores_N = torch.tensor(scores)
    found = by_parts(scores_N, parts, count)
    chosen = select(scores_N, min(count, len(scores)))
    assert found.blocks.tolist() == chosen.tolist()
    assert found.scores.tobytes() == scores_N[chosen].numpy().tobytes()


def test_many_blocks_with_few_different_scores() -> None:
    generator = torch.Generator().manual_seed(5)
    scores_N = torch.randint(0, 40, (20_000,), generator=generator).float()
    for parts, count in product((2, 4, 16), (1, 8, 300)):
        assert by_parts(scores_N, parts, count).blocks.tolist() == select(scores_N, count).tolist()


def test_scores_are_spread_over_the_bank() -> None:
    found = Found(np.array([4, 1]), np.array([2.5, -1.0], np.float32))
    assert len(found) == 2
    assert found.spread(6).tolist() == [-np.inf, -1.0, -np.inf, -np.inf, 2.5, -np.inf]


def test_as_many_blocks_are_handed_on_as_an_answer_depends_on(model: SeDeM) -> None:
    bank = None  # what is needed does not depend on the bank

    def of(**fields: object) -> int | None:
        return needed(model, Request(bank, "?", **fields))  # type: ignore[arg-type]

    rivals = 8 if model.confidence is not None else 1
    assert of(k=2) == max(2, rivals)
    assert of(k=30) == 30
    assert of(k="all") is None
    assert of(k=2, ranking=True) is None
    assert of(blocks=[3]) is None
    with pytest.raises(ConfigError, match="whole number"):
        of(k=0)
    if model.guidance is not None:
        assert of(k=Auto(most=40)) == 40
    else:
        with pytest.raises(ConfigError, match="without guidance"):
            of(k="auto")

from __future__ import annotations

import pytest

from sedem.method.losses import IGNORED
from sedem.training.targets import targets


def test_targets_are_the_answers_shifted_by_one() -> None:
    batch = targets([([0, 5, 6], [7, 1]), ([0, 8], [9, 10, 11, 1])])
    assert batch["ids"].tolist() == [[0, 0, 5, 6, 7], [0, 8, 9, 10, 11]]
    assert batch["valid"].tolist() == [[False, True, True, True, True], [True] * 5]
    # Only as wide as the longest answer; the last prefix token predicts the first answer token.
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, 1], [9, 10, 11, 1]]


@pytest.mark.parametrize("pairs", [[([0], [1])], [([0, 4], [1]), ([0, 5], [1])]])
def test_rows_of_one_length_have_no_padding(pairs: list[tuple[list[int], list[int]]]) -> None:
    batch = targets(pairs)
    assert batch["valid"].all()
    assert batch["ids"].tolist() == [prefix for prefix, _ in pairs]
    assert batch["labels"].tolist() == [[1]] * len(pairs)

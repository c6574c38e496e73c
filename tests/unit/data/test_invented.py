"""What all sets of invented questions share: seeds, splits, and the paragraphs they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from sedem.errors import DataError
from sedem_lab.data.articles import read_articles
from sedem_lab.data.facts import EXACT_FACTS
from sedem_lab.data.invented import InventedSet
from sedem_lab.data.paperwork import PAPERWORK
from sedem_lab.data.question_sets import open_examples
from sedem_lab.data.two_steps import TWO_STEPS

FILLERS = [f"Real paragraph {number} about nothing in particular." for number in range(30)]

every_set = pytest.mark.parametrize("made", [EXACT_FACTS, PAPERWORK, TWO_STEPS])


@every_set
def test_a_seed_decides_everything(made: InventedSet) -> None:
    once, other = (made.generate("train", 20, FILLERS, seed=seed).examples for seed in (3, 4))
    assert not {example.question for example in once} & {example.question for example in other}
    # More of the same begin with the same.
    assert made.generate("train", 40, FILLERS, seed=3).examples[:20] == once


@every_set
def test_articles_give_the_real_paragraphs_of_which_enough_are_needed(
    made: InventedSet, fixtures: Path
) -> None:
    path = fixtures / "articles.jsonl"
    found = open_examples(path, made.name, split="train", count=5)
    assert (found.name, len(found.examples)) == (f"{made.name}-train", 5)
    assert open_examples(path, made.name, count=1).name == f"{made.name}-evaluation"
    text = "\n".join(text for _, text in read_articles(path))
    for example in found.examples:
        real = [document.text in text for document in example.documents]
        assert sum(real) == made.real
        assert not any(real[span.document] for span in example.evidence)
    count = made.real
    with pytest.raises(
        DataError, match=f"needs {count} filler paragraphs, {count - 1} are given; give more text"
    ):
        made.generate("train", 1, FILLERS[: count - 1])

"""Questions in two steps: both paragraphs are needed, and splits share no name."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from sedem_lab.data.examples import Example
from sedem_lab.data.invented import Split
from sedem_lab.data.two_steps import ATTRIBUTES, OTHERS, REAL, RELATIONS, TWO_STEPS

FILLERS = [f"Real paragraph {number} is about nobody." for number in range(REAL)]


@pytest.fixture(scope="module")
def made() -> dict[Split, list[Example]]:
    return {split: TWO_STEPS.generate(split, 100, FILLERS).examples for split in get_args(Split)}


def test_the_answer_stands_only_in_a_paragraph_that_the_question_does_not_name(
    made: dict[Split, list[Example]],
) -> None:
    for example in [*made["train"], *made["evaluation"]]:
        assert len(example.documents) == 2 + 2 * OTHERS + REAL
        first, second = (example.documents[span.document].text for span in example.evidence)
        [answer] = example.answers
        assert answer in second
        names = re.findall(r"(?<!^)\b[A-Z][a-z]+(?: [A-Z][a-z]+)*", example.question)
        assert names and all(name in first for name in names)
        assert not any(name in second.split() for name in names)


def test_every_relation_and_attribute_occurs(made: dict[Split, list[Example]]) -> None:
    asked = " ".join(example.question for example in made["train"])
    for relation in RELATIONS:
        before, _, after = relation.described.partition("{a}")
        assert re.search(f"{re.escape(before)}.+{re.escape(after)}", asked)
    assert {kind for relation in RELATIONS for kind in relation.kinds} == set(ATTRIBUTES)


def test_splits_share_no_name(made: dict[Split, list[Example]]) -> None:
    trades = {"Brothers", "Company", "Trading", "Foundry"}
    names = [
        {word for one in examples for word in re.findall(r"\b[A-Z][a-z]{6,}", one.question)}
        for examples in made.values()
    ]
    assert names[0] - trades and not names[0] & names[1] - trades

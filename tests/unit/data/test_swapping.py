"""Swapped copies: the old answer is nowhere, the evidence is the new one."""

from __future__ import annotations

import re

import pytest

from sedem.types import Document
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.data.invented import split_of
from sedem_lab.data.question_sets import open_examples
from sedem_lab.data.swapping import NOTHING, swapped

OTHER = "In 1877 the Lighthouse of Karin Holm had 1,385 steps; Holm counted them, not 1,385.5."


def example(answer: str, text: str) -> Example:
    documents = (Document("a.txt", OTHER), Document("b.txt", text))
    at = text.index(answer)
    evidence = (Evidence(1, at, at + len(answer)),)
    return Example("1", documents, f"What is said of {answer}?", (answer,), evidence)


@pytest.mark.parametrize(
    ("answer", "form"),
    [("1877", r"\d{4}"), ("1,385", r"\d,\d{3}"), ("Karin Holm", r"[A-Z]\w+ [A-Z]\w+")],
)
def test_the_answer_is_another_of_its_kind_everywhere(answer: str, form: str) -> None:
    before = example(answer, f"People spoke of Holm and {answer} long after {answer}.")
    after = swapped(before)
    assert after is not None and after == swapped(before)
    (new,) = after.answers
    assert re.fullmatch(form, new) and new != answer
    everything = " ".join([after.question, *(one.text for one in after.documents)])
    assert not re.search(rf"\b(?:{answer.replace(' ', '|')})\b(?!\.\d)", everything)
    (evidence,) = after.evidence
    assert after.documents[1].text[evidence.start : evidence.end] == new
    assert after.documents[0].text.endswith("not 1,385.5.")


def test_other_answers_and_parts_of_words_are_left_out() -> None:
    assert swapped(example("because it rained", "It was because it rained.")) is None
    assert swapped(example("18", "It was built in 1877 or in 1880.")) is None


def test_squad_is_swapped_on_request() -> None:
    path = "tests/fixtures/squad.json"
    plain, changed, taught = (
        open_examples(path, "squad", **options)
        for options in ({}, {"swap": True}, {"swap": "train"})
    )
    assert len(plain.examples) == len(changed.examples) + changed.dropped[NOTHING]
    assert changed.examples
    for one in changed.examples:
        (evidence,) = one.evidence
        text = one.documents[evidence.document].text
        assert text[evidence.start : evidence.end] == one.answers[0]
    # Names that a model is trained with are never those it is measured with.
    for split, found in (("evaluation", changed), ("train", taught)):
        names = [
            word for one in found.examples for word in re.findall(r"[A-Za-z]+", one.answers[0])
        ]
        assert names and all(split_of(name) == split for name in names)

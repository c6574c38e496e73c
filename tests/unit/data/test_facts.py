from __future__ import annotations

import re
from functools import partial
from typing import get_args

import pytest

from sedem_lab.data.examples import Example
from sedem_lab.data.facts import EXACT_FACTS, templates
from sedem_lab.data.invented import Split, split_of
from sedem_lab.data.question_sets import open_examples

load = partial(open_examples, schema="exact-facts")

SPLITS = get_args(Split)
FILLERS = [f"Real paragraph {number} about nothing in particular." for number in range(30)]
COUNT = 300


def sentences(split: Split, what: str) -> list[str]:
    return [
        template
        for attributes in templates().values()
        for attribute in attributes
        for template in attribute[split][what]
    ]


def asked(split: Split, question: str) -> str:
    patterns = [re.escape(t).replace(r"\{name\}", "(.+)") for t in sentences(split, "questions")]
    (name,) = {match[1] for match in (re.fullmatch(p, question) for p in patterns) if match}
    return str(name)


@pytest.fixture(scope="module")
def made() -> dict[Split, list[Example]]:
    return {split: EXACT_FACTS.generate(split, COUNT, FILLERS).examples for split in SPLITS}


def invented(example: Example) -> list[str]:
    return [document.text for document in example.documents if document.text not in FILLERS]


def test_training_and_evaluation_share_no_template() -> None:
    for what in ("statements", "questions"):
        train, evaluation = set(sentences("train", what)), set(sentences("evaluation", what))
        assert len(evaluation) >= 2 * 4 * 4 and len(train) > len(evaluation)
        assert not train & evaluation
    for split in SPLITS:
        assert all("{name}" in s and "{value}" in s for s in sentences(split, "statements"))
        assert all("{name}" in s and "{value}" not in s for s in sentences(split, "questions"))


def test_training_and_evaluation_share_no_name_and_no_value(
    made: dict[Split, list[Example]],
) -> None:
    names, values = (
        [{of(split, e) for e in made[split]} for split in SPLITS]
        for of in (lambda split, e: asked(split, e.question), lambda _, e: e.answers[0])
    )
    # A place is a name here and a value there: no string crosses over in either role.
    assert not (names[0] | values[0]) & (names[1] | values[1])
    # Every sentence is made of a template of its split.
    for split in SPLITS:
        parts = [re.split(r"\{name\}|\{value\}", s) for s in sentences(split, "statements")]
        for example in made[split]:
            for text in invented(example):
                for sentence in re.split(r"(?<=\.) ", text):
                    assert any(all(part in sentence for part in own) for own in parts), sentence


@pytest.mark.parametrize("split", SPLITS)
def test_only_one_sentence_answers_and_only_its_paragraph_is_about_what_is_asked(
    made: dict[Split, list[Example]], split: Split
) -> None:
    for example in made[split]:
        assert len({document.text for document in example.documents}) == 10
        assert len(invented(example)) == 2
        (span,), (answer,) = example.evidence, example.answers
        name = asked(split, example.question)
        assert split_of(answer) == split_of(name) == split
        gold = example.documents[span.document].text
        sentence = gold[span.start : span.end]
        assert answer in sentence and name.lower() in sentence.lower()
        assert span.start == 0 or gold[span.start - 2 : span.start] == ". "
        assert answer not in gold[: span.start] + gold[span.end :]
        about = [i for i, d in enumerate(example.documents) if name.lower() in d.text.lower()]
        assert about == [span.document]
    assert len({example.evidence[0].document for example in made[split]}) == 10


def test_two_paragraphs_are_never_about_one_thing() -> None:
    # A repeated name is drawn again: here the second paragraph's first draw is Varfield too.
    example = EXACT_FACTS.generate("train", 955, FILLERS, seed=9).examples[954]
    assert asked("train", example.question) == "Varfield"
    assert sum("Varfield" in document.text for document in example.documents) == 1


def test_the_evaluation_set_never_changes() -> None:
    # Published numbers were measured on it.
    example = EXACT_FACTS.generate("evaluation", 1, FILLERS).examples[0]
    (span,) = example.evidence
    assert example.question == "Since when has contract BJ-5100 been in force?"
    assert example.documents[span.document].text == (
        "Contract BJ-5100 was sealed on 11 May 1963. The contractor of contract BJ-5100 is Orlin "
        "Company. Contract BJ-5100 was drafted by Emil Haling."
    )
    assert (span.document, example.answers) == (5, ("11 May 1963",))

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from sedem.data.articles import paragraphs, read_articles
from sedem.data.examples import Example
from sedem.data.facts import Split, generate, split_of, templates
from sedem.data.question_sets import open_examples
from sedem.errors import DataError

load = partial(open_examples, schema="exact-facts")

SPLITS = get_args(Split)
FILLERS = [f"Real paragraph {number} about nothing in particular." for number in range(30)]
COUNT = 300


# What each kind of name and value looks like; a name may begin a sentence.
SHAPES = {
    "place": r"[A-Z][a-z]+",
    "person": r"[A-Z][a-z]+ [A-Z][a-z]+",
    "firm": r"[A-Z][a-z]+ [A-Z][a-z]+",
    "contract": r"[Cc]ontract [A-Z]{2}-\d{4}",
    "shipment": r"[Ss]hipment [A-Z]{2}-\d{4}",
    "code": r"[A-Z]{2}-\d{4}",
    "date": r"\d{1,2} [A-Z][a-z]+ \d{4}",
    "year": r"\d{4}",
    "count": r"\d{1,2},\d{3}",
    "money": r"\d{1,2},\d{3} [a-z]+",
    "metres": r"\d+ metres",
    "kilos": r"\d+ kg",
    "goods": r"[a-z]+ from [A-Z][a-z]+",
}


def filled(split: Split, what: str) -> list[tuple[str, re.Pattern[str]]]:
    """Templates of a split, and what they look like when they are filled in."""
    return [
        (
            template,
            re.compile(
                re.escape(template)
                .replace(r"\{name\}", f"(?P<name>{SHAPES[kind]})")
                .replace(r"\{value\}", f"(?P<value>{SHAPES[attribute['value']]})")
            ),
        )
        for kind, attributes in templates().items()
        for attribute in attributes
        for template in attribute[split][what]
    ]


def sentences(split: Split, what: str) -> list[str]:
    return [template for template, _ in filled(split, what)]


def said(split: Split, text: str) -> list[tuple[str, str]]:
    """Name and value of each sentence of an invented paragraph."""
    patterns = [pattern for _, pattern in filled(split, "statements")]
    found = []
    for sentence in re.split(r"(?<=\.) ", text):
        matches = [match for match in (p.fullmatch(sentence) for p in patterns) if match]
        (pair,) = {(match["name"].lower(), match["value"].lower()) for match in matches}
        found.append(pair)
    return found


def asked(split: Split, question: str) -> str:
    matches = [p.fullmatch(question) for _, p in filled(split, "questions")]
    (name,) = {match["name"] for match in matches if match}
    return str(name)


@pytest.fixture(scope="module")
def made() -> dict[Split, list[Example]]:
    return {split: generate(split, COUNT, FILLERS).examples for split in SPLITS}


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
    names: dict[Split, set[str]] = {}
    values: dict[Split, set[str]] = {}
    for split, examples in made.items():
        pairs = [pair for e in examples for text in invented(e) for pair in said(split, text)]
        assert len(pairs) > 6 * COUNT
        names[split] = {name for name, _ in pairs} | {
            asked(split, example.question).lower() for example in examples
        }
        values[split] = {value for _, value in pairs} | {e.answers[0].lower() for e in examples}
    assert not names["train"] & names["evaluation"]
    assert not values["train"] & values["evaluation"]
    # A place is a name here and a value there: no string crosses over in either role.
    assert not (names["train"] | values["train"]) & (names["evaluation"] | values["evaluation"])


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
        assert said(split, sentence) == [(name.lower(), answer.lower())]
        assert span.start == 0 or gold[span.start - 2 : span.start] == ". "
        assert answer not in gold[: span.start] + gold[span.end :]
        about = [i for i, d in enumerate(example.documents) if name.lower() in d.text.lower()]
        assert about == [span.document]
    assert len({example.evidence[0].document for example in made[split]}) == 10


def test_two_paragraphs_are_never_about_one_thing() -> None:
    # A repeated name is drawn again: here the second paragraph's first draw is Varfield too.
    example = generate("train", 955, FILLERS, seed=9).examples[954]
    assert asked("train", example.question) == "Varfield"
    assert sum("Varfield" in document.text for document in example.documents) == 1


def test_a_seed_decides_everything() -> None:
    once, other = (generate("train", 20, FILLERS, seed=seed).examples for seed in (3, 4))
    assert not {example.question for example in once} & {example.question for example in other}
    # More of the same begin with the same.
    assert generate("train", 40, FILLERS, seed=3).examples[:20] == once


def test_the_evaluation_set_never_changes() -> None:
    # Published numbers were measured on it.
    example = generate("evaluation", 1, FILLERS).examples[0]
    (span,) = example.evidence
    assert example.question == "Since when has contract BJ-5100 been in force?"
    assert example.documents[span.document].text == (
        "Contract BJ-5100 was sealed on 11 May 1963. The contractor of contract BJ-5100 is Orlin "
        "Company. Contract BJ-5100 was drafted by Emil Haling."
    )
    assert (span.document, example.answers) == (5, ("11 May 1963",))


def test_too_few_fillers_are_an_error_with_both_numbers() -> None:
    with pytest.raises(DataError, match="a context needs 8 filler paragraphs, 7 are given"):
        generate("train", 1, FILLERS[:7])


def test_articles_give_the_fillers(fixtures: Path) -> None:
    path = fixtures / "articles.jsonl"
    result = load(path, split="train", count=5, records="1:")
    real = {
        paragraph for _, text in read_articles(path)[1:] for paragraph in paragraphs(text, 250, 650)
    }
    assert result.name == "exact-facts-train"
    for example in result.examples:
        assert sum(document.text in real for document in example.documents) == 8
    assert load(path, count=1).name == "exact-facts-evaluation"

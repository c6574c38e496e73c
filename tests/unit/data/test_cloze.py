from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from unit.data.conftest import Write

from sedem.errors import DataError
from sedem_lab.data.articles import paragraphs, read_articles
from sedem_lab.data.cloze import LONGEST, SHORTEST, clozes
from sedem_lab.data.question_sets import open_examples

load = partial(open_examples, schema="cloze")


def test_paragraphs_are_lines_of_some_length_and_no_headings() -> None:
    text = "== A heading that is long ==\n  abcde  \nabcd\n\nabcdefghij\nabcdefghijk\n"
    assert paragraphs(text, 5, 10) == ["abcde", "abcdefghij"]


def occurrences(answer: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(answer)}(?!\w)", text))


def test_questions_of_real_paragraphs_are_sound(fixtures: Path) -> None:
    articles = read_articles(fixtures / "articles.jsonl")
    real = [paragraph for _, text in articles for paragraph in paragraphs(text, 200, 900)]
    made = [(paragraph, cloze) for paragraph in real for cloze in clozes(paragraph)]
    assert len({(paragraph, cloze.start) for paragraph, cloze in made}) == len(made) == 65
    for paragraph, cloze in made:
        sentence = paragraph[cloze.start : cloze.end]
        assert occurrences(cloze.answer, paragraph) == 1
        assert occurrences(cloze.answer, sentence) == 1
        assert occurrences(cloze.answer, cloze.question) == 0
        assert cloze.question.endswith("?") and "\n" not in cloze.question
        assert SHORTEST <= len(sentence.split()) <= LONGEST
        # What is left of the sentence stands around the question word.
        before, after = sentence.split(cloze.answer)
        assert cloze.question.startswith(" ".join(before.split()))
        assert " ".join(after.rstrip(".!? ").split()) in cloze.question


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        ("Scifo quit the club because of its debts on [6 June 2009].", "what date"),
        ("The ship left the harbour on [June 6, 2009] with all hands.", "what date"),
        ("In [July 2005] the ship moved a refinery to the north.", "what month"),
        ("The town was first mentioned in [1250] as a village.", "what year"),
        ("The ship carried a platform weighing [60,000] tons to the south.", "how many"),
        ("The magazine is published every Thursday by [Haymarket Consumer Media]!", "what"),
        # A date tells more than the name before it.
        ("The treaty was signed by Peter Vos on [1 May 1900].", "what date"),
    ],
)
def test_the_most_telling_span_is_asked_for(sentence: str, word: str) -> None:
    before, answer, after = re.split(r"[\[\]]", sentence)
    (cloze,) = clozes(before + answer + after)
    assert cloze.question == f"{before}{word}{after[:-1]}?"
    assert (cloze.answer, cloze.start, cloze.end) == (answer, 0, len(sentence) - 2)


@pytest.mark.parametrize(
    "sentence",
    [
        "Ada was born in 1850.",  # too short
        "The " + "very " * 32 + "old town was built in 1850.",  # too long
        "He was elected mayor of the old town in 1850.",  # says something about another sentence
        '"They" were the owners of the old mill in 1850.',
        "The mayor (of the old town was elected there in 1850.",  # a bracket that never closes
        'The mayor of the "old town was elected there in 1850.',
        "The mayor | of the old town was elected there in 1850.",  # a table
        'The mayor wrote "the mill was built in 1850" to all.',  # said by somebody
        "The mayor of the old town was elected by the people.",  # nothing telling
        "The mill was built in 1850 and sold again in 1850.",  # said twice
        "The mill was built by the old mayor in 1850. A fire came in 1850.",
    ],
)
def test_sentences_that_would_make_poor_questions_are_left_alone(sentence: str) -> None:
    assert list(clozes(sentence)) == []


def test_part_of_a_longer_number_is_another_span() -> None:
    sentence = "The mill was built by the old mayor in 1850."
    assert len([*clozes(f"{sentence} A fire cost 18500 crowns.")]) == len([*clozes(sentence)]) == 1


def test_examples_hold_their_evidence_among_ten_paragraphs_half_of_the_same_article(
    fixtures: Path,
) -> None:
    article_of = {
        paragraph: title
        for title, text in read_articles(fixtures / "articles.jsonl")
        for paragraph in paragraphs(text, 200, 900)
    }
    sizes = Counter(article_of.values())
    result = load(fixtures / "articles.jsonl")
    assert len(result.examples) == 65
    for example in result.examples:
        assert len({document.text for document in example.documents}) == 10
        (span,) = example.evidence
        gold = example.documents[span.document].text
        assert occurrences(example.answers[0], gold[span.start : span.end]) == 1
        titles = Counter(article_of[document.text] for document in example.documents)
        assert titles[article_of[gold]] >= min(5, sizes[article_of[gold]] - 1) + 1


def test_a_seed_decides_which_and_where(fixtures: Path) -> None:
    path = fixtures / "articles.jsonl"
    once, again, other = load(path, count=9), load(path, count=9), load(path, count=9, seed=1)
    assert once.examples == again.examples
    assert len(other.examples) == 9
    assert [e.question for e in once.examples] != [e.question for e in other.examples]
    assert [e.id for e in other.examples[:2]] == ["cloze-1-0", "cloze-1-1"]
    # More of the same begin with the same.
    assert load(path, count=20).examples[:9] == once.examples


def test_articles_of_one_paragraph_are_left_out_and_counted(fixtures: Path, write: Write) -> None:
    given = (fixtures / "articles.jsonl").read_text(encoding="utf-8")
    lone = '{"title": "Ada", "text": "%s"}\n' % ("The town of Ada was built in 1250 here. " * 7)
    empty = '{"title": "Empty", "text": "short"}\n'
    result = load(write("more.jsonl", given + lone + empty), count=100)
    assert result.dropped == {"articles with fewer than two paragraphs": 2}
    assert result.examples == load(fixtures / "articles.jsonl", count=100).examples
    with pytest.raises(DataError, match="a context needs 10 paragraphs, 5 are given"):
        load(fixtures / "articles.jsonl", records=":1")

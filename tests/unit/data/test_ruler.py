from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Write

from sedem.errors import ConfigError, DataError
from sedem_lab.data.question_sets import open_examples
from sedem_lab.data.ruler import STEP, TEMPLATE
from sedem_lab.data.tokenizer import open_tokenizer

load = partial(open_examples, schema="ruler-qa2")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen questions on ten paragraphs each; neighbours share one paragraph."""
    records = []
    for number in range(16):
        towns = range(9 * number, 9 * number + 10)
        context = [
            [f"Town {town}", ["It lies on a river.", f" It has {town} mills." * (town % 4)]]
            for town in towns
        ]
        records.append(
            {
                "_id": f"q{number}",
                "question": f"How many mills has town {9 * number + 3}?",
                "answer": "3",
                "supporting_facts": [[f"Town {9 * number + 3}", 1], [f"Town {9 * number}", 0]],
                "context": context,
            }
        )
    path = tmp_path_factory.mktemp("ruler") / "hotpot.json"
    path.write_text(json.dumps(records))
    return path


def whole_prompt(example: Any) -> str:
    context = "\n\n".join(document.text for document in example.documents)
    return TEMPLATE.format(context=context, query=example.question)


def test_contexts_fill_the_length_and_hold_their_own_paragraphs(path: Path) -> None:
    count = open_tokenizer().count
    found = load(path, length=1500)
    assert len(found.examples) == 16
    for number, example in enumerate(found.examples):
        assert count(whole_prompt(example)) + 32 <= 1500
        texts = [document.text.partition("\n")[2] for document in example.documents]
        titles = [text.partition("\n")[0] for text in texts]
        assert {f"Town {9 * number + i}" for i in range(10)} <= set(titles)
        assert len(set(texts)) == len(texts)
        gold = {titles[span.document] for span in example.evidence}
        assert gold == {f"Town {9 * number + 3}", f"Town {9 * number}"}
        for place, document in enumerate(example.documents, start=1):
            assert document.name == f"Document {place}"
            assert document.text.startswith(f"Document {place}:\nTown ")
    assert max(count(whole_prompt(e)) for e in found.examples) > 1500 - 32 - 250  # STEP documents
    # The first question decides the number of documents.
    sizes = [len(example.documents) for example in found.examples]
    assert (
        STEP < sizes[0] == max(sizes) < len(load(path, length=3000, count=1).examples[0].documents)
    )
    # A question for which they are too many gives up ten at a time.
    assert {(sizes[0] - size) % STEP for size in sizes if size > STEP} == {0}


def test_every_context_is_shuffled_by_the_seed_alone(path: Path) -> None:
    first = load(path, length=1500, seed=7, count=1).examples[0]
    assert load(path, length=1500, seed=7, count=2).examples[0] == first
    assert load(path, length=1500, seed=8, count=1).examples[0] != first
    titles = [document.text.splitlines()[1] for document in first.documents]
    order = list(range(len(titles)))
    random.Random(7).shuffle(order)
    places = [order.index(i) for i in range(10)]
    assert [titles[place] for place in places] == [f"Town {i}" for i in range(10)]


def test_the_tokenizer_that_counts_can_be_named(path: Path, tiny_folder: Any) -> None:
    # Bytes instead of words: fewer documents fit, also beside a longer answer.
    for answer in (32, 400):
        found = load(path, length=3000, tokenizer=tiny_folder(), count=1, answer_tokens=answer)
        assert 2000 < len(whole_prompt(found.examples[0]).encode()) + answer <= 3000
    with pytest.raises(ConfigError, match=r"tokenizer '.*nowhere' is neither a local folder nor"):
        load(path, tokenizer=str(path.parent / "nowhere"))


def test_a_length_beyond_the_set_is_refused_with_the_largest(path: Path) -> None:
    with pytest.raises(
        DataError, match=r"length is 100,000, .* 145 paragraphs .* make only ([\d,]+) tokens;"
    ) as e:
        load(path, length=100_000)
    largest = int(str(e.value).split("make only ")[1].split(" ")[0].replace(",", ""))
    whole = load(path, length=largest, count=1).examples[0]
    assert len(whole.documents) == 145
    assert open_tokenizer().count(whole_prompt(whole)) + 32 == largest
    twice = load(path, length=2 * largest, count=1, repeat=True).examples[0]
    assert len(twice.documents) > 145
    assert len({d.text.partition("\n")[2] for d in twice.documents}) == 145


def test_questions_whose_own_paragraphs_are_too_long_are_counted(path: Path) -> None:
    found = load(path, length=416)
    assert found.dropped == {"its own paragraphs exceed 416 tokens": 16 - len(found.examples)}
    assert 0 < len(found.examples) < 16
    kept = {example.id for example in found.examples}
    lost = [f"q{number}" for number in range(16) if f"q{number}" not in kept]
    assert list(found.dropped_ids.values()) == [lost[:3]]


def test_a_set_without_questions_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match="no question for RULER's qa_2"):
        load(write("none.jsonl", ""))

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sedem.data.catalog import SETS, open_examples, parse_records, sniff
from sedem.errors import ConfigError, DataError

Write = Callable[[str, Any], Path]

FILES = {
    "squad.json": ("squad", 36),
    "covidqa.json": ("covidqa", 6),
    "hotpotqa-native.json": ("hotpotqa", 2),
    "hotpotqa-hub.jsonl": ("hotpotqa", 2),
    "2wikimultihopqa.json": ("2wikimultihopqa", 2),
    "musique.jsonl": ("musique", 2),
    "qasper.json": ("qasper", 3),
}
OWN = {
    "documents": [{"name": "a", "text": "The rent is 900 euros."}],
    "question": "What is the rent?",
    "answers": ["900 euros"],
}


@pytest.mark.parametrize("name", FILES)
def test_the_schema_of_real_records_is_found_out(fixtures: Path, name: str) -> None:
    schema, count = FILES[name]
    assert sniff(fixtures / name) == schema
    found = open_examples(fixtures / name)
    assert len(found.examples) == count
    assert found.examples == open_examples(fixtures / name, schema).examples


def test_own_questions_are_found_out_even_compressed(tmp_path: Path, write: Write) -> None:
    path = write("own.jsonl", [OWN])
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert sniff(path) == sniff(packed) == "own"
    assert open_examples(packed).examples == open_examples(path).examples


def test_a_file_of_no_known_schema_is_refused(fixtures: Path, write: Write) -> None:
    with pytest.raises(DataError, match=r"articles\.jsonl' is in no schema .*own, squad, covidqa"):
        sniff(fixtures / "articles.jsonl")
    with pytest.raises(DataError, match="own questions are JSON lines of"):
        sniff(write("empty.jsonl", ""))


@pytest.mark.parametrize("schema", ["cloze", "exact-facts"])
def test_articles_become_examples_under_a_named_schema(fixtures: Path, schema: str) -> None:
    result = open_examples(fixtures / "articles.jsonl", schema, count=3, seed=4)
    assert len(result.examples) == 3
    assert all(len(example.documents) == 10 for example in result.examples)


def test_an_unknown_schema_is_refused_with_the_known_ones(fixtures: Path) -> None:
    with pytest.raises(ConfigError, match=f"no schema 'sqad'; known are {', '.join(SETS)}"):
        open_examples(fixtures / "squad.json", "sqad")


def test_an_unknown_option_is_refused(fixtures: Path) -> None:
    with pytest.raises(ConfigError, match=r"squad\.json' as squad: .*'distracters'"):
        open_examples(fixtures / "squad.json", distracters=3)


def test_options_reach_the_loader(fixtures: Path) -> None:
    few = open_examples(fixtures / "squad.json", records="1:", distractors=2, seed=3)
    assert len(few.examples) == 24
    assert {len(example.documents) for example in few.examples} == {3}


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        ("squad", {"data": [{"paragraphs": [{"context": "one"}]}]}),
        ("squad", {"data": ["Ada"]}),
        ("squad", {"data": [{"title": "Ada"}]}),
        ("covidqa", {"data": [{"paragraphs": [{"context": "one", "qas": []}]}]}),
        ("hotpotqa", [{"_id": "a"}]),
        ("hotpotqa", [{"_id": "a", "context": [["T", ["s"]]], "supporting_facts": None}]),
        ("2wikimultihopqa", [{"_id": "a", "context": "[broken", "supporting_facts": []}]),
        ("musique", [{"id": "a", "paragraphs": [{"title": "T"}]}]),
        (
            "musique",
            [
                {
                    "id": "a",
                    "paragraphs": [{"title": "T", "paragraph_text": "t", "is_supporting": True}],
                    "question": "What?",
                    "answer": None,
                }
            ],
        ),
    ],
)
def test_records_of_another_shape_are_a_fault_of_the_file(
    write: Write, schema: str, content: Any
) -> None:
    with pytest.raises(DataError, match=rf"odd\.json' is not in the schema of {schema}: "):
        open_examples(write("odd.json", content), schema)


@pytest.mark.parametrize(
    ("text", "kept"),
    [(None, [0, 1, 2, 3]), ("1:", [1, 2, 3]), (":2", [0, 1]), ("1:3", [1, 2]), ("-1:", [3])],
)
def test_records_are_a_slice(text: str | None, kept: list[int]) -> None:
    assert [0, 1, 2, 3][parse_records(text)] == kept


@pytest.mark.parametrize("text", ["", "5", "1:2:3", "a:", "1.5:"])
def test_records_that_are_no_slice_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"records is '{text}'; it must be 'start:stop'"):
        parse_records(text)

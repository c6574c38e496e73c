from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.conftest import Write

from sedem import Document
from sedem.errors import DataError
from sedem_lab.data.custom_questions import to_entry
from sedem_lab.data.examples import Evidence, Example, distinct_names
from sedem_lab.data.question_sets import open_examples

load = partial(open_examples, schema="own")

ENTRY: dict[str, Any] = {
    "id": "lease-1",
    "documents": [
        {"name": "lease.txt", "text": "The rent is 900 euros."},
        {"name": "house.txt", "text": "Pets need a word."},
    ],
    "question": "What is the rent?",
    "answers": ["900 euros", "900"],
    "evidence": [{"document": "lease.txt", "start": 12, "end": 21}],
}


def test_an_entry_becomes_an_example(write: Write) -> None:
    (example,) = load(write("own.jsonl", [ENTRY])).examples
    assert example == Example(
        "lease-1",
        (
            Document("lease.txt", "The rent is 900 euros."),
            Document("house.txt", "Pets need a word."),
        ),
        "What is the rent?",
        ("900 euros", "900"),
        (Evidence(0, 12, 21),),
    )


def test_id_and_evidence_may_be_left_out_or_null(write: Write, tmp_path: Path) -> None:
    bare = {key: value for key, value in ENTRY.items() if key not in ("id", "evidence")}
    null = {**bare, "id": None, "evidence": None}
    result = load(write("bare.jsonl", [bare, null, {**ENTRY, "evidence": []}]))
    assert result.name == "bare"
    assert [(e.id, e.evidence) for e in result.examples] == [
        ("bare.jsonl, line 1", ()), ("bare.jsonl, line 2", ()), ("lease-1", ())
    ]  # fmt: skip
    Dataset.from_list([ENTRY, bare]).to_parquet(tmp_path / "own.parquet")
    found = load(tmp_path / "own.parquet").examples
    assert [(e.id, len(e.evidence)) for e in found] == [("lease-1", 1), ("own.parquet, row 2", 0)]


def test_the_line_of_an_example_is_read_back(write: Write) -> None:
    examples = load(write("own.jsonl", [ENTRY, {**ENTRY, "id": "ö"}])).examples
    again = write("again.jsonl", [to_entry(example) for example in examples])
    assert load(again).examples == examples


DOCUMENT = ENTRY["documents"][0]
SPAN = ENTRY["evidence"][0]
MISSING = object()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": MISSING}, "documents: field required"),
        ({"question": MISSING}, "question: field required"),
        ({"answers": MISSING}, "answers: field required"),
        ({"answer": "900"}, "answer is '900'; extra inputs are not permitted"),
        ({"documents": {"a": "b"}}, r"documents: a list of objects \{name, text\} is needed"),
        ({"documents": []}, r"documents is \[\]; list should have"),
        ({"documents": "lease.txt"}, "documents is 'lease.txt'; input should be a valid list"),
        ({"documents": ["lease.txt"]}, r"documents\[0\] is 'lease\.txt'; input should be a valid"),
        ({"documents": [{"name": "b", "text": " "}]}, r"documents\[0\]\.text is ' '; text with m"),
        ({"documents": [DOCUMENT, DOCUMENT]}, "'lease-1' has two documents of one name"),
        ({"documents": [{"name": "a", "text": "\ud83e"}]}, r"\.text is '\\ud83e'; it must be"),
        ({"question": "\ud83e?"}, r"question is '\\ud83e\?'; it must be Unicode text"),
        ({"answers": ["900", "\ud83e"]}, r"answers\[1\] is '\\ud83e'; it must be Unicode text"),
        ({"id": "\ud83e"}, r"id is '\\ud83e'; it must be Unicode text"),
        ({"id": True}, "id is True; input should be a valid str"),
        ({"question": ""}, "question is ''; text with more than white space is needed"),
        ({"answers": []}, r"answers is \[\]; list should have"),
        ({"answers": [900]}, r"answers\[0\] is 900; input should be a valid str"),
        ({"answers": ["900", ""]}, r"answers\[1\] is ''; text with more than white space"),
        ({"evidence": [SPAN, {**SPAN, "document": "no"}]}, r"\[1\]\.document is 'no'; give the n"),
        ({"evidence": [{**SPAN, "start": "12"}]}, r"evidence\[0\]\.start is '12'; input should"),
        ({"evidence": [{**SPAN, "end": 23}]}, "'lease-1' has evidence 12:23 in document 0"),
    ],
)
def test_an_error_names_the_line_and_what_is_wrong(
    write: Write, changes: dict[str, Any], message: str
) -> None:
    wrong = {name: value for name, value in {**ENTRY, **changes}.items() if value is not MISSING}
    path = write("wrong.jsonl", [ENTRY, wrong])
    with pytest.raises(DataError, match=rf"wrong\.jsonl', line 2.*{message}"):
        load(path)


def test_two_lines_of_one_id_are_both_named(write: Write) -> None:
    with pytest.raises(DataError, match=r"line 3: the id 'lease-1' is also that of '.*', line 1;"):
        load(write("twins.jsonl", [ENTRY, {**ENTRY, "id": "other"}, ENTRY]))


def test_shards_without_ids_go_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {key: value for key, value in ENTRY.items() if key != "id"}
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text(f"{json.dumps(bare)}\n{json.dumps(bare)}\n")
    (folder / "c.json").write_text(json.dumps(bare, indent=1))
    Dataset.from_list([ENTRY, bare]).to_parquet(folder / "d.parquet")
    names = ["a.jsonl, line 1", "a.jsonl, line 2", "b.jsonl, line 1", "b.jsonl, line 2", "c.json"]
    every = [*names, "lease-1", "d.parquet, row 2"]
    assert [e.id for e in open_examples(folder).examples] == every
    assert [e.id for e in open_examples(folder, records="1:3").examples] == every[1:3]
    monkeypatch.chdir(folder)
    assert [e.id for e in open_examples(".").examples] == every
    assert [e.id for e in open_examples("b.jsonl").examples] == names[2:4]


# Examples


DOCUMENTS = (Document("a", "The rent is 900 euros."), Document("b", "It is due in May."))


def example(**changes: Any) -> Example:
    fields: dict[str, Any] = {
        "id": "q1",
        "documents": DOCUMENTS,
        "question": "What is the rent?",
        "answers": ("900 euros",),
        "evidence": (Evidence(0, 12, 21),),
        **changes,
    }
    return Example(**fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": ()}, "'q1' has no documents"),
        ({"question": " \n"}, "'q1' has an empty question"),
        ({"answers": ()}, "'q1' has no answer, or an empty one"),
        ({"answers": ("yes", " ")}, "'q1' has no answer, or an empty one"),
        ({"id": "q\udce9"}, r"the id of an example is not Unicode text \('\\udce9' at char"),
        ({"question": "\ud83e?"}, "the question of example 'q1' is not Unicode text"),
        ({"answers": ("yes", "\ud83e")}, "an answer of example 'q1' is not Unicode text"),
        ({"evidence": (Evidence(2, 0, 1),)}, "evidence 0:1 in document 2, which has no such"),
        ({"evidence": (Evidence(0, -1, 4),)}, "evidence -1:4 in document 0"),
        ({"evidence": (Evidence(0, 4, 4),)}, "evidence 4:4 in document 0"),
    ],
)
def test_an_impossible_example_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        example(**changes)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "a (2)", "a (2) (2)", "", "untitled", "b"]), max_size=8))
def test_names_become_distinct(names: list[str]) -> None:
    distinct = distinct_names(names)
    assert len(distinct) == len(names)
    assert len(set(distinct)) == len(names)
    assert distinct_names(["Paris", "Paris ", "", " "]) == [
        "Paris", "Paris (2)", "untitled", "untitled (2)"
    ]  # fmt: skip
    # The first of each name keeps it, unless a count made before took it.
    assert all(new.startswith(old.strip()) for old, new in zip(names, distinct, strict=True))

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Write

from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.data.question_sets import open_examples

load_2wiki = partial(open_examples, schema="2wikimultihopqa")


def gold_names(example: Example) -> list[str]:
    return [example.documents[span.document].name for span in example.evidence]


def only(result: ExampleSet) -> Example:
    (example,) = result.examples
    return example


RECORD: dict[str, Any] = {
    "_id": "q1",
    "question": "Where was the founder of the brewery born?",
    "answer": "Amsterdam",
    "supporting_facts": [["Brewery", 0], ["Founder", 1]],
    "context": [
        ["Bridge", ["It is long.", "It is old."]],
        ["Founder", ["He was rich.", "He was born in Amsterdam."]],
        ["Brewery", ["It was founded."]],
    ],
}
COLUMNS = {
    "title": [title for title, _ in RECORD["context"]],
    "sentences": [sentences for _, sentences in RECORD["context"]],
}
PAIRS, SUPPORT = RECORD["context"], RECORD["supporting_facts"]
LAYOUTS: list[tuple[Any, Any]] = [
    (
        [{"title": t, "sentences": s} for t, s in PAIRS],
        [{"title": t, "sent_id": s} for t, s in SUPPORT],
    ),
    (
        [{"title": t, "content": s} for t, s in PAIRS],
        {"title": ["Brewery", "Founder"], "sent_id": [0, 1]},
    ),
    (COLUMNS, json.dumps(SUPPORT)),
    ({"title": COLUMNS["title"], "content": COLUMNS["sentences"]}, SUPPORT),
    (json.dumps(PAIRS), SUPPORT),
    (json.dumps(COLUMNS), SUPPORT),
    # A body that was not split into sentences.
    ({"title": COLUMNS["title"], "content": [" ".join(s) for s in COLUMNS["sentences"]]}, SUPPORT),
]


@pytest.mark.parametrize(("context", "facts"), LAYOUTS)
@pytest.mark.parametrize("name", ["array.json", "lines.jsonl"])
def test_every_layout_gives_the_same_example(
    write: Write, context: Any, facts: Any, name: str
) -> None:
    result = load_2wiki(write(name, [{**RECORD, "context": context, "supporting_facts": facts}]))
    example = only(result)
    assert not result.noted
    assert example == only(load_2wiki(write("native.json", [RECORD])))
    assert [document.text for document in example.documents] == [
        "Bridge\nIt is long. It is old.",
        "Founder\nHe was rich. He was born in Amsterdam.",
        "Brewery\nIt was founded.",
    ]
    assert gold_names(example) == ["Founder", "Brewery"]
    for span in example.evidence:
        assert (span.start, span.end) == (0, len(example.documents[span.document].text))


@pytest.mark.parametrize(
    ("name", "identity", "answers", "gold"),
    [
        ("hotpotqa-native.json", "5ac3a60f5542993915413880", "no", "Géza von Cziffra|King Vidor"),
        (
            "hotpotqa-hub.jsonl",
            "5a8c9641554299585d9e36f5",
            "three",
            "Alias (season 3)|Ricky Gervais",
        ),
        (
            "2wikimultihopqa.json",
            "307d502e0bdb11eba7f7acde48001122",
            "Rome",
            "Perdonami!|Mario Costa (director)",
        ),
        (
            "musique.jsonl",
            "3hop2__130734_798404_834843",
            "U.S.|America|U.S|the United States|United States|US",
            "McRae, Arkansas|Midway (near Pleasant Plains), White County, Arkansas|KAGH-FM",
        ),
    ],
)
def test_real_records_are_read(
    fixtures: Path, name: str, identity: str, answers: str, gold: str
) -> None:
    result = open_examples(fixtures / name)
    assert not result.dropped
    if name.startswith("hotpotqa"):  # its sentences bring their own spaces
        assert all("  " not in d.text for e in result.examples for d in e.documents)
    example = result.examples[1]
    assert (example.id, "|".join(example.answers)) == (identity, answers)
    assert "|".join(gold_names(example)) == gold
    assert len(example.documents) == (20 if name == "musique.jsonl" else 10)


def test_every_paragraph_of_a_repeated_gold_title_is_evidence(write: Write) -> None:
    again = [["Founder", ["Another man."]], *RECORD["context"]]
    example = only(load_2wiki(write("again.json", [{**RECORD, "context": again}])))
    assert gold_names(example) == ["Founder", "Founder (2)", "Brewery"]


def test_a_table_of_columns_gives_the_same_examples(fixtures: Path, write: Write) -> None:
    native = json.loads((fixtures / "2wikimultihopqa.json").read_text(encoding="utf-8"))
    table = {
        field: {str(10 * i): record[field] for i, record in enumerate(native)}
        for field in native[0]
    }
    path = write("table.json", table)
    assert open_examples(path).examples == load_2wiki(fixtures / "2wikimultihopqa.json").examples


def test_what_is_odd_about_labels_is_counted(fixtures: Path, write: Write) -> None:
    assert load_2wiki(fixtures / "2wikimultihopqa.json").noted == {
        "supporting fact past the last sentence": 1
    }
    facts = [["Brewery", 7], ["Castle", 0]]
    context = [*RECORD["context"], ["", [" "]]]
    odd = {**RECORD, "_id": "odd", "supporting_facts": facts, "context": context}
    result = load_2wiki(write("odd.json", [RECORD, odd]))
    assert len(result.examples[1].documents) == 3
    assert gold_names(result.examples[1]) == ["Brewery"]
    assert result.noted == {
        "supporting fact past the last sentence": 1,
        "supporting fact on a paragraph outside the context": 1,
        "empty paragraph left out": 1,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": []}, "no context"),
        ({"supporting_facts": [["Castle", 0]]}, "no gold paragraph in the context"),
        ({"answer": " "}, "no answer"),
        ({"question": ""}, "no question"),
    ],
)
def test_what_cannot_be_used_is_dropped_and_counted(
    write: Write, changes: dict[str, Any], reason: str
) -> None:
    result = load_2wiki(write("dropped.json", [{**RECORD, **changes}, RECORD, RECORD]))
    assert [example.id for example in result.examples] == ["q1"]
    assert result.dropped == {reason: 1, "id given before": 1}
    assert result.dropped_ids[reason] == ["q1"]

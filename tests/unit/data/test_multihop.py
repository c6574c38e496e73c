from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sedem.data.examples import Example, ExampleSet
from sedem.data.question_sets import open_examples, sniff
from sedem.errors import DataError

Write = Callable[[str, Any], Path]

load_hotpot = partial(open_examples, schema="hotpotqa")
load_2wiki = partial(open_examples, schema="2wikimultihopqa")
load_musique = partial(open_examples, schema="musique")


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
CONTEXTS: dict[str, Any] = {
    "pairs": RECORD["context"],
    "objects of sentences": [{"title": t, "sentences": s} for t, s in RECORD["context"]],
    "objects of content": [{"title": t, "content": s} for t, s in RECORD["context"]],
    "columns of sentences": COLUMNS,
    "columns of content": {"title": COLUMNS["title"], "content": COLUMNS["sentences"]},
    "JSON string of pairs": json.dumps(RECORD["context"]),
    "JSON string of columns": json.dumps(COLUMNS),
}
FACTS: dict[str, Any] = {
    "pairs": RECORD["supporting_facts"],
    "objects": [{"title": t, "sent_id": s} for t, s in RECORD["supporting_facts"]],
    "columns": {"title": ["Brewery", "Founder"], "sent_id": [0, 1]},
    "JSON string": json.dumps(RECORD["supporting_facts"]),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("name", ["array.json", "lines.jsonl"])
def test_every_layout_gives_the_same_example(
    write: Write, context: str, facts: str, name: str
) -> None:
    record = {**RECORD, "context": CONTEXTS[context], "supporting_facts": FACTS[facts]}
    example = only(load_2wiki(write(name, [record])))
    assert example == only(load_2wiki(write("native.json", [RECORD])))
    assert [document.text for document in example.documents] == [
        "Bridge\nIt is long. It is old.",
        "Founder\nHe was rich. He was born in Amsterdam.",
        "Brewery\nIt was founded.",
    ]
    assert gold_names(example) == ["Founder", "Brewery"]


def test_a_gold_paragraph_is_evidence_as_a_whole(write: Write) -> None:
    example = only(load_hotpot(write("one.json", [RECORD])))
    for span in example.evidence:
        assert (span.start, span.end) == (0, len(example.documents[span.document].text))


def test_sentences_of_hotpotqa_bring_their_own_spaces(fixtures: Path) -> None:
    for name in ("hotpotqa-native.json", "hotpotqa-hub.jsonl"):
        result = load_hotpot(fixtures / name)
        assert len(result.examples) == 2
        for example in result.examples:
            assert all("  " not in document.text for document in example.documents)
            assert all(gold_names(example))


def test_sentences_of_2wiki_are_joined_by_spaces(fixtures: Path) -> None:
    example = load_2wiki(fixtures / "2wikimultihopqa.json").examples[0]
    assert example.documents[5].text == (
        "Maftan\nMaftan( also known as Rūstāy -e Felesţīn) is a village in Ahudasht Rural "
        "District, Shavur District, Shush County, Khuzestan Province, Iran. At the 2006 census, "
        "its population was 45, in 6 families."
    )


@pytest.mark.parametrize(
    ("load", "name", "identity", "answers", "gold", "documents"),
    [
        (
            load_hotpot,
            "hotpotqa-native.json",
            "5ac3a60f5542993915413880",
            ("no",),
            ["Géza von Cziffra", "King Vidor"],
            10,
        ),
        (
            load_hotpot,
            "hotpotqa-hub.jsonl",
            "5a8c9641554299585d9e36f5",
            ("three",),
            ["Alias (season 3)", "Ricky Gervais"],
            10,
        ),
        (
            load_2wiki,
            "2wikimultihopqa.json",
            "307d502e0bdb11eba7f7acde48001122",
            ("Rome",),
            ["Perdonami!", "Mario Costa (director)"],
            10,
        ),
        (
            load_musique,
            "musique.jsonl",
            "3hop2__130734_798404_834843",
            ("U.S.", "America", "U.S", "the United States", "United States", "US"),
            [
                "McRae, Arkansas",
                "Midway (near Pleasant Plains), White County, Arkansas",
                "KAGH-FM",
            ],
            20,
        ),
    ],
)
def test_real_records_are_read(
    fixtures: Path,
    load: Callable[[Path], ExampleSet],
    name: str,
    identity: str,
    answers: tuple[str, ...],
    gold: list[str],
    documents: int,
) -> None:
    result = load(fixtures / name)
    assert not result.dropped
    example = result.examples[1]
    assert (example.id, example.answers) == (identity, answers)
    assert gold_names(example) == gold
    assert len(example.documents) == documents


def test_fewer_than_ten_paragraphs_are_no_problem(fixtures: Path) -> None:
    assert len(load_hotpot(fixtures / "hotpotqa-native.json").examples[0].documents) == 4


def test_a_repeated_title_makes_distinct_names(fixtures: Path) -> None:
    names = [d.name for d in load_2wiki(fixtures / "2wikimultihopqa.json").examples[0].documents]
    assert names[:2] == ["Baba Khvarazm-e Mojir", "Baba Khvarazm-e Mojir (2)"]
    assert len(set(names)) == 10


def test_every_paragraph_of_a_repeated_gold_title_is_evidence(write: Write) -> None:
    again = [["Founder", ["Another man."]], *RECORD["context"]]
    example = only(load_2wiki(write("again.json", [{**RECORD, "context": again}])))
    assert gold_names(example) == ["Founder", "Founder (2)", "Brewery"]


def test_a_fact_past_the_last_sentence_keeps_its_paragraph(write: Write) -> None:
    record = {**RECORD, "supporting_facts": [["Brewery", 7]]}
    assert gold_names(only(load_2wiki(write("out.json", [record])))) == ["Brewery"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"context": []}, "no context"),
        ({"supporting_facts": [["Castle", 0]]}, "no gold paragraph in the context"),
    ],
)
def test_what_cannot_be_used_is_dropped_and_counted(
    write: Write, changes: dict[str, Any], reason: str
) -> None:
    result = load_2wiki(write("dropped.json", [{**RECORD, **changes}, RECORD]))
    assert [example.id for example in result.examples] == ["q1"]
    assert (result.dropped, result.dropped_ids) == ({reason: 1}, {reason: ["q1"]})


def test_records_are_questions(fixtures: Path, write: Write) -> None:
    lines = [{**RECORD, "_id": f"q{number}"} for number in range(5)]
    path = write("five.jsonl", lines)
    assert [e.id for e in load_hotpot(path, records="1:4").examples] == ["q1", "q2", "q3"]
    assert len(load_musique(fixtures / "musique.jsonl", records="1:").examples) == 1


def test_musique_reads_lines_and_arrays_alike(fixtures: Path, write: Write) -> None:
    lines = (fixtures / "musique.jsonl").read_text(encoding="utf-8").splitlines()
    array = write("musique.json", [json.loads(line) for line in lines])
    assert load_musique(array).examples == load_musique(fixtures / "musique.jsonl").examples


def test_extra_fields_of_copies_are_passed_over(write: Write) -> None:
    record = {**RECORD, "prediction": "Rome", "level": "hard"}
    assert only(load_hotpot(write("copy.json", [record]))).answers == ("Amsterdam",)


def test_an_unknown_layout_is_refused(write: Write) -> None:
    with pytest.raises(DataError, match=r"context is \{'0': 'Bridge'\}; a list is needed"):
        load_2wiki(write("odd.json", [{**RECORD, "context": {"0": "Bridge"}}]))


def test_a_table_of_columns_gives_the_same_examples(fixtures: Path, write: Write) -> None:
    native = json.loads((fixtures / "2wikimultihopqa.json").read_text(encoding="utf-8"))
    table = {
        field: {str(10 * i): record[field] for i, record in enumerate(native)}
        for field in native[0]
    }
    path = write("table.json", table)
    assert open_examples(path).examples == load_2wiki(fixtures / "2wikimultihopqa.json").examples
    # The schema is seen even where a long column hides the names of the others.
    long = {"_id": table["_id"], "question": {k: f"{q}{' ' * 150_000}" for k, q in
            table["question"].items()}, **table}  # fmt: skip
    assert len(open_examples(write("long.json", long)).examples) == 2
    assert sniff(write("long.json", long)) == "2wikimultihopqa"


def test_a_body_that_was_not_split_is_one_text(write: Write) -> None:
    context = {"title": COLUMNS["title"], "content": [" ".join(s) for s in COLUMNS["sentences"]]}
    result = load_2wiki(write("unsplit.json", [{**RECORD, "context": context}]))
    assert only(result) == only(load_2wiki(write("native.json", [RECORD])))
    assert not result.noted


def test_what_is_odd_about_labels_is_counted(fixtures: Path, write: Write) -> None:
    assert load_2wiki(fixtures / "2wikimultihopqa.json").noted == {
        "supporting fact past the last sentence": 1
    }
    facts = [["Brewery", 7], ["Castle", 0]]
    context = [*RECORD["context"], ["", [" "]]]
    odd = {**RECORD, "_id": "odd", "supporting_facts": facts, "context": context}
    result = load_2wiki(write("odd.json", [RECORD, odd]))
    assert len(result.examples[1].documents) == 3
    assert result.noted == {
        "supporting fact past the last sentence": 1,
        "supporting fact on a paragraph outside the context": 1,
        "empty paragraph left out": 1,
    }


def test_a_second_record_of_an_id_is_dropped(fixtures: Path, write: Write) -> None:
    again = {**RECORD, "answer": "Rome"}
    result = load_hotpot(write("twins.json", [RECORD, again, {**RECORD, "_id": "q2"}]))
    assert [(e.id, e.answers) for e in result.examples] == [
        ("q1", ("Amsterdam",)), ("q2", ("Amsterdam",))
    ]  # fmt: skip
    assert result.dropped == {"id given before": 1}
    line = (fixtures / "musique.jsonl").read_text(encoding="utf-8").splitlines()[0]
    path = write("musique.jsonl", f"{line}\n{line}\n")
    assert load_musique(path).dropped == {"id given before": 1}


def test_questions_without_words_or_answer_are_dropped(write: Write) -> None:
    records = [{**RECORD, "answer": " "}, {**RECORD, "question": ""}, RECORD]
    result = load_2wiki(write("blank.json", records))
    assert len(result.examples) == 1
    assert result.dropped == {"no answer": 1, "no question": 1}
    assert result.dropped_ids == {"no answer": ["q1"], "no question": ["q1"]}

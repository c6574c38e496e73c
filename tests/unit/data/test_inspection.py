from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from sedem import Document
from sedem.bank.blocks import BlockRow
from sedem.errors import ConfigError, DataError
from sedem_lab.data.corpus import holds_texts, read_texts
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.data.inspection import MOST_BINS, bins, blocks, inspect_examples, inspect_texts, plot
from sedem_lab.data.labels import from_evidence
from sedem_lab.data.question_sets import open_examples
from sedem_lab.data.tokenizer import Tokenizer, open_tokenizer


@pytest.fixture
def letters(tiny_folder: object) -> Tokenizer:
    """Every byte is a token, so that lengths can be read off."""
    return open_tokenizer(tiny_folder())  # type: ignore[operator]


def test_lengths_and_labels_are_those_of_the_examples(letters: Tokenizer) -> None:
    long, short = Document("long", "x" * 300), Document("short", "y" * 10)
    text = Document("d", "x" * 130 + " The rent is 900 euros.")
    examples = ExampleSet(
        "small",
        [
            Example("a", (long, short), "Why?", ("yes",), (Evidence(0, 127, 129),)),
            Example("b", (short,), "Why?", ("nobody", "no")),
            Example("found", (text,), "What is the rent?", ("900 euros",)),
        ],
        Counter({"no answer": 2}),
        Counter({"repaired": 1}),
    )
    found = inspect_examples(examples, letters)
    assert found.measures == {
        "tokens per context": [310, 10, 153],
        "documents per context": [2, 1, 1],
        "blocks of 128 tokens per context": [4, 1, 2],
        "positive blocks per example": [2, 0, 1],
        "tokens per answer": [3, 6, 9],
    }
    assert found.counts == {
        "examples": 3,
        "measured": 3,
        "with evidence": 1,
        "labelled by answer string": 2,
        "without any positive block": 1,
        "different documents": 3,
    }
    assert (found.dropped, found.noted) == ({"no answer": 2}, {"repaired": 1})
    assert found.to_dict()["measures"]["documents per context"] == {
        "mean": 1.33, "median": 1, "min": 1, "max": 2
    }  # fmt: skip
    first = inspect_examples(examples, letters, limit=1, segment_length=50)
    assert first.counts["examples"] == 3 and first.counts["measured"] == 1
    assert first.measures["blocks of 50 tokens per context"] == [7]


def test_blocks_are_the_windows_that_are_read(fixtures: Path, backbone: object) -> None:
    from sedem.method.segments import segment_text

    examples = open_examples(fixtures / "covidqa.json").examples
    text = examples[0].documents[0].text
    cut = segment_text(text, backbone, 128, "window")  # type: ignore[arg-type]
    ends = cut.ends.gather(1, cut.lengths[:, None] - 1)[:, 0]
    expected = list(zip(cut.starts[:, 0].tolist(), ends.tolist(), strict=True))
    tokenizer = open_tokenizer(backbone.name)  # type: ignore[attr-defined]
    (spans,) = tokenizer.spans([text])
    assert blocks(spans, 128) == expected
    rows = [BlockRow(0, start, end, ()) for start, end in expected]
    found = inspect_examples(ExampleSet("one", examples[:1]), tokenizer)
    positive = sum(from_evidence(rows, examples[0].evidence))
    assert found.measures["positive blocks per example"] == [positive]


def test_texts_are_counted(fixtures: Path, letters: Tokenizer) -> None:
    texts = list(read_texts(fixtures / "articles.jsonl"))
    found = inspect_texts("articles.jsonl", texts, letters)
    assert found.counts["texts"] == 9
    assert found.counts["characters"] == sum(map(len, texts))
    assert found.measures["tokens per text"] == [len(text.encode()) for text in texts]
    assert inspect_texts("articles.jsonl", texts, letters, limit=2).counts["texts"] == 2
    with pytest.raises(DataError, match=r"none holds no example \(2 no context\)"):
        inspect_examples(ExampleSet("none", [], Counter({"no context": 2})), letters)
    with pytest.raises(DataError, match=r"'none\.txt' holds no text"):
        inspect_texts("none.txt", [], letters)


@pytest.mark.parametrize("values", [[5], [3, 14], [7, 12_345, 600]])
def test_bins_hold_every_value_once(values: list[int]) -> None:
    assert bins([1, 1, 3]) == [(1, 1, 2), (2, 2, 0), (3, 3, 1)]
    found = bins(values)
    assert len(found) <= MOST_BINS
    assert sum(number for *_, number in found) == len(values)
    for low, high, number in found:
        assert number == sum(low <= value <= high for value in values)
    assert all(after[0] == before[1] + 1 for before, after in pairwise(found))


def test_a_picture_has_a_panel_for_every_measure(
    fixtures: Path, letters: Tokenizer, tmp_path: Path
) -> None:
    found = inspect_examples(open_examples(fixtures / "musique.jsonl"), letters)
    plot(found, tmp_path / "musique.svg")
    drawn = (tmp_path / "musique.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and drawn.count('id="axes_') == len(found.measures)
    with pytest.raises(DataError, match=r"musique\.nothing' cannot be drawn: "):
        plot(found, tmp_path / "musique.nothing")


def test_plain_text_is_told_from_questions(fixtures: Path, tmp_path: Path) -> None:
    assert holds_texts(fixtures / "articles.jsonl")
    assert holds_texts("hub:DKYoon/SlimPajama-6B")
    for name in ("musique.jsonl", "hotpotqa-hub.jsonl", "squad.json", "no.jsonl"):
        assert not holds_texts(fixtures / name)
    (tmp_path / "a.txt").write_text("text")
    assert holds_texts(tmp_path) and holds_texts(tmp_path / "a.txt")


def test_the_shipped_tokenizer_counts_by_default() -> None:
    tokenizer = open_tokenizer()
    assert tokenizer.name == "sedem-nano"
    assert 3 <= tokenizer.count("The rent is due in May.") < 12
    with pytest.raises(ConfigError, match="'no/where' is neither a local folder nor available"):
        open_tokenizer("no/where")

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sedem import SeDeM
from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError, DataError
from sedem_lab.data.windows import Windows
from sedem_lab.training import sources
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.recipe import DataSource, Mixture, TextSource
from sedem_lab.training.sources import open_windows, read_mixture, read_source

# Text

TEXT = TextSource(path="articles.jsonl", continuation=8, held_out=2, evaluation_windows=6)


@pytest.fixture
def windows_of(backbone: Backbone, fixtures: Path, tmp_path: Path) -> Any:
    """Opens training and evaluation windows of 16 and 8 tokens."""

    def opened(**changes: Any) -> Any:
        recipe: Any = SimpleNamespace(
            optimization=SimpleNamespace(seed=0), data_root=fixtures, cache=tmp_path
        )
        return open_windows(TEXT.with_changes(**changes), recipe, backbone, 16)

    return opened


def test_held_out_texts_are_evaluated_and_never_trained_on(
    windows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[range | None] = []
    build = Windows.__init__

    def noted(self: Windows, *args: Any) -> None:
        texts.append(args[4])
        build(self, *args)

    monkeypatch.setattr(Windows, "__init__", noted)
    training, evaluation = windows_of()
    assert texts == [range(7), range(7, 9)]
    assert len(evaluation) == 6
    assert len(training) > 500
    with pytest.raises(ConfigError, match=r"text\.held_out is 9, the corpus has 9 texts"):
        windows_of(held_out=9)


def test_text_of_the_hub_is_not_looked_for_in_a_folder(
    windows_of: Any, fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "hub:DKYoon/SlimPajama-6B"
    asked: list[Any] = []
    open_corpus = sources.TokenizedCorpus.open

    def local(given: Any, backbone: Any, cache: Path, *settings: Any) -> Any:
        asked.append((given, settings))
        return open_corpus(fixtures / "articles.jsonl", backbone, cache, *settings)

    monkeypatch.setattr(sources.TokenizedCorpus, "open", local)
    windows_of(path=source, tokens=9000, held_out=0)
    assert asked == [(source, ((), 9000, None, "text", None))]


def test_tokens_and_windows_can_be_limited(
    windows_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    training, evaluation = windows_of(tokens=240, windows=11, held_out=0)
    # Windows of 16 and 8 tokens of the first 240; an offset may cost one.
    assert 9 <= len(training) <= 10 and evaluation is None
    message = f"text.windows asks for 11 windows, the text that is read has {len(training)};"
    assert message in caplog.text
    assert len(windows_of(windows=5, held_out=0)[0]) == 5


# Questions


def test_a_source_logs_what_it_gave_and_what_was_left_out(
    model: SeDeM, fixtures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = BlockDataset(model, answer_limit=8)
    with caplog.at_level(logging.INFO):
        read_source(dataset, DataSource(path="musique.jsonl"), fixtures)
        read_source(dataset, DataSource(path="qasper.json"), fixtures)
        read_source(dataset, DataSource(path="hotpotqa-hub.jsonl", repeat=2), fixtures)
    assert [record.getMessage() for record in caplog.records] == [
        "musique: 2 examples (2 in an epoch); left out: none",
        "qasper: 3 examples (1 in an epoch); left out: "
        "{'unanswerable': 1, 'answer longer than 8 tokens': 2}",
        "hotpotqa: 2 examples (2 in an epoch); left out: {'answer longer than 8 tokens': 1}",
    ]


def test_a_source_may_be_a_public_name_whose_training_split_is_read(
    model: SeDeM, fixtures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    open_examples = sources.open_examples

    def local(source: Any, schema: Any = None, **options: Any) -> Any:
        asked.append((source, options.pop("split", None)))
        return open_examples(fixtures / "musique.jsonl", schema, **options)

    monkeypatch.setattr(sources, "open_examples", local)
    dataset = BlockDataset(model, answer_limit=100)
    read_source(dataset, DataSource(path="musique"), tmp_path)
    read_source(dataset, DataSource(path="musique", options={"split": "validation"}), tmp_path)
    (tmp_path / "musique").write_text("a file of that name wins")
    read_source(dataset, DataSource(path="musique"), tmp_path)
    assert asked == [
        ("musique", "train"), ("musique", "validation"), (tmp_path / "musique", None)
    ]  # fmt: skip


RENT = {"name": "lease.txt", "text": "The rent is 900 euros a month. Pets are welcome."}


def own(path: Path, *answers: str) -> DataSource:
    """Own questions without evidence."""
    rows = [{"documents": [RENT], "question": "Why?", "answers": [answer]} for answer in answers]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return DataSource(path=path.name, repeat=2)


def test_own_questions_are_labelled_by_their_answers_and_trained_on_where_that_labels_a_block(
    model: SeDeM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, message = (
        own(tmp_path / "own.jsonl", "rent", "a thousand", "welcome"),
        "own: 3 examples ",
    )
    labelled = "labelled by answer string: 3"
    dataset = BlockDataset(model, answer_limit=100)
    with caplog.at_level(logging.INFO):
        read_source(dataset, source, tmp_path, selects=True)
    assert [any(item.evidence) for item in dataset.items[::2]] == [True, False, True]
    assert caplog.messages == [
        f"{message}(6 in an epoch); left out: none; {labelled}; without any positive block: 1"
    ]
    caplog.clear()
    dataset = BlockDataset(model, answer_limit=100)
    mixture = Mixture(training=(source,), evaluation=(source,), evidence_only=True)
    with caplog.at_level(logging.INFO):
        training, evaluation = read_mixture(dataset, mixture, tmp_path)
    assert evaluation is not None
    assert [training[index].question for index in range(len(training))] == [0, 0, 2, 2]
    assert [evaluation[index].question for index in range(len(evaluation))] == [3, 3, 4, 4, 5, 5]
    assert dataset.dropped == {"without any positive block": 1}
    assert caplog.messages == [
        f"{message}(4 in an epoch); left out: {{'without any positive block': 1}}; {labelled}",
        f"{message}(6 in an epoch); left out: none; {labelled}",
    ]


def test_questions_with_evidence_keep_its_labels(model: SeDeM, fixtures: Path) -> None:
    by_evidence, by_answer = BlockDataset(model, 100), BlockDataset(model, 100)
    read_source(by_evidence, DataSource(path="squad.json", records=":1"), fixtures)
    read_source(by_answer, DataSource(path="squad.json", records=":1", label="answer"), fixtures)
    assert by_evidence.by_answer == 0
    assert by_answer.by_answer == len(by_answer)
    assert [item.evidence for item in by_evidence.items] != [
        item.evidence for item in by_answer.items
    ]


def test_a_set_without_any_positive_block_trains_no_selector(model: SeDeM, tmp_path: Path) -> None:
    source = own(tmp_path / "own.jsonl", "a thousand", "nobody")
    with pytest.raises(DataError, match=r"'own\.jsonl' cannot train a selector: none of its 2 "):
        read_source(BlockDataset(model, 100), source, tmp_path, selects=True)
    with pytest.raises(DataError, match=r"to 0 and data\.evidence_only to false"):
        read_source(BlockDataset(model, 100), source, tmp_path, evidence_only=True)
    dataset = BlockDataset(model, 100)
    assert read_source(dataset, source, tmp_path) == [0, 1, 2, 3]

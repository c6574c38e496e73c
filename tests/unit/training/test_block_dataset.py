from __future__ import annotations

from pathlib import Path

import pytest
from unit.training.blocks import block_dataset, collator

from sedem import SeDeM
from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError, DataError
from sedem_lab.data.examples import ExampleSet
from sedem_lab.data.question_sets import open_examples
from sedem_lab.training import example_dataset
from sedem_lab.training.block_dataset import BlockDataset


def test_documents_and_repeated_examples_are_kept_once(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples, repeat=3)
    assert len(dataset) == 12 and len(dataset.questions) == 4
    assert dataset[0] == dataset[1] == dataset[2] != dataset[3]
    assert len(dataset.arrays["texts"]) == 3
    assert len(dataset.segments) == sum(len(dataset.block_rows(d)) for d in range(3))
    assert collator(dataset)(dataset.items)["segment_ids"].shape[0] == len(dataset.segments)


def test_examples_with_long_answers_are_left_out_and_counted(
    model: SeDeM, examples: ExampleSet
) -> None:
    # " 4 June" and the end token are 8, " 900 euros" and the end token 11.
    dataset = BlockDataset(model, answer_limit=8)
    dataset.add(examples, "evidence")
    assert len(dataset) == 1 and dataset.dropped == {"answer longer than 8 tokens": 3}
    dataset = BlockDataset(model, answer_limit=7)
    dataset.add(examples, "evidence")
    with pytest.raises(DataError, match="no example is left to train on"):
        collator(dataset)


# Prepared together, and kept on disk


def same(first: BlockDataset, second: BlockDataset) -> bool:
    arrays = [
        {
            name: (rows.values.tolist(), rows.bounds.tolist())
            for name, rows in dataset.arrays.items()
        }
        for dataset in (first, second)
    ]
    return arrays[0] == arrays[1] and (first.items, first.dropped) == (second.items, second.dropped)


def test_sets_are_kept_on_disk_and_not_prepared_again(
    model: SeDeM,
    examples: ExampleSet,
    fixtures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = open_examples(fixtures / "squad.json", records=":1")

    def prepared(cache: Path | None, limit: int = 8, repeat: int = 2) -> BlockDataset:
        dataset = BlockDataset(model, limit, cache=cache)
        dataset.add(examples, "evidence", repeat)
        dataset.add(more, "answer")
        # The documents are known by now.
        dataset.add(examples, "evidence")
        return dataset

    memory, first = prepared(None), prepared(tmp_path)
    assert same(first, memory) and sum(first.dropped.values()) > 3
    assert len(list(tmp_path.glob("examples-*"))) == 3
    tokenized: list[int] = []
    tokenize = Backbone._encode
    monkeypatch.setattr(
        Backbone, "_encode", lambda *a, **o: (tokenized.append(1), tokenize(*a, **o))[1]
    )
    assert same(prepared(tmp_path), memory)
    assert not tokenized
    prepared(tmp_path, limit=9)
    assert tokenized and len(list(tmp_path.glob("examples-*"))) == 6


def test_a_full_disk_is_refused_and_leaves_no_set(
    model: SeDeM, examples: ExampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, size: int, what: str) -> None:
        raise ConfigError(f"{what} needs {size} bytes")

    monkeypatch.setattr(example_dataset, "check_free_space", full)
    dataset = BlockDataset(model, 64, cache=tmp_path)
    with pytest.raises(ConfigError, match=r"the prepared set small needs \d+ bytes"):
        dataset.add(examples, "evidence")
    assert not list(tmp_path.glob("examples-*"))

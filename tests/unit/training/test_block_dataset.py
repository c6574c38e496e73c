from __future__ import annotations

from dataclasses import replace

import pytest
from unit.training.blocks import block_dataset, collator, model_of_shape

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.data.examples import ExampleSet
from sedem.errors import DataError
from sedem.training.block_dataset import BlockDataset


def test_a_document_in_several_examples_is_encoded_once(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples)
    assert len(dataset.documents) == 3
    assert len(dataset.segments) == sum(len(d.blocks) for d in dataset.documents)
    assert collator(dataset)(dataset.items)["segment_ids"].shape[0] == len(dataset.segments)


def test_blocks_that_overlap_the_evidence_are_positive(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples)
    batch = collator(dataset)(dataset.items)
    for row, example in enumerate(examples.examples):
        bank = model.read(example.documents)
        (span,) = example.evidence
        for index, block in enumerate(bank.blocks):
            holds = block.document == span.document and not (
                block.end <= span.start or span.end <= block.start
            )
            assert bool(batch["evidence"][row, index]) == holds
        assert batch["evidence"][row].any()
        assert not batch["evidence"][row, len(bank) :].any()


def test_blocks_that_contain_an_answer_string_are_positive(
    backbone: Backbone, config: SedemConfig, examples: ExampleSet
) -> None:
    model = model_of_shape(backbone, config, segment_length=64)
    bare = ExampleSet("bare", [replace(e, evidence=()) for e in examples.examples])
    dataset = BlockDataset(model, answer_limit=64)
    dataset.add(bare, "answer")
    dataset.add(bare, "evidence")
    for item, example in zip(dataset.items[:4], examples.examples, strict=True):
        blocks = model.read(example.documents).blocks
        holds = [
            example.answers[0] in example.documents[b.document].text[b.start : b.end]
            for b in blocks
        ]
        assert item.evidence == holds and any(holds)
    # Without evidence, answer strings label in either case.
    assert [i.evidence for i in dataset.items[4:]] == [i.evidence for i in dataset.items[:4]]


def test_examples_with_long_answers_are_left_out_and_counted(
    model: SeDeM, examples: ExampleSet
) -> None:
    # " 4 June" and the end token are 8, " 900 euros" and the end token 11.
    dataset = BlockDataset(model, answer_limit=8)
    dataset.add(examples, "evidence")
    assert len(dataset) == 1
    assert dataset.dropped == {"answer longer than 8 tokens": 3}
    dataset = BlockDataset(model, answer_limit=7)
    dataset.add(examples, "evidence")
    with pytest.raises(DataError, match="no example is left to train on"):
        collator(dataset)


def test_repeated_examples_share_one_item(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples, repeat=3)
    assert len(dataset) == 12
    assert dataset[0] is dataset[1] is dataset[2]
    assert len(dataset.questions) == 4

from __future__ import annotations

from dataclasses import replace
from operator import eq
from pathlib import Path

import pytest
import torch
from unit.training.blocks import block_dataset, collator, memory_of, model_of_shape

from sedem import Document, SeDeM, SedemConfig
from sedem.answering.decoding import answer_ids, question_ids
from sedem.backbone.decoder import Backbone
from sedem.data.examples import Example, ExampleSet
from sedem.method.encoder import encode
from sedem.method.losses import IGNORED
from sedem.training.block_batch import BlockCollator
from sedem.training.block_dataset import BlockDataset

# Training batches have the memory of banks


@pytest.mark.parametrize("segmentation", ["window", "paragraph"])
@pytest.mark.parametrize("block_slots", [None, 2, 8, 3], ids=["equal", "half", "twice", "odd"])
def test_blocks_of_a_batch_have_the_memory_of_a_bank(
    backbone: Backbone,
    config: SedemConfig,
    examples: ExampleSet,
    segmentation: str,
    block_slots: int | None,
) -> None:
    model = model_of_shape(backbone, config, segmentation=segmentation, block_slots=block_slots)
    dataset = block_dataset(model, examples)
    batch = collator(dataset)(dataset.items)
    memory_BNJD = memory_of(model, batch)
    for row, example in enumerate(examples.examples):
        bank = model.read(example.documents)
        count = len(bank)
        assert batch["blocks"][row].tolist() == [True] * count + [False] * (
            batch["blocks"].shape[1] - count
        )
        assert torch.equal(batch["slot_tokens"][row, :count], bank.slot_tokens(range(count)))
        assert not batch["slot_tokens"][row, count:].any()
        stored = bank.memory(range(count)).float()
        torch.testing.assert_close(memory_BNJD[row, :count], stored, rtol=8e-3, atol=1e-4)
        assert (batch["slot_index"][row, count:] == -1).all()


def test_a_batch_of_short_segments_has_only_the_slots_it_needs(
    backbone: Backbone, config: SedemConfig
) -> None:
    model = model_of_shape(backbone, config, segment_length=64)
    # 24 and 13 tokens: 6 and 4 of 16 slots.
    documents = (Document("a", "The ship left on 4 June."), Document("b", "It came back."))
    example = Example("ship", documents, "When did it leave?", ("4 June",))
    dataset = block_dataset(model, ExampleSet("short", [example]))
    batch = collator(dataset)(dataset.items)
    assert batch["segment_ids"].shape == (2, 24)
    assert batch["slot_index"][0].tolist() == [
        [0, 1, 2, 3, 4, 5] + [-1] * 10,
        [6, 7, 8, 9] + [-1] * 12,
    ]
    stored = model.read(documents).memory([0, 1]).float()
    torch.testing.assert_close(memory_of(model, batch)[0], stored, rtol=8e-3, atol=1e-4)


def test_a_batch_has_the_encoder_tokens_of_its_questions(
    model: SeDeM, examples: ExampleSet
) -> None:
    dataset = block_dataset(model, examples)
    batch = collator(dataset)(dataset.items)
    for row, example in enumerate(examples.examples):
        mask = batch["question_mask"][row]
        assert batch["question_ids"][row][mask].tolist() == model.encoder.token_ids(
            example.question
        )


# Decoder input


def test_prefix_and_answer_are_predicted_token_by_token(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples)
    batch = collator(dataset)(dataset.items)
    ids_BP, valid_BP, labels_BA = batch["ids"], batch["valid"], batch["labels"]
    assert labels_BA.shape[1] == max(len(item.answer) for item in dataset.items)
    for row, example in enumerate(examples.examples):
        prefix = question_ids(model.decoder, example.question)
        answer = answer_ids(model.decoder, example.answers[0])
        assert answer[-1] == model.decoder.eos_token_id
        assert ids_BP[row][valid_BP[row]].tolist() == [*prefix, *answer[:-1]]
        assert valid_BP[row].tolist() == sorted(valid_BP[row].tolist())  # padding on the left
        labels_A = labels_BA[row]
        assert labels_A[labels_A != IGNORED].tolist() == answer
        # The position that predicts a token holds the token before it.
        last = ids_BP[row, -labels_BA.shape[1] :]
        assert last[labels_A != IGNORED].tolist() == [prefix[-1], *answer[:-1]]


# Sampling


@pytest.fixture
def many(model: SeDeM, examples: ExampleSet) -> BlockDataset:
    """Contexts with more blocks than the limits of the tests below."""
    return block_dataset(model, examples)


def kept_blocks(dataset: BlockDataset, collate: BlockCollator, index: int) -> list[int]:
    """Indices of the blocks that a batch of only this example keeps."""
    item = dataset[index]
    batch = collate([item])
    whole = BlockCollator(dataset, max_blocks=100, budgets=(2,), seed=0, cache=None)([item])
    memory, every = memory_of(dataset.model, batch)[0], memory_of(dataset.model, whole)[0]
    return [
        next(i for i, block in enumerate(every) if torch.allclose(block, row, atol=1e-5))
        for row in memory
    ]


@pytest.mark.parametrize("max_blocks", [2, 4, 7])
def test_sampling_keeps_evidence_blocks(many: BlockDataset, max_blocks: int) -> None:
    for index, item in enumerate(many.items[:2]):
        kept = kept_blocks(many, collator(many, max_blocks=max_blocks), index)
        assert len(item.blocks) > 9 and sum(item.evidence) <= 2
        assert len(kept) == max_blocks
        assert kept == sorted(set(kept))
        assert {i for i, label in enumerate(item.evidence) if label} <= set(kept)


def test_evidence_is_truncated_to_the_maximum_of_blocks(many: BlockDataset) -> None:
    item = replace(many[0], evidence=[True] * len(many[0].blocks))
    batch = collator(many, max_blocks=3)([item])
    assert batch["evidence"].tolist() == [[True, True, True]]


def test_sampling_depends_only_on_seed_and_batch(many: BlockDataset) -> None:
    collate = collator(many, max_blocks=4, budgets=(1, 2, 3))
    once = collate(many.items)
    collate(many.items[:2])
    again = collate(many.items)
    assert once.keys() == again.keys()
    for name, value in once.items():
        same = torch.equal if isinstance(value, torch.Tensor) else eq
        assert same(value, again[name])
    other = collator(many, max_blocks=4, budgets=(1, 2, 3), seed=1)(many.items)
    assert not torch.equal(once["coins"], other["coins"])
    assert not torch.equal(memory_of(many.model, once), memory_of(many.model, other))


def test_a_batch_of_one_draws_other_blocks_in_every_epoch(many: BlockDataset) -> None:
    collate = collator(many, max_blocks=4)
    batches = [[collate(many.items[:count], epoch) for epoch in range(6)] for count in (1, 2)]
    alone, pairs = ([batch["segment_ids"].tolist() for batch in row] for row in batches)
    assert len({str(ids) for ids in alone}) > 3
    assert alone == [collate(many.items[:1], epoch)["segment_ids"].tolist() for epoch in range(6)]
    # The first epoch, and batches of several, are drawn as they always were.
    assert alone[0] == collate(many.items[:1])["segment_ids"].tolist()
    assert all(ids == pairs[0] for ids in pairs)


def test_budgets_and_coins_cover_their_range(many: BlockDataset) -> None:
    drawn, coins = set(), []
    for seed in range(30):
        batch = collator(many, budgets=(1, 3), seed=seed)(many.items)
        drawn.add(batch["budget"])
        coins += batch["coins"].tolist()
    assert drawn == {1, 3}
    assert 0 <= min(coins) < 0.1 and 0.9 < max(coins) < 1


def test_cached_states_equal_online_encoding(many: BlockDataset, tmp_path: Path) -> None:
    batch = collator(many, cache=tmp_path)(many.items)
    layers = many.model.config.extract_layers
    online = encode(many.model.encoder, batch["segment_ids"], layers)
    mask = batch["segment_mask"]
    assert batch["states"].shape == online.shape
    torch.testing.assert_close(
        batch["states"][:, mask].float(), online[:, mask], rtol=8e-3, atol=1e-3
    )
    assert not batch["states"][:, ~mask].any()
    questions = encode(many.model.encoder, batch["question_ids"], layers)
    mask = batch["question_mask"]
    torch.testing.assert_close(
        batch["question_states"][:, mask].float(), questions[:, mask], rtol=8e-3, atol=1e-3
    )

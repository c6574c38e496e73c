from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sedem import Document, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.data.examples import Example, ExampleSet
from sedem.errors import DataError
from sedem.inference.prompts import answer_ids, question_ids
from sedem.method.encoder import encode
from sedem.method.losses import IGNORED
from sedem.training.prepare import Collator, Prepared


def prepare(model: SeDeM, examples: ExampleSet, **options: Any) -> Prepared:
    prepared = Prepared(model, answer_limit=64)
    prepared.add(examples, "evidence", **options)
    return prepared


def collator(prepared: Prepared, **changes: Any) -> Collator:
    options = {"max_blocks": 100, "budgets": (2,), "seed": 0, "cache": None, **changes}
    return Collator(prepared, **options)


def shaped(backbone: Backbone, config: SedemConfig, **changes: Any) -> SeDeM:
    torch.manual_seed(1)
    return SeDeM(config.with_changes(**changes), backbone, backbone).eval()


@torch.no_grad()
def memory_of(model: SeDeM, batch: dict[str, Any]) -> Tensor:
    """Memory that a batch's slot index gathers `[B, N, J, D]`, zero where there is no slot."""
    states = encode(model.encoder, batch["segment_ids"], model.config.extract_layers)
    memory_SMD = model.compressor(model.mixture(states), batch["segment_mask"])
    padding = torch.zeros(1, memory_SMD.shape[2])
    return torch.cat([memory_SMD.flatten(0, 1), padding])[batch["slot_index"]]


# What the model reads and what it is trained on


@pytest.mark.parametrize("segmentation", ["window", "paragraph"])
@pytest.mark.parametrize("block_slots", [None, 2, 8, 3], ids=["equal", "half", "twice", "odd"])
def test_blocks_hold_the_memory_that_a_bank_would_hold(
    backbone: Backbone,
    config: SedemConfig,
    examples: ExampleSet,
    segmentation: str,
    block_slots: int | None,
) -> None:
    model = shaped(backbone, config, segmentation=segmentation, block_slots=block_slots)
    prepared = prepare(model, examples)
    batch = collator(prepared)(prepared.items)
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


def test_short_segments_alone_need_no_more_slots_than_they_have(
    backbone: Backbone, config: SedemConfig
) -> None:
    model = shaped(backbone, config, segment_length=64)
    # 24 and 13 tokens: 6 and 4 of 16 slots.
    documents = (Document("a", "The ship left on 4 June."), Document("b", "It came back."))
    example = Example("ship", documents, "When did it leave?", ("4 June",))
    prepared = prepare(model, ExampleSet("short", [example]))
    batch = collator(prepared)(prepared.items)
    assert batch["segment_ids"].shape == (2, 24)
    assert batch["slot_index"][0].tolist() == [
        [0, 1, 2, 3, 4, 5] + [-1] * 10,
        [6, 7, 8, 9] + [-1] * 12,
    ]
    stored = model.read(documents).memory([0, 1]).float()
    torch.testing.assert_close(memory_of(model, batch)[0], stored, rtol=8e-3, atol=1e-4)


def test_a_document_is_encoded_once_however_many_examples_hold_it(
    model: SeDeM, examples: ExampleSet
) -> None:
    prepared = prepare(model, examples)
    assert len(prepared.texts) == 3
    assert len(prepared.segments) == sum(len(d.blocks) for d in prepared.texts)
    assert collator(prepared)(prepared.items)["segment_ids"].shape[0] == len(prepared.segments)


def test_questions_are_what_the_model_is_asked(model: SeDeM, examples: ExampleSet) -> None:
    prepared = prepare(model, examples)
    batch = collator(prepared)(prepared.items)
    for row, example in enumerate(examples.examples):
        mask = batch["question_mask"][row]
        assert batch["question_ids"][row][mask].tolist() == model.encoder.token_ids(
            example.question
        )


# Labels


def test_evidence_labels_stand_at_the_blocks_that_hold_the_answer(
    model: SeDeM, examples: ExampleSet
) -> None:
    prepared = prepare(model, examples)
    batch = collator(prepared)(prepared.items)
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


def test_answer_strings_label_blocks_where_nobody_labelled_any(
    backbone: Backbone, config: SedemConfig, examples: ExampleSet
) -> None:
    model = shaped(backbone, config, segment_length=64)
    bare = ExampleSet("bare", [replace(e, evidence=()) for e in examples.examples])
    prepared = Prepared(model, answer_limit=64)
    prepared.add(bare, "answer")
    prepared.add(bare, "evidence")
    for item, example in zip(prepared.items[:4], examples.examples, strict=True):
        blocks = model.read(example.documents).blocks
        holds = [
            example.answers[0] in example.documents[b.document].text[b.start : b.end]
            for b in blocks
        ]
        assert item.evidence == holds and any(holds)
    assert not any(any(item.evidence) for item in prepared.items[4:])


# The decoder's side


def test_prefix_and_answer_are_predicted_token_by_token(model: SeDeM, examples: ExampleSet) -> None:
    prepared = prepare(model, examples)
    batch = collator(prepared)(prepared.items)
    ids_BP, valid_BP, labels_BA = batch["ids"], batch["valid"], batch["labels"]
    assert labels_BA.shape[1] == max(len(item.answer) for item in prepared.items)
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


def test_answers_that_are_too_long_are_left_out_and_counted(
    model: SeDeM, examples: ExampleSet
) -> None:
    # " 4 June" and the end token are 8, " 900 euros" and the end token 11.
    prepared = Prepared(model, answer_limit=8)
    prepared.add(examples, "evidence")
    assert len(prepared) == 1
    assert prepared.dropped == {"answer longer than 8 tokens": 3}
    prepared = Prepared(model, answer_limit=7)
    prepared.add(examples, "evidence")
    with pytest.raises(DataError, match="no example is left to train on"):
        collator(prepared)


def test_repeated_examples_count_as_often(model: SeDeM, examples: ExampleSet) -> None:
    prepared = prepare(model, examples, repeat=3)
    assert len(prepared) == 12
    assert prepared[0] is prepared[1] is prepared[2]
    assert len(prepared.questions) == 4


# Sampling


@pytest.fixture
def many(model: SeDeM, examples: ExampleSet) -> Prepared:
    """The same contexts with far more blocks than a batch may hold."""
    return prepare(model, examples)


def kept_blocks(prepared: Prepared, collate: Collator, index: int) -> list[int]:
    """Which blocks of an example a batch of it alone keeps."""
    item = prepared[index]
    batch = collate([item])
    whole = Collator(prepared, max_blocks=100, budgets=(2,), seed=0, cache=None)([item])
    memory, every = memory_of(prepared.model, batch)[0], memory_of(prepared.model, whole)[0]
    return [
        next(i for i, block in enumerate(every) if torch.allclose(block, row, atol=1e-5))
        for row in memory
    ]


@pytest.mark.parametrize("max_blocks", [2, 4, 7])
def test_evidence_stays_when_blocks_are_sampled(many: Prepared, max_blocks: int) -> None:
    for index, item in enumerate(many.items[:2]):
        kept = kept_blocks(many, collator(many, max_blocks=max_blocks), index)
        assert len(item.blocks) > 9 and sum(item.evidence) <= 2
        assert len(kept) == max_blocks
        assert kept == sorted(set(kept))
        assert {i for i, label in enumerate(item.evidence) if label} <= set(kept)


def test_evidence_is_cut_when_it_alone_is_too_much(many: Prepared) -> None:
    item = replace(many[0], evidence=[True] * len(many[0].blocks))
    batch = collator(many, max_blocks=3)([item])
    assert batch["evidence"].tolist() == [[True, True, True]]


def test_what_is_sampled_depends_on_the_batch_alone(many: Prepared) -> None:
    collate = collator(many, max_blocks=4, budgets=(1, 2, 3))
    once = collate(many.items)
    collate(many.items[:2])
    again = collate(many.items)
    assert once.keys() == again.keys()
    for name, value in once.items():
        assert value == again[name] if name == "budget" else torch.equal(value, again[name])
    other = collator(many, max_blocks=4, budgets=(1, 2, 3), seed=1)(many.items)
    assert not torch.equal(once["coins"], other["coins"])
    assert not torch.equal(memory_of(many.model, once), memory_of(many.model, other))


def test_budgets_and_coins_are_drawn_from_all_there_are(many: Prepared) -> None:
    drawn, coins = set(), []
    for seed in range(30):
        batch = collator(many, budgets=(1, 3), seed=seed)(many.items)
        drawn.add(batch["budget"])
        coins += batch["coins"].tolist()
    assert drawn == {1, 3}
    assert 0 <= min(coins) < 0.1 and 0.9 < max(coins) < 1


def test_cached_states_are_those_of_the_batch(many: Prepared, tmp_path: Path) -> None:
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

from __future__ import annotations

from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.training.blocks import block_dataset, collator, memory_of, model_of_shape

from sedem import Document, SeDeM, SedemConfig
from sedem.answering import spans
from sedem.backbone.decoder import Backbone
from sedem.method.compressor import encode
from sedem.method.losses import IGNORED
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.training.block_dataset import BlockDataset, BlockItem
from sedem_lab.training.targets import targets

# Training batches have the memory of banks


@pytest.mark.parametrize("segmentation", ["window", "sentence", "paragraph"])
@pytest.mark.parametrize(
    "shape",
    [{"block_slots": slots} for slots in (None, 2, 8, 3)]
    + [{"block_slots": 2, "segment_shift": 5}, {"block_slots": 32, "segment_length": 64}],
    ids=["equal", "half", "twice", "odd", "shifted", "long"],
)
def test_blocks_of_a_batch_have_the_memory_of_a_bank(
    backbone: Backbone,
    config: SedemConfig,
    examples: ExampleSet,
    segmentation: str,
    shape: dict[str, Any],
) -> None:
    model = model_of_shape(backbone, config, segmentation=segmentation, **shape)
    # Of two sets, the second with documents of the first.
    dataset = block_dataset(model, ExampleSet("first", examples.examples[:1]))
    dataset.add(ExampleSet("second", examples.examples[1:]), "evidence")
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
        places = [(b.document, b.start, b.end) for b in bank.blocks]
        texts = [example.documents[d].text[start:end] for d, start, end in places]
        assert [dataset.block_text(*block) for block in dataset[row].blocks] == texts
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


def test_targets_are_the_answers_shifted_by_one() -> None:
    batch = targets([([0, 5, 6], [7, 1]), ([0, 8], [9, 10, 11, 1])])
    assert batch["ids"].tolist() == [[0, 0, 5, 6, 7], [0, 8, 9, 10, 11]]
    assert batch["valid"].tolist() == [[False, True, True, True, True], [True] * 5]
    # Only as wide as the longest answer; the last prefix token predicts the first answer token.
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, 1], [9, 10, 11, 1]]


# Sampling


@pytest.fixture
def many(model: SeDeM, examples: ExampleSet) -> BlockDataset:
    """Contexts with more blocks than the limits of the tests below."""
    return block_dataset(model, examples)


def kept_blocks(dataset: BlockDataset, item: BlockItem, max_blocks: int) -> list[int]:
    """Indices of the blocks that a batch of only this example keeps."""
    memory, every = (
        memory_of(dataset.model, collator(dataset, max_blocks=most)([item]))[0]
        for most in (max_blocks, 100)
    )
    return [
        next(i for i, block in enumerate(every) if torch.allclose(block, row, atol=1e-5))
        for row in memory
    ]


@pytest.mark.parametrize("max_blocks", [2, 7])
def test_sampling_keeps_evidence_blocks(many: BlockDataset, max_blocks: int) -> None:
    for item in many.items[:2]:
        kept = kept_blocks(many, item, max_blocks)
        assert len(item.blocks) > 9 and sum(item.evidence) <= 2
        assert len(kept) == max_blocks and kept == sorted(set(kept))
        assert {i for i, label in enumerate(item.evidence) if label} <= set(kept)
    item = replace(many[0], evidence=[True] * len(many[0].blocks))
    batch = collator(many, max_blocks=3)([item])
    assert batch["evidence"].tolist() == [[True, True, True]], "evidence is truncated"


def test_sampling_depends_only_on_seed_and_batch(many: BlockDataset) -> None:
    collate = collator(many, max_blocks=4, budgets=(1, 2, 3))
    once = collate(many.items)
    collate(many.items[:2])
    again = collate(many.items)
    assert once.keys() == again.keys()
    for name, value in once.items():
        same = torch.equal if isinstance(value, torch.Tensor) else eq
        assert same(value, again[name])
    drawn, coins = set(), []
    for seed in range(1, 30):
        other = collator(many, max_blocks=4, budgets=(1, 2, 3), seed=seed)(many.items)
        drawn.add(other["budget"])
        coins += other["coins"].tolist()
    assert not torch.equal(once["segment_ids"], other["segment_ids"])
    assert drawn == {1, 2, 3} and 0 <= min(coins) < 0.1 and 0.9 < max(coins) < 1


def test_a_batch_of_one_draws_other_blocks_in_every_epoch(many: BlockDataset) -> None:
    collate = collator(many, max_blocks=4)
    batches = [[collate(many.items[:count], epoch) for epoch in range(6)] for count in (1, 2)]
    alone, pairs = ([batch["segment_ids"].tolist() for batch in row] for row in batches)
    assert len({str(ids) for ids in alone}) > 3
    assert alone == [collate(many.items[:1], epoch)["segment_ids"].tolist() for epoch in range(6)]
    # The first epoch, and batches of several, are drawn as they always were.
    assert alone[0] == collate(many.items[:1])["segment_ids"].tolist()
    assert all(ids == pairs[0] for ids in pairs)


# The sentences of a second reading

LETTER = "It rained all day. The lease of Ada Quist began in May. She pays 900 euros. Nobody came."
ORDER = "Ms Bell sells tea. The shop is in Mill Lane. It opens at nine. The cat sleeps. It is old."
DIARY = "We walked far. The sea was cold. Ada sang at night. The dog ran home. All was well."


@pytest.mark.parametrize(
    ("question", "answer", "evidence", "kept"),
    [
        ("What does Ada Quist pay?", "900 euros", [(0, "900")], ["She pays 900 euros."]),
        # Not in the words of the texts: the likeliest sentence of every block with evidence.
        (
            "Do Ada Quist and Ms Bell of the shop in Mill Lane know each other?",
            "no",
            [(0, "Ada"), (1, "Bell")],
            ["The lease of Ada Quist began in May.", "The shop is in Mill Lane."],
        ),
        (
            "Where did the dog go after Ada sang at night by the sea?",
            "home",
            [(2, "home")],
            ["The dog ran home."],
        ),
    ],
)
def test_sentences_of_a_second_reading_contain_the_evidence(
    backbone: Backbone,
    config: SedemConfig,
    monkeypatch: pytest.MonkeyPatch,
    question: str,
    answer: str,
    evidence: list[tuple[int, str]],
    kept: list[str],
) -> None:
    monkeypatch.setattr(spans, "TOKENS", 160)
    model = model_of_shape(backbone, config, segment_length=128, segmentation="sentence")
    texts = [LETTER, ORDER, DIARY]
    marks = [(n, texts[n].index(words), words) for n, words in evidence]
    example = Example(
        "asked",
        tuple(Document(f"{n}.txt", text) for n, text in enumerate(texts)),
        question,
        (answer,),
        tuple(Evidence(n, start, start + len(words)) for n, start, words in marks),
    )
    dataset = block_dataset(model, ExampleSet("asked", [example]))
    for seed in range(12):
        batch = collator(dataset, conditions={"text": 1.0}, sentences=1.0, seed=seed)(dataset.items)
        [found] = batch["sentences"]
        joined = "\n".join(found)
        assert all(sentence in joined for sentence in kept)
        assert len(joined) < len("\n".join(texts)), "some sentences are left out"
        # As they stand in the texts, in order.
        places = [max((text.find(part), n) for n, text in enumerate(texts))[::-1] for part in found]
        assert places == sorted(places) and all(at >= 0 for _, at in places)


def test_only_batches_that_read_text_have_sentences_as_often_as_asked(many: BlockDataset) -> None:
    count = {}
    for condition in ("text", "memory", "both"):
        options = {"conditions": {condition: 1.0}, "sentences": 0.5}
        batches = [collator(many, seed=n, **options)(many.items) for n in range(40)]
        count[condition] = sum(bool(batch["sentences"]) for batch in batches)
    assert 10 < count["text"] < 30 and count["memory"] == count["both"] == 0
    assert not collator(many, conditions={"text": 1.0})(many.items)["sentences"]


def test_cached_states_equal_online_encoding(many: BlockDataset, tmp_path: Path) -> None:
    batch = collator(many, cache=tmp_path)(many.items)
    for states, kind in (("states", "segment"), ("question_states", "question")):
        layers, ids = many.model.config.extract_layers, batch[f"{kind}_ids"]
        online, mask = encode(many.model.encoder, ids, layers), batch[f"{kind}_mask"]
        assert batch[states].shape == online.shape
        found = batch[states][:, mask].float()
        torch.testing.assert_close(found, online[:, mask], rtol=8e-3, atol=1e-3)
        assert not batch[states][:, ~mask].any()

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sedem import Document
from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow, partition
from sedem.method.segments import segment_text
from sedem_lab.data.examples import Evidence, Example
from sedem_lab.data.labels import from_answers, from_evidence, labelling_of

TEXT = "The rent is 900 euros. It is due in May. The deposit is 1,800 euros."


def cut(text: str, size: int, document: int = 0) -> list[BlockRow]:
    return [
        BlockRow(document, start, min(start + size, len(text)), (size,))
        for start in range(0, len(text), size)
    ]


@pytest.mark.parametrize(
    ("start", "end", "labels"),
    [
        (0, 10, [True, False, False]),
        (9, 11, [True, True, False]),
        (10, 20, [False, True, False]),
        (19, 20, [False, True, False]),
        (20, 21, [False, False, True]),
        (5, 25, [True, True, True]),
    ],
)
def test_a_block_that_overlaps_evidence_is_positive(
    start: int, end: int, labels: list[bool]
) -> None:
    assert from_evidence(cut("x" * 30, 10), [Evidence(0, start, end)]) == labels


def test_evidence_and_answers_are_those_of_their_own_document() -> None:
    blocks = [*cut("x" * 20, 10), *cut("y" * 20, 10, document=1)]
    spans = [Evidence(0, 15, 16), Evidence(1, 19, 20)]
    assert from_evidence(blocks, spans) == [False, True, False, True]
    assert from_evidence(blocks, []) == [False] * 4
    documents = [Document("a", "no such word"), Document("b", "the cat is here")]
    rows = [BlockRow(0, 0, 12, (1,)), BlockRow(1, 0, 15, (1,))]
    assert from_answers(rows, documents, ["cat"]) == [False, True]


def test_labels_match_the_characters_that_blocks_stand_for(backbone: Backbone) -> None:
    segments = segment_text(TEXT, backbone, 16, "window")
    for block_slots in (2, 4, 8):
        blocks, slots_NJ = partition(segments, 0, 4, block_slots)
        marks = torch.zeros(len(TEXT), dtype=torch.bool)
        marks[23:40] = True
        tokens = [marks[int(s)] for s in segments.starts[segments.mask]]
        per_slot = torch.tensor(tokens + [False] * (-len(tokens) % 4)).view(-1, 4).any(1)
        naive = [bool(per_slot[row[(row >= 0) & (row < len(per_slot))]].any()) for row in slots_NJ]
        assert from_evidence(blocks, [Evidence(0, 23, 40)]) == naive
        assert from_evidence(blocks, [Evidence(0, 0, len(TEXT))]) == [True] * len(blocks)


@pytest.mark.parametrize(
    ("text", "answers", "size", "labels"),
    [
        ("A cat sat.", ["cat"], 100, [True]),
        ("The catalogue of bobcat.", ["cat"], 100, [False]),
        ("It costs 1900.", ["900"], 100, [False]),
        ("(cat)", ["cat"], 100, [True]),
        ("It costs $5.", ["$5"], 100, [True]),
        ("THE CAT SAT.", ["the cat"], 100, [True]),
        ("A dog sat.", ["cat", "dog"], 100, [True]),
        ("A dog sat.", ["cat", " "], 100, [False]),
        ("a.b", ["a+b"], 100, [False]),
        # Only blocks that contain the whole answer are positive.
        ("May is here and so is May again", ["May"], 10, [True, False, True, False]),
        ("May is here and so is May again", ["so is May"], 18, [False, False]),
        # "cat" ends one block and "alogue" begins the next.
        ("The catalogue", ["cat"], 7, [False, False]),
        ("bobcat sat", ["cat"], 3, [False] * 4),
    ],
)
def test_an_answer_counts_as_whole_words_of_a_block_in_any_case(
    text: str, answers: list[str], size: int, labels: list[bool]
) -> None:
    assert from_answers(cut(text, size), [Document("d", text)], answers) == labels


def test_only_an_example_without_evidence_goes_by_its_answers() -> None:
    bare = Example("a", (Document("d", TEXT),), "What is the rent?", ("900 euros",))
    labelled = replace(bare, evidence=(Evidence(0, 0, 22),))
    assert labelling_of(bare, "evidence") == "answer"
    assert labelling_of(labelled, "evidence") == "evidence"
    assert labelling_of(labelled, "answer") == "answer"

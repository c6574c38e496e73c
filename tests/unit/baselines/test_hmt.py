"""HMT against numbers of the official code and against its equations in plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.baselines.conftest import adapters, as_official, check_official_answer, fill, make, tokens

from sedem_lab.baselines.hmt import HMT
from sedem_lab.training.baseline import TextTraining
from sedem_lab.training.targets import targets

SEGMENT_TOKENS = 32
"""New tokens of a segment at the small settings."""


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("hmt", tiny_folder())


@pytest.fixture
def official(fixtures: Path) -> dict[str, Any]:
    return dict(json.loads((fixtures / "hmt-official.json").read_text()))


def official_hmt(folder: str, numbers: dict[str, Any], case: str) -> HMT:
    memory, sensory = numbers[case]["memory"], numbers["sensory"]
    reader: HMT = as_official(
        "hmt",
        folder,
        memory=memory,
        sensory=sensory,
        segment_length=numbers["segment"] + 2 * memory + sensory,
        recall_width=numbers["recall_width"],
    )
    fill(adapters(reader))
    for named in reader.parts().named_parameters():
        fill([named])
    return reader.requires_grad_(False).eval()


# Against the official code


@pytest.mark.parametrize(("case", "recall_from"), [("stage_1", 1.0), ("stage_2", 0.0)])
def test_text_loss_matches_the_official_code(
    case: str, recall_from: float, official: dict[str, Any], tiny_folder: Callable[..., str]
) -> None:
    reader = official_hmt(tiny_folder(), official, case)
    reader.config = reader.config.with_changes(recall_from=recall_from)
    ids, scored = torch.tensor([official["tokens"]]), official["scored"]
    loss = reader.text_loss(ids[:, :-scored], ids[:, -scored:])["loss"]
    assert float(loss) == pytest.approx(official[case]["loss"], rel=1e-4)


def test_the_generated_answer_matches_the_official_code(
    official: dict[str, Any], tiny_folder: Callable[..., str]
) -> None:
    reader = official_hmt(tiny_folder(), official, "stage_2")
    ids = official["tokens"]
    # The official sequence has no start token, so its first token takes that place.
    reader.backbone.bos_token_id = ids[0]
    compressed = reader.compress(ids[1:38])
    filled = reader.prefill([compressed.content], [37], [[ids[0], *ids[38:]]])
    check_official_answer(filled, official["stage_2"], atol=3e-3)


# Against the equations


def final_states(reader: HMT, row: Tensor) -> Tensor:
    """Hugging Face's forward over embeddings `[P, D]`: states after the final norm."""
    return reader.backbone.model.get_decoder()(inputs_embeds=row[None]).last_hidden_state[0]


def naive_recall(reader: HMT, memories: list[Tensor], segment: list[int]) -> Tensor:
    """Memory that a segment starts with, by the equations of recall in plain loops."""
    parts, config = reader.parts(), reader.config
    if not memories:
        return parts["memory"].weight
    summary = parts["summary"].weight
    half = reader.backbone.embed(torch.tensor(segment[: SEGMENT_TOKENS // 2]))
    asked = final_states(reader, torch.cat([summary, half, summary]))[-config.memory :]
    stored = torch.cat(memories)[-config.recall_context :]
    given = []
    for vector in asked:
        query = parts["recall_query"].weight @ vector
        scores = [float(query @ (parts["recall_key"].weight @ m)) for m in stored]
        shares = torch.tensor(scores).div(config.recall_width**0.5).softmax(0)
        given.append(sum(share * m for share, m in zip(shares, stored, strict=True)))
    return torch.stack(given)


def naive_loss(reader: HMT, context: list[int], prompt: list[int], answer: list[int]) -> float:
    """Loss of one answer, segment by segment; the context begins with the start token."""
    config, embed = reader.config, reader.backbone.embed
    unread, memories, sensory = [reader.backbone.bos_token_id, *context], [], []

    def read(segment: list[int]) -> None:
        nonlocal sensory
        given = naive_recall(reader, memories, segment)
        own = embed(torch.tensor([*sensory, *segment]))
        memories.append(final_states(reader, torch.cat([given, own, given]))[-config.memory :])
        sensory = segment[-config.sensory :]

    while len(unread) >= SEGMENT_TOKENS:
        read(unread[:SEGMENT_TOKENS])
        unread = unread[SEGMENT_TOKENS:]
    if unread and len(unread) + len(prompt) > SEGMENT_TOKENS:
        read(unread)
        unread = []
    last = [*unread, *prompt]
    given = naive_recall(reader, memories, last)
    row = torch.cat([given, embed(torch.tensor([*sensory, *last, *answer]))])
    logits = reader.backbone.model.get_output_embeddings()(final_states(reader, row))
    before = len(row) - len(answer) - 1
    losses = [F.cross_entropy(logits[before + i], torch.tensor(t)) for i, t in enumerate(answer)]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def test_the_question_loss_matches_the_equations(reader: HMT) -> None:
    # No whole segment; one segment and a rest that the prompt fits after; a rest that it does not
    # fit after; more segments than recall keeps; a prompt longer than a segment.
    torch.manual_seed(0)
    lengths = [(3, 5, 2), (40, 6, 3), (60, 7, 1), (160, 4, 4), (31, 40, 2)]
    contexts = tokens(*(length for length, _, _ in lengths))
    pairs = [
        ([0, *torch.randint(2, 250, (p,)).tolist()], [*torch.randint(2, 250, (a,)).tolist(), 1])
        for _, p, a in lengths
    ]
    loss = reader.question_loss(contexts, **targets(pairs))["loss"]
    expected = [
        naive_loss(reader, context.tolist(), prefix[1:], answer)
        for context, (prefix, answer) in zip(contexts, pairs, strict=True)
    ]
    assert float(loss) == pytest.approx(sum(expected) / len(expected), rel=1e-4)


# Two stages


def test_recall_is_trained_only_in_the_second_stage(reader: HMT) -> None:
    stage = TextTraining(reader).eval()
    windows = torch.randint(2, 250, (2, 90))
    for progress, recalled in ((0.0, False), (0.49, False), (0.5, True), (1.0, True)):
        stage.progress = progress
        stage.zero_grad()
        stage(windows[:, :70], windows[:, 70:])["loss"].backward()
        for name, part in reader.parts().items():
            grads = [p.grad is not None and bool(p.grad.any()) for p in part.parameters()]
            assert grads == [recalled or name == "memory"], (progress, name)


def test_learned_memory_is_initialized_at_the_scale_of_token_embeddings(
    tiny_folder: Callable[..., str],
) -> None:
    torch.manual_seed(0)
    reader = make("hmt", tiny_folder(), memory=8, segment_length=64, recall_context=8)
    spread = reader.backbone.model.get_input_embeddings().weight.std()
    for name in ("memory", "summary"):
        assert float(reader.parts()[name].weight.std() / spread) == pytest.approx(1, abs=0.2)


# Memory


def test_memory_depends_on_earlier_tokens_and_the_oldest_is_dropped(reader: HMT) -> None:
    ids = tokens(3 * SEGMENT_TOKENS)[0].tolist()
    compressed = reader.compress(ids)
    # Token 40 is in the second segment; the first has the start token and 31 others.
    changed = reader.compress([*ids[:40], (ids[40] + 1) % 250 + 2, *ids[41:]]).content
    content, count = compressed.content, reader.config.memory
    pairs = zip(content.memories.split(count), changed.memories.split(count), strict=True)
    assert [torch.equal(*pair) for pair in pairs] == [True, False, False]
    assert content.rest.tolist() == ids[-1:] and content.sensory.tolist() == ids[-5:-1]
    # Six vectors of 32 dimensions in two bytes, four sensory tokens and one unread.
    assert (compressed.stored_bytes, compressed.notes) == (6 * 32 * 2 + 4 * 5, ())
    more = reader.compress([*ids, *ids])
    assert len(more.content.memories) == 6
    assert more.notes == (
        "the context has 192 tokens, hmt recalls only the newest 6 of its 12 memory vectors",
    )

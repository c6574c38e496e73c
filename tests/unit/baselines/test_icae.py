"""ICAE against its equations in plain loops, on a tiny random backbone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.baselines.conftest import adapted_matrices, make

from sedem import Document
from sedem.baselines.icae import ICAE, ICAEConfig
from sedem.baselines.memory import generator_for
from sedem.errors import ConfigError
from sedem.training.baseline import TextTraining
from sedem.training.targets import targets


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("icae", tiny_folder())


def logits_of(reader: ICAE, embedded: Tensor) -> Tensor:
    """Hugging Face's forward over a row of embeddings `[P, D]`."""
    return reader.backbone.model(inputs_embeds=embedded[None]).logits[0]


def naive_slots(reader: ICAE, ids: list[int]) -> Tensor:
    """Slots segment by segment: final states at the memory tokens, with adapters."""
    table, memory = reader.parts()["tokens"].weight, reader.config.memory
    count = -(-len(ids) // (memory * reader.config.compression))
    size = -(-len(ids) // count)
    slots = []
    for n in range(count):
        own = [reader.backbone.bos_token_id, *ids[n * size : (n + 1) * size]]
        embedded = torch.cat([reader.backbone.embed(torch.tensor(own)), table[:memory]])
        output = reader.backbone.model.get_decoder()(inputs_embeds=embedded[None])
        slots.append(output.last_hidden_state[0, -memory:])
    return torch.cat(slots)


def special(reader: ICAE, name: str) -> Tensor:
    row = reader.config.memory + ["ae", "lm", "ft"].index(name)
    return reader.parts()["tokens"].weight[row : row + 1]


def naive_loss(reader: ICAE, soft: Tensor, text: list[int], target: list[int], skip: int) -> float:
    """Mean cross-entropy of `target` after [start; soft tokens; text], without adapters."""
    embed = reader.backbone.embed
    start = embed(torch.tensor([reader.backbone.bos_token_id]))
    row = [start, soft, embed(torch.tensor([*text, *target], dtype=torch.long))]
    with reader.backbone.without_lora():
        logits = logits_of(reader, torch.cat(row))
    losses = []
    for at, token in enumerate(target):
        before = 1 + len(soft) + len(text) + at - 1
        losses.append(F.cross_entropy(logits[before], torch.tensor(token)))
    return float(torch.stack(losses[skip:]).mean())


@torch.no_grad()
def test_slots_match_the_equations(reader: ICAE) -> None:
    for length in (3, 16, 17, 50):
        ids = torch.randint(2, 250, (length,)).tolist()
        (slots,) = reader._slots([torch.tensor(ids)])
        torch.testing.assert_close(slots, naive_slots(reader, ids), rtol=1e-4, atol=1e-5)
        compressed = reader.compress(ids)
        torch.testing.assert_close(
            compressed.content.states.flatten(0, 1), slots.bfloat16(), rtol=2e-2, atol=2e-2
        )
        assert compressed.stored_bytes == 2 * slots.numel()


@torch.no_grad()
def test_the_question_loss_matches_the_equations(reader: ICAE) -> None:
    contexts = [torch.randint(2, 250, (n,)) for n in (40, 9)]
    pairs = [([0, 5, 6, 7], [8, 9, 1]), ([0, 4], [11, 12, 13, 1])]
    loss = reader.question_loss(contexts, **targets(pairs))["loss"]
    expected = [
        naive_loss(
            reader,
            torch.cat([naive_slots(reader, context.tolist()), special(reader, "ft")]),
            prefix[1:],
            answer,
            0,
        )
        for context, (prefix, answer) in zip(contexts, pairs, strict=True)
    ]
    assert float(loss) == pytest.approx(sum(expected) / 2, rel=1e-4)


@torch.no_grad()
def test_the_text_losses_match_the_equations(tiny_folder: Callable[..., str]) -> None:
    reader: Any = make("icae", tiny_folder(), seed=3)
    torch.manual_seed(0)
    context, continuation = torch.randint(2, 250, (6, 20)), torch.randint(2, 250, (6, 7))
    parts = reader.text_loss(context, continuation)
    again, on = [], []
    for row, after in zip(context.tolist(), continuation.tolist(), strict=True):
        slots = naive_slots(reader, row)
        end = reader.backbone.eos_token_id
        again.append(
            naive_loss(reader, torch.cat([slots, special(reader, "ae")]), [], [*row, end], 0)
        )
        on.append(naive_loss(reader, slots, [], after, reader.config.unscored))
    # The rows to reproduce are drawn; these contain both kinds.
    drawn = [generator_for(0, row).random() < 0.5 for row in context]
    assert 0 < sum(drawn) < 6
    assert float(parts["autoencode"]) == pytest.approx(mean(again, drawn, True), rel=1e-4)
    assert float(parts["continue"]) == pytest.approx(mean(on, drawn, False), rel=1e-4)
    chosen = [a if d else o for a, o, d in zip(again, on, drawn, strict=True)]
    assert float(parts["loss"]) == pytest.approx(sum(chosen) / 6, rel=1e-4)


def mean(values: list[float], drawn: list[bool], wanted: bool) -> float:
    chosen = [value for value, d in zip(values, drawn, strict=True) if d is wanted]
    return sum(chosen) / len(chosen)


@pytest.mark.parametrize(("share", "part"), [(1.0, "autoencode"), (0.0, "continue")])
def test_the_mix_can_be_either_objective_alone(
    share: float, part: str, tiny_folder: Callable[..., str]
) -> None:
    reader: Any = make("icae", tiny_folder(), autoencode=share)
    with torch.no_grad():
        parts = reader.text_loss(torch.randint(2, 250, (3, 20)), torch.randint(2, 250, (3, 7)))
    assert parts.keys() == {"loss", part}
    assert torch.equal(parts["loss"], parts[part])


def test_memory_depends_on_neither_the_question_nor_other_segments(reader: ICAE) -> None:
    ids = torch.randint(2, 250, (48,)).tolist()
    with torch.no_grad():
        states = reader.compress(ids).content.states
        changed = reader.compress([*ids[:16], *[7] * 16, *ids[32:]]).content.states
    assert torch.equal(states[0], changed[0]) and torch.equal(states[2], changed[2])
    assert not torch.equal(states[1], changed[1])
    memory = reader.read([Document("a", "The rent is 900 euros.")])
    before = memory.compressed.content.states.clone()
    reader.answer(memory, "What is the rent?")
    assert torch.equal(memory.compressed.content.states, before)


def test_adapters_are_on_q_and_v_and_off_in_decoding(reader: ICAE) -> None:
    names = [name for name, _ in reader.backbone.named_parameters() if "lora_" in name]
    assert adapted_matrices(reader) == {"q_proj", "v_proj"}
    stage = TextTraining(reader)
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    assert trained == {f"reader.backbone.{n}" for n in names} | {"reader._parts.tokens.weight"}
    memory = reader.read([Document("a", "The rent is 900 euros.")])
    answer = reader.answer(memory, "What is the rent?")
    with torch.no_grad():
        for parameter in reader.backbone.lora_parameters():
            parameter.zero_()
    assert reader.answer(memory, "What is the rent?").text == answer.text


def test_a_long_context_is_truncated_by_whole_segments(reader: ICAE) -> None:
    # 512 positions, 4 slots for each 16 tokens, FT.
    assert reader.context_tokens_used(1600, 100, 5) == 1600
    assert (
        reader.context_tokens_used(1633, 100, 5) == 1616
    )  # 103 segments of 16, 406 positions hold 101
    memory = reader.read([Document("a", "x" * 3000)])
    answer = reader.answer(memory, "What?")
    assert answer.conditioning and answer.conditioning + 64 <= 512
    assert "3,000 tokens" in answer.cut[0]


def test_impossible_settings_are_rejected(reader: ICAE) -> None:
    for change in ({"memory": 0}, {"compression": 0}, {"autoencode": 2}, {"unscored": -1}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            ICAEConfig(backbone="some", **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"text.continuation is 2 tokens and model.unscored 2"):
        reader.text_loss(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))

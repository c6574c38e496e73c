"""ICAE against numbers of the official code and against its equations in plain loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.baselines.conftest import (
    adapters,
    as_official,
    check_official_answer,
    check_question_loss,
    fill,
    make,
    naive_loss,
    tokens,
)

from sedem_lab.baselines.icae import ICAE, SegmentSlots
from sedem_lab.baselines.trained import generator_for
from sedem_lab.training.targets import targets


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("icae", tiny_folder())


Official = tuple[ICAE, dict[str, Any]]


@pytest.fixture
def official(fixtures: Path, tiny_folder: Callable[..., str]) -> Official:
    """A reader with the weights of the official run, and its numbers."""
    numbers = dict(json.loads((fixtures / "icae-official.json").read_text()))
    settings = {name: numbers[name] for name in ("memory", "compression", "unscored")}
    reader: ICAE = as_official("icae", tiny_folder(), **settings)
    fill([*adapters(reader), *reader.parts().named_parameters()])
    return reader.eval(), numbers


# Against the official code


@torch.no_grad()
def test_slots_match_the_official_code(official: Official) -> None:
    reader, numbers = official
    for length, expected in numbers["slots"].items():
        (slots,) = reader._slots([torch.tensor(numbers["tokens"][: int(length)])])
        torch.testing.assert_close(slots, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("share", "part"), [(1.0, "autoencode"), (0.0, "continue")])
@torch.no_grad()
def test_the_text_losses_match_the_official_code(
    share: float, part: str, official: Official
) -> None:
    reader, numbers = official
    reader.config = reader.config.with_changes(autoencode=share)
    ids, length = torch.tensor([numbers["tokens"]]), numbers["context"]
    after = ids[:, length : length + numbers["continuation"]]
    parts = reader.text_loss(ids[:, :length], after)
    # Either objective alone is the whole loss.
    assert parts.keys() == {"loss", part} and torch.equal(parts["loss"], parts[part])
    assert float(parts["loss"]) == pytest.approx(numbers[part], rel=1e-5)


def test_the_question_loss_and_its_gradients_match_the_official_code(official: Official) -> None:
    reader, numbers = official
    ids, asked = numbers["tokens"], numbers["question"]
    question, answer = (ids[slice(*asked[name])] for name in ("question", "answer"))
    start, end = reader.backbone.bos_token_id, reader.backbone.eos_token_id
    batch = targets([([start, *question], [*answer, end])])
    loss = reader.question_loss([torch.tensor(ids[: numbers["context"]])], **batch)["loss"]
    assert float(loss.detach()) == pytest.approx(asked["loss"], rel=1e-5)
    loss.backward()
    learned, expected = reader.parts()["tokens"].weight.grad, torch.tensor(asked["gradient"])
    torch.testing.assert_close(learned, expected, rtol=1e-4, atol=1e-5)
    norms = [float(parameter.grad.norm()) for _, parameter in sorted(adapters(reader))]
    assert norms == pytest.approx(asked["adapters"], rel=1e-4, abs=1e-5)


@torch.no_grad()
def test_the_generated_answer_matches_the_official_code(official: Official) -> None:
    reader, numbers = official
    ids, asked = numbers["tokens"], numbers["question"]
    segments = reader.segments(torch.tensor(ids[: numbers["context"]]))
    content = SegmentSlots(reader.encode(segments), len(segments[0]))
    prompt = [reader.backbone.bos_token_id, *ids[slice(*asked["question"])]]
    with reader.decoding_mode():
        filled = reader.prefill([content], [numbers["context"]], [prompt])
        check_official_answer(filled, asked, atol=1e-4)


# Against the equations


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


@torch.no_grad()
def test_slots_match_the_equations(reader: ICAE) -> None:
    for length in (3, 16, 17, 50):
        ids = tokens(length)[0].tolist()
        (slots,) = reader._slots([torch.tensor(ids)])
        torch.testing.assert_close(slots, naive_slots(reader, ids), rtol=1e-4, atol=1e-5)
        compressed = reader.compress(ids)
        torch.testing.assert_close(
            compressed.content.states.flatten(0, 1), slots.bfloat16(), rtol=2e-2, atol=2e-2
        )
        assert compressed.stored_bytes == 2 * slots.numel()


@torch.no_grad()
def test_the_question_loss_matches_the_equations(reader: ICAE) -> None:
    contexts = tokens(40, 9)
    check_question_loss(
        reader,
        contexts,
        lambda c: torch.cat([naive_slots(reader, c.tolist()), special(reader, "ft")]),
    )


@torch.no_grad()
def test_the_text_losses_match_the_equations(tiny_folder: Callable[..., str]) -> None:
    reader: Any = make("icae", tiny_folder(), seed=3)
    torch.manual_seed(0)
    context, continuation = torch.randint(2, 250, (6, 20)), torch.randint(2, 250, (6, 7))
    parts = reader.text_loss(context, continuation)
    again, on = [], []
    for row, after in zip(context.tolist(), continuation.tolist(), strict=True):
        slots, target = naive_slots(reader, row), [*row, reader.backbone.eos_token_id]
        with_ae = torch.cat([slots, special(reader, "ae")])
        again.append(naive_loss(reader, with_ae, [], target).mean())
        on.append(naive_loss(reader, slots, [], after)[reader.config.unscored :].mean())
    # The rows to reproduce are drawn; these contain both kinds.
    drawn = torch.tensor([generator_for(0, row).random() < 0.5 for row in context])
    assert 0 < drawn.sum() < 6
    both = {"autoencode": torch.stack(again), "continue": torch.stack(on)}
    expected = {
        "autoencode": both["autoencode"][drawn].mean(),
        "continue": both["continue"][~drawn].mean(),
        "loss": torch.where(drawn, both["autoencode"], both["continue"]).mean(),
    }
    torch.testing.assert_close(parts, expected, rtol=1e-4, atol=1e-4)

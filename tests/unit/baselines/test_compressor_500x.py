"""500xCompressor against numbers of the official code and against Hugging Face's cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from unit.baselines.conftest import PAIRS, adapters, as_official, fill, make, tokens

from sedem import Document
from sedem_lab.baselines.compressor_500x import Compressor500x
from sedem_lab.training.targets import targets


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("500x", tiny_folder())


Official = tuple[Compressor500x, dict[str, Any]]


@pytest.fixture
def official(fixtures: Path, tiny_folder: Callable[..., str]) -> Official:
    """A reader with the weights of the official run, and its numbers."""
    numbers = dict(json.loads((fixtures / "500x-official.json").read_text()))
    settings = {name: numbers[name] for name in ("memory", "limit")}
    reader: Compressor500x = as_official("500x", tiny_folder(), **settings)
    fill(adapters(reader))
    fill(reader.parts().named_parameters())
    return reader.requires_grad_(False).eval(), numbers


# Against the official code


def test_the_reproduction_loss_matches_the_official_code(official: Official) -> None:
    reader, numbers = official
    text = torch.tensor([numbers["tokens"][: numbers["limit"]]])
    loss = reader.text_loss(text, text[:, :1])["loss"]
    assert float(loss) == pytest.approx(numbers["reproduce"]["loss"], rel=1e-4)


def test_the_answer_loss_of_a_short_context_matches_the_official_code(official: Official) -> None:
    reader, numbers = official
    ids, asked = numbers["tokens"], numbers["question"]
    context = torch.tensor(ids[: asked["context"]])
    question, answer = (ids[slice(*asked[name])] for name in ("question", "answer"))
    # The official questions have no start token; ours would precede these ids.
    batch = targets([(question, [*answer, reader.backbone.eos_token_id])])
    loss = reader.question_loss([context], **batch)["loss"]
    assert float(loss) == pytest.approx(asked["loss"], rel=1e-4)
    compressed = reader.encode([context])
    with torch.no_grad(), reader.backbone.without_lora():
        states, _ = reader.decode(compressed, batch["ids"], batch["valid"])
        logits = reader.backbone.logits(states[0, -1])
    torch.testing.assert_close(logits, torch.tensor(asked["logits"]), rtol=1e-4, atol=1e-4)


# Against Hugging Face's own forward


def naive_memory(reader: Compressor500x, context: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the memory tokens after a window, padded with end tokens."""
    backbone, config = reader.backbone, reader.config
    filled = [*context, *[backbone.eos_token_id] * (config.limit - len(context))]
    row = torch.cat([backbone.embed(torch.tensor(filled)), reader.parts()["tokens"].weight])
    cache = backbone.model(inputs_embeds=row[None], use_cache=True).past_key_values
    at = config.limit
    return [(layer.keys[:, :, at:], layer.values[:, :, at:]) for layer in cache.layers]


def naive_logits(reader: Compressor500x, context: list[int], ids: list[int]) -> Tensor:
    """Logits of tokens after the memory, at positions that continue the number of cached ones."""
    cache = DynamicCache()
    limit = reader.config.limit
    for start in range(0, len(context), limit):
        for layer, pair in enumerate(naive_memory(reader, context[start : start + limit])):
            cache.update(*pair, layer)
    first = cache.get_seq_length()
    with reader.backbone.without_lora():
        return reader.backbone.model(
            input_ids=torch.tensor([ids]),
            past_key_values=cache,
            position_ids=torch.arange(first, first + len(ids))[None],
        ).logits[0]


@pytest.mark.parametrize(
    ("long_contexts", "lengths"), [("cut", (48, 9)), ("windows", (48, 9)), ("windows", (20, 110))]
)
@torch.no_grad()
def test_losses_match_hugging_face(
    long_contexts: str, lengths: tuple[int, int], tiny_folder: Callable[..., str]
) -> None:
    reader: Any = make("500x", tiny_folder(), long_contexts=long_contexts)
    contexts = tokens(*lengths)
    expected = []
    for context, (prefix, answer) in zip(contexts, PAIRS, strict=True):
        logits = naive_logits(reader, context.tolist(), [*prefix, *answer[:-1]])
        expected.append(float(F.cross_entropy(logits[-len(answer) :], torch.tensor(answer))))
    loss = reader.question_loss(contexts, **targets(PAIRS))["loss"]
    assert float(loss) == pytest.approx(sum(expected) / 2, rel=1e-4)


@torch.no_grad()
def test_stepwise_decoding_equals_one_forward_pass(tiny_folder: Callable[..., str]) -> None:
    reader: Any = make("500x", tiny_folder(), long_contexts="windows")
    used = [98, 18]
    contents = [reader.compress(list(range(2, 2 + count))).content for count in used]
    prompts, more = [[0, 5, 6, 7], [0, 4]], [8, 9]
    with reader.decoding_mode():
        filled = reader.prefill(contents, used, prompts)
        steps = [filled.logits, *(filled.advance(torch.tensor([token, token])) for token in more)]
        for row, prompt in enumerate(prompts):
            for count in range(3):
                prefix = [*prompt, *more[:count]]
                alone = reader.prefill([contents[row]], [used[row]], [prefix])
                torch.testing.assert_close(steps[count][row], alone.logits[0], rtol=1e-4, atol=1e-4)


# Memory


def test_a_context_is_truncated_at_the_limit_and_the_answer_says_so(reader: Compressor500x) -> None:
    ids = tokens(60)[0].tolist()
    compressed = reader.compress(ids)
    assert torch.equal(compressed.content, reader.compress([*ids[:48], *ids[:30]]).content)
    assert not torch.equal(compressed.content, reader.compress([*ids[:47], ids[47] ^ 1]).content)
    # Four layers, keys and values, two heads of four tokens and eight dimensions, two bytes each.
    assert compressed.content.shape == (4, 2, 2, 4, 8)
    assert compressed.stored_bytes == 2 * 4 * 2 * 2 * 4 * 8
    memory = reader.read(
        [Document("a", "The rent is 900 euros a month. " * 3), Document("b", "Eggs.")]
    )
    answer = reader.answer(memory, "What is the rent?")
    assert answer.cut[0] == "the context has 99 tokens, 500x took its first 48"
    (citation,) = answer.citations
    assert (citation.document, citation.end) == ("a", 48)


def test_every_window_of_a_long_context_is_compressed_alone(
    tiny_folder: Callable[..., str],
) -> None:
    reader = make("500x", tiny_folder(), long_contexts="windows")
    ids = tokens(110)[0].tolist()
    compressed = reader.compress(ids)
    # Three windows of four memory tokens, the last one short.
    assert compressed.content.shape == (4, 2, 2, 12, 8)
    assert compressed.stored_bytes == 3 * 2 * 4 * 2 * 2 * 4 * 8
    apart = [reader.compress(ids[at : at + 48]).content for at in (0, 48, 96)]
    torch.testing.assert_close(compressed.content, torch.cat(apart, dim=-2))
    memory = reader.read([Document("a", "The rent is 900 euros. " * 5)])
    answer = reader.answer(memory, "What is the rent?")
    assert len(memory.token_ends) > 2 * 48
    assert not any("took its first" in note for note in answer.cut)


@torch.no_grad()
def test_windows_whose_memory_does_not_fit_are_not_read(tiny_folder: Callable[..., str]) -> None:
    reader = make("500x", tiny_folder(), long_contexts="windows", limit=8, memory=40)
    # 512 positions, 400 of which the memory of ten windows fills.
    assert reader.context_tokens_used(1000, 40, 60) == 80
    content = reader.compress(tokens(100)[0].tolist()).content
    filled = reader.prefill([content], [80], [[0, 5, 6]])
    assert filled.conditioning == [10 * 40 + 3]
    kept = reader.prefill([content[..., :400, :]], [80], [[0, 5, 6]])
    assert torch.equal(filled.logits, kept.logits)

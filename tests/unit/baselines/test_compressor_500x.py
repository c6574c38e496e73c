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
from unit.baselines.conftest import adapted_matrices, make
from unit.baselines.waves import fill

from sedem import Document
from sedem.backbone.loading import open_backbone
from sedem.baselines.compressor_500x import Compressor500x, Compressor500xConfig
from sedem.errors import ConfigError, DataError
from sedem.training.baseline import TextTraining
from sedem.training.targets import targets


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("500x", tiny_folder())


@pytest.fixture
def official(fixtures: Path) -> dict[str, Any]:
    return dict(json.loads((fixtures / "500x-official.json").read_text()))


def as_official(folder: str, numbers: dict[str, Any]) -> Compressor500x:
    backbone = open_backbone(folder)
    fill(backbone.model.named_parameters())
    config = Compressor500xConfig(
        backbone=folder,
        lora_rank=4,
        lora_alpha=8,
        memory=numbers["memory"],
        limit=numbers["limit"],
    )
    reader = Compressor500x(config, backbone)
    fill([(n, p) for n, p in backbone.model.named_parameters() if "lora_" in n])
    fill(reader.parts().named_parameters())
    return reader.requires_grad_(False).eval()


# Against the official code


def test_the_reproduction_loss_matches_the_official_code(
    official: dict[str, Any], tiny_folder: Callable[..., str]
) -> None:
    reader = as_official(tiny_folder(), official)
    text = torch.tensor([official["tokens"][: official["limit"]]])
    loss = reader.text_loss(text, text[:, :1])["loss"]
    assert float(loss) == pytest.approx(official["reproduce"]["loss"], rel=1e-4)


def test_the_answer_loss_of_a_short_context_matches_the_official_code(
    official: dict[str, Any], tiny_folder: Callable[..., str]
) -> None:
    reader = as_official(tiny_folder(), official)
    ids, asked = official["tokens"], official["question"]
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
    """Keys and values of the memory tokens after the context, padded with end tokens."""
    backbone, config = reader.backbone, reader.config
    filled = [*context, *[backbone.eos_token_id] * (config.limit - len(context))]
    row = torch.cat([backbone.embed(torch.tensor(filled)), reader.parts()["tokens"].weight])
    cache = backbone.model(inputs_embeds=row[None], use_cache=True).past_key_values
    at = config.limit
    return [(layer.keys[:, :, at:], layer.values[:, :, at:]) for layer in cache.layers]


def naive_logits(reader: Compressor500x, context: list[int], ids: list[int]) -> Tensor:
    """Logits of tokens after the memory, at the positions of the variant."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(naive_memory(reader, context)):
        cache.update(keys, values, layer)
    memory, limit = reader.config.memory, reader.config.limit
    first = {"restart": memory, "continue": limit + memory}[reader.config.positions]
    with reader.backbone.without_lora():
        return reader.backbone.model(
            input_ids=torch.tensor([ids]),
            past_key_values=cache,
            position_ids=torch.arange(first, first + len(ids))[None],
        ).logits[0]


@pytest.mark.parametrize("positions", ["restart", "continue"])
@torch.no_grad()
def test_both_variants_of_positions_match_hugging_face(
    positions: str, tiny_folder: Callable[..., str]
) -> None:
    reader: Any = make("500x", tiny_folder(), positions=positions)
    contexts = [torch.randint(2, 250, (n,)) for n in (48, 9)]
    pairs = [([0, 5, 6, 7], [8, 9, 1]), ([0, 4], [11, 12, 13, 1])]
    expected = []
    for context, (prefix, answer) in zip(contexts, pairs, strict=True):
        logits = naive_logits(reader, context.tolist(), [*prefix, *answer[:-1]])
        expected.append(float(F.cross_entropy(logits[-len(answer) :], torch.tensor(answer))))
    loss = reader.question_loss(contexts, **targets(pairs))["loss"]
    assert float(loss) == pytest.approx(sum(expected) / 2, rel=1e-4)


@pytest.mark.parametrize("positions", ["restart", "continue"])
@torch.no_grad()
def test_stepwise_decoding_equals_one_forward_pass(
    positions: str, tiny_folder: Callable[..., str]
) -> None:
    reader: Any = make("500x", tiny_folder(), positions=positions)
    contents = [reader.compress(list(range(2, n))).content for n in (40, 20)]
    prompts, more = [[0, 5, 6, 7], [0, 4]], [8, 9]
    with reader.decoding_mode():
        filled = reader.prefill(contents, [38, 18], prompts)
        steps = [
            filled.logits,
            *(filled.advance(torch.tensor([token, token])) for token in more),
        ]
        for row, prompt in enumerate(prompts):
            for count in range(3):
                alone = reader.prefill([contents[row]], [0], [[*prompt, *more[:count]]])
                torch.testing.assert_close(steps[count][row], alone.logits[0], rtol=1e-4, atol=1e-4)


def test_the_variants_of_positions_differ(tiny_folder: Callable[..., str]) -> None:
    logits = []
    for positions in ("restart", "continue"):
        reader: Any = make("500x", tiny_folder(), positions=positions)
        content = reader.compress(list(range(2, 40))).content
        with torch.no_grad(), reader.decoding_mode():
            logits.append(reader.prefill([content], [38], [[0, 5, 6]]).logits)
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)


# Memory


def test_a_context_is_truncated_at_the_limit_and_the_answer_says_so(reader: Compressor500x) -> None:
    ids = torch.randint(2, 250, (60,)).tolist()
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
    assert torch.equal(memory.compressed.content, reader.compress(text_ids(reader, memory)).content)


def text_ids(reader: Compressor500x, memory: Any) -> list[int]:
    from sedem.answering.decoding import context_prompt

    return reader.backbone.token_ids(context_prompt([d.text for d in memory.documents]))


def test_adapters_are_on_q_and_v_and_off_in_decoding(reader: Compressor500x) -> None:
    names = [name for name, _ in reader.backbone.named_parameters() if "lora_" in name]
    assert adapted_matrices(reader) == {"q_proj", "v_proj"}
    stage = TextTraining(reader)
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    assert trained == {f"reader.backbone.{n}" for n in names} | {"reader._parts.tokens.weight"}
    context = torch.randint(2, 250, (2, 30))
    stage(context, context)["loss"].backward()
    grads = {n for n, p in stage.named_parameters() if p.grad is not None and p.grad.any()}
    # The memory has the last layer's keys and values, but nothing that depends on its queries.
    idle = {n for n in trained if "layers.3.self_attn.q_proj" in n}
    assert grads == trained - idle
    memory = reader.read([Document("a", "The rent is 900 euros.")])
    answer = reader.answer(memory, "What is the rent?")
    with torch.no_grad():
        for parameter in reader.backbone.lora_parameters():
            parameter.zero_()
    assert reader.answer(memory, "What is the rent?").text == answer.text


def test_impossible_settings_are_rejected(
    tiny_folder: Callable[..., str], reader: Compressor500x
) -> None:
    for change in ({"memory": 0}, {"limit": 0}, {"positions": "official"}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            Compressor500xConfig(backbone="some", **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit is 509 and memory 4, together more than the 512"):
        make("500x", tiny_folder(), limit=509)
    long = make("500x", tiny_folder(), limit=400, positions="continue")
    with pytest.raises(DataError, match="from position 404 on, exceed the 512 positions"):
        long.context_tokens_used(50, 60, 64)
    with pytest.raises(ConfigError, match=r"text.context is 49 tokens and model.limit 48"):
        reader.text_loss(torch.ones(1, 49).long(), torch.ones(1, 2).long())

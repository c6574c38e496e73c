"""sedem against plain Hugging Face, for every family and both kinds of attention.

References are the library's own forward, or its layers called one by one with explicit masks and
positions; nothing of sedem's mask, position or cache code is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sedem.backbone.decoder import ATTENTION, Backbone
from sedem.backbone.loading import open_backbone
from sedem.method.encoder import encode, states_at
from sedem.method.injection import GrowingCache, Prefilled, prefill, step

WINDOW = 6
QUESTION = [50, 60, 70, 80, 90]
CONTEXT = [101, 102, 103, 110, 120, 130, 140]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=ATTENTION)
def opened(any_backbone: Backbone, request: pytest.FixtureRequest) -> Backbone:
    """A tiny backbone of each family with each kind of attention in turn."""
    return open_backbone(any_backbone.name, attention=request.param)


WINDOWED = [
    ("mistral", {"sliding_window": WINDOW}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
]


@pytest.fixture(params=WINDOWED, ids=[family for family, _ in WINDOWED])
def windowed_folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> str:
    family, changes = request.param
    return tiny_folder(family, **changes)


@pytest.fixture(params=ATTENTION)
def windowed(windowed_folder: str, request: pytest.FixtureRequest) -> Backbone:
    """A tiny backbone whose upper layers, or all, attend to six positions."""
    return open_backbone(windowed_folder, attention=request.param)


def close(first: Tensor, second: Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=2e-5)


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (rows, length), generator=generator)


def random_states(backbone: Backbone, count: int, seed: int = 0) -> Tensor:
    """States of the size that the layers are used to."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, backbone.width, generator=generator) * 3


def filled(
    backbone: Backbone,
    inject: int,
    ids_BP: Tensor,
    restored_BUD: Tensor | None = None,
    cache: GrowingCache | None = None,
) -> Prefilled:
    """A prefill without padding."""
    if restored_BUD is None:
        restored_BUD = torch.zeros(len(ids_BP), 0, backbone.width)
    return prefill(
        backbone,
        inject,
        ids_BP,
        torch.ones_like(ids_BP, dtype=torch.bool),
        restored_BUD,
        torch.ones(restored_BUD.shape[:2], dtype=torch.bool),
        cache=cache,
    )


# Early exit


def test_early_exit_equals_hidden_states_of_the_full_forward(opened: Backbone) -> None:
    ids = random_ids(2, 11)
    states = opened.model(ids, output_hidden_states=True).hidden_states
    positions = torch.arange(11).expand(2, -1)
    assert len(states) == opened.depth + 1
    for layer in range(opened.depth):
        assert torch.equal(opened.run(opened.embed(ids), 0, layer, positions), states[layer])
    last = opened.run(opened.embed(ids), 0, opened.depth, positions)
    assert torch.equal(opened.model.get_decoder().norm(last), states[opened.depth])
    assert not torch.allclose(last, states[opened.depth])


def test_encoder_states_are_hidden_states_behind_a_start_token(opened: Backbone) -> None:
    ids = random_ids(2, 11)
    with_start = torch.cat([torch.full((2, 1), opened.bos_token_id), ids], dim=1)
    states = opened.model(with_start, output_hidden_states=True).hidden_states
    for layer in range(opened.depth):
        assert torch.equal(states_at(opened, ids, [layer])[layer], states[layer])
        assert torch.equal(encode(opened, ids, [layer])[0], states[layer][:, 1:])


def test_short_rows_of_a_batch_are_encoded_like_themselves(opened: Backbone) -> None:
    ids = random_ids(3, 12)
    lengths = [12, 7, 1]
    padded = ids * (torch.arange(12)[None] < torch.tensor(lengths)[:, None])
    together = encode(opened, padded, [3])
    for row, length in enumerate(lengths):
        alone = encode(opened, ids[row : row + 1, :length], [3])
        close(together[:, row : row + 1, :length], alone)


# Two depths


def test_two_depths_without_memory_equal_the_full_forward(opened: Backbone) -> None:
    ids = random_ids(2, 9)
    expected = opened.model(ids).logits
    for inject in range(opened.depth):
        close(opened.logits(filled(opened, inject, ids).prefix), expected)


def two_depth_reference(
    backbone: Backbone, inject: int, context: list[int], question: list[int]
) -> tuple[Tensor, Tensor]:
    """[start; context; question] through plain layers; below `inject` the question is alone.

    Below the injection layer a question token sees the start token and the question but not the
    context; above it everything before itself. A layer with a window sees that far back.

    Returns:
        The context's states after `inject` layers, and all states after the last layer.
    """
    order = [backbone.bos_token_id, *context, *question]
    is_context = [0 < at <= len(context) for at in range(len(order))]
    config = backbone.model.config
    decoder = backbone.model.get_decoder()
    positions = torch.arange(len(order))[None]
    hidden = decoder.embed_tokens(torch.tensor([order]))
    rope = decoder.rotary_emb(hidden, position_ids=positions)
    memory = hidden
    for index, layer in enumerate(decoder.layers):
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if kinds is not None and kinds[index] == "full_attention":
            window = None
        if index == inject:
            memory = hidden
        mask = torch.zeros(1, 1, len(order), len(order))
        for query in range(len(order)):
            for key in range(len(order)):
                later = key > query
                far = window is not None and query - key >= window
                question_alone = index < inject and is_context[key] and not is_context[query]
                if later or far or question_alone:
                    mask[0, 0, query, key] = torch.finfo(torch.float32).min
        hidden = layer(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope
        )
    return memory[:, 1 : 1 + len(context)], hidden


def check_true_states(backbone: Backbone, inject: int) -> None:
    """Inject the context's true states and compare with the reference, one token at a time too."""
    memory, expected = two_depth_reference(backbone, inject, CONTEXT, QUESTION)
    before, count = 3, len(CONTEXT)
    start = [backbone.bos_token_id]
    result = filled(backbone, inject, torch.tensor([start + QUESTION]), memory)
    close(result.prefix, expected[:, [0, *range(1 + count, expected.shape[1])]])
    close(result.restored, expected[:, 1 : 1 + count])
    prefix = torch.tensor([start + QUESTION[:before]])
    cache = GrowingCache()
    filled(backbone, inject, prefix, memory, cache)
    for at in range(before, len(QUESTION)):
        state = step(backbone, inject, torch.tensor([QUESTION[at]]), cache)
        close(state, expected[:, 1 + count + at])


@pytest.mark.parametrize("inject", range(4))
def test_true_states_equal_the_forward_in_which_lower_layers_see_the_question_alone(
    opened: Backbone, inject: int
) -> None:
    check_true_states(opened, inject)


def test_the_reference_at_depth_zero_is_the_full_forward(opened: Backbone) -> None:
    _, hidden = two_depth_reference(opened, 0, CONTEXT, QUESTION)
    order = [opened.bos_token_id, *CONTEXT, *QUESTION]
    close(opened.logits(hidden), opened.model(torch.tensor([order])).logits)


# Decoding from one cache of unequal lengths


@pytest.mark.parametrize("inject", [0, 1, 3])
def test_cached_decoding_equals_running_again_from_scratch(opened: Backbone, inject: int) -> None:
    ids = torch.tensor([[opened.bos_token_id, *QUESTION, 33, 44, 55]])
    memory = random_states(opened, 5)
    cache = GrowingCache()
    filled(opened, inject, ids[:, :4], memory, cache)
    for length in range(5, ids.shape[1] + 1):
        cached = step(opened, inject, ids[:, length - 1], cache)
        again = filled(opened, inject, ids[:, :length], memory).prefix[:, -1]
        close(cached, again)
        lower, upper = (
            [key.shape[2] for key, _ in columns.stored.values()]
            for columns in (cache.lower, cache.upper)
        )
        assert lower == [length] * inject
        assert upper == [length + 5] * (opened.depth - inject)


ROWS = [(QUESTION, 7), (QUESTION[:2], 0), (QUESTION[:3], 3)]
"""Questions and how many restored states each has."""


def padded_batch(
    backbone: Backbone, inject: int, memories: list[Tensor], cache: GrowingCache
) -> Prefilled:
    """ROWS as one batch: prefixes padded on the left, restored states on the right."""
    longest = 1 + max(len(question) for question, _ in ROWS)
    most = max(count for _, count in ROWS)
    ids = torch.full((len(ROWS), longest), 77)
    valid = torch.zeros(len(ROWS), longest, dtype=torch.bool)
    # Large values in the padding, which must not matter.
    restored = torch.full((len(ROWS), most, backbone.width), 50.0)
    restored_valid = torch.zeros(len(ROWS), most, dtype=torch.bool)
    for row, (question, count) in enumerate(ROWS):
        ids[row, longest - 1 - len(question) :] = torch.tensor([backbone.bos_token_id, *question])
        valid[row, longest - 1 - len(question) :] = True
        restored[row, :count] = memories[row][0]
        restored_valid[row, :count] = True
    return prefill(
        backbone,
        inject,
        ids,
        valid,
        restored,
        restored_valid,
        cache=cache,
    )


def check_rows_of_a_batch(backbone: Backbone, inject: int) -> None:
    memories = [random_states(backbone, count, seed) for seed, (_, count) in enumerate(ROWS)]
    shared, alone = GrowingCache(), [GrowingCache() for _ in ROWS]
    together = padded_batch(backbone, inject, memories, shared)
    for row, (question, count) in enumerate(ROWS):
        ids = torch.tensor([[backbone.bos_token_id, *question]])
        result = filled(backbone, inject, ids, memories[row], alone[row])
        close(together.prefix[row, -ids.shape[1] :], result.prefix[0])
        close(together.restored[row, :count], result.restored[0])
    for tokens in ([31, 32, 33], [41, 42, 43], [51, 52, 53]):
        states = step(backbone, inject, torch.tensor(tokens), shared)
        for row, cache in enumerate(alone):
            close(states[row : row + 1], step(backbone, inject, torch.tensor([tokens[row]]), cache))


@pytest.mark.parametrize("inject", [0, 2])
def test_rows_of_a_batch_equal_the_same_rows_alone(opened: Backbone, inject: int) -> None:
    check_rows_of_a_batch(opened, inject)


# Sliding windows


def test_windowed_layers_equal_hugging_face_beyond_the_window(windowed: Backbone) -> None:
    ids = random_ids(2, 3 * WINDOW)
    result = windowed.model(ids, output_hidden_states=True)
    positions = torch.arange(3 * WINDOW).expand(2, -1)
    for layer in range(windowed.depth):
        hidden = windowed.run(windowed.embed(ids), 0, layer, positions)
        close(hidden, result.hidden_states[layer])
    for inject in range(windowed.depth):
        close(windowed.logits(filled(windowed, inject, ids).prefix), result.logits)


def test_windowed_decoding_equals_hugging_face_beyond_the_window(windowed: Backbone) -> None:
    ids = random_ids(1, 3 * WINDOW)
    expected = windowed.model(ids).logits
    for before in (2, WINDOW, 2 * WINDOW):
        cache = GrowingCache()
        filled(windowed, 2, ids[:, :before], cache=cache)
        for at in range(before, ids.shape[1]):
            state = step(windowed, 2, ids[:, at], cache)
            close(windowed.logits(state), expected[:, at])


@pytest.mark.parametrize("inject", range(4))
def test_windowed_true_states_equal_the_reference(windowed: Backbone, inject: int) -> None:
    """The start token falls out of the window of the lower layers although they hold few columns.

    The memory's positions lie between it and the question there as well.
    """
    check_true_states(windowed, inject)


@pytest.mark.parametrize("inject", [0, 2])
def test_windowed_rows_of_a_batch_equal_the_same_rows_alone(
    windowed: Backbone, inject: int
) -> None:
    check_rows_of_a_batch(windowed, inject)


# Adapters


def test_without_lora_the_model_is_the_adapter_free_one(opened: Backbone) -> None:
    ids = random_ids(2, 9)
    plain = opened.model(ids).logits
    encoded = encode(opened, ids, [3])
    opened.add_lora(4, 8)
    generator = torch.Generator().manual_seed(0)
    for parameter in opened.lora_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted = opened.model(ids).logits
    assert not torch.allclose(adapted, plain, atol=0.1)
    close(opened.logits(filled(opened, 2, ids).prefix), adapted)
    with opened.without_lora():
        assert torch.equal(opened.model(ids).logits, plain)
        close(opened.logits(filled(opened, 2, ids).prefix), plain)
    assert torch.equal(encode(opened, ids, [3]), encoded)
    assert torch.equal(opened.model(ids).logits, adapted)


@pytest.mark.parametrize("every", [1, 3, 10**6])
def test_without_lora_leaves_trainable_factors_trainable_and_frozen_ones_frozen(
    opened: Backbone, every: int
) -> None:
    opened.add_lora(4, 8)
    for place, parameter in enumerate(opened.lora_parameters()):
        parameter.requires_grad_((place + 1) % every == 0)
    before = [parameter.requires_grad for parameter in opened.parameters()]
    assert any(before) == (every < 10)
    with opened.without_lora():
        pass
    encode(opened, random_ids(1, 4), [2])
    assert [parameter.requires_grad for parameter in opened.parameters()] == before

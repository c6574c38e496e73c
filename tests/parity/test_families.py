"""sedem against plain Hugging Face, for every family and both kinds of attention.

References are the library's own forward, or its layers called one by one with explicit masks and
positions; nothing of sedem's mask, position or cache code is in them. In layouts that only the
eager engine runs, what differs from Llama is made to matter: multipliers away from 1, layers
without positions, windows and rotary bases by layer, experts, sinks in the softmax.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.backbone.decoder import ATTENTION, EAGER_FAMILIES, FAMILIES, SINK_FAMILIES, Backbone
from sedem.backbone.loading import open_backbone
from sedem.engine.static import open_engine
from sedem.errors import ConfigError
from sedem.method.compressor import encode, states_at
from sedem.method.injection import (
    GrowingCache,
    KeysValues,
    Prefilled,
    RestoredBlocks,
    keys_values,
    prefill,
    step,
)
from sedem_lab.training.stage1 import Stage1, Stage1Losses

WINDOW = 6
QUESTION = [50, 60, 70, 80, 90]
CONTEXT = [101, 102, 103, 110, 120, 130, 140]
Layout = tuple[str, dict[str, Any]]
"""A family and how it differs from its usual settings."""

WINDOWED: list[Layout] = [
    ("mistral", {"sliding_window": WINDOW}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
]
FUSED: list[Layout] = [*((family, {}) for family in FAMILIES), *WINDOWED]
LAYERS = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.4},
}
CHANGES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    },
    "gemma3_text": {
        "layer_types": LAYERS,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 5,
        "final_logit_softcapping": 3.0,
    },
    "qwen3_moe": {
        **EXPERTS["qwen3_moe"],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "gpt_oss": {**EXPERTS["gpt_oss"], "layer_types": LAYERS, "sliding_window": WINDOW},
}
EAGER: list[Layout] = [(family, CHANGES[family]) for family in EAGER_FAMILIES]


def each(layouts: list[Layout]) -> list[Any]:
    """Each layout with each kind of attention that it can be opened with."""
    return [
        pytest.param((family, settings, attention), id=f"{family}-{len(settings)}-{attention}")
        for family, settings in layouts
        for attention in (ATTENTION[1:] if family in SINK_FAMILIES else ATTENTION)
    ]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def opened(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> Backbone:
    """A tiny backbone of a layout with a kind of attention."""
    family, settings, attention = request.param
    return open_backbone(tiny_folder(family, **settings), attention=attention)


@pytest.fixture(params=EAGER_FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> str:
    return tiny_folder(request.param, **CHANGES[request.param])


all_layouts = pytest.mark.parametrize("opened", each(FUSED + EAGER), indirect=True)
fused_layouts = pytest.mark.parametrize("opened", each(FUSED), indirect=True)
eager_layouts = pytest.mark.parametrize("opened", each(EAGER), indirect=True)


def close(first: Tensor, second: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=atol)


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


@all_layouts
def test_every_layer_and_the_logits_equal_hugging_face_at_every_depth(opened: Backbone) -> None:
    ids = random_ids(2, 3 * WINDOW)
    expected = opened.model(ids, output_hidden_states=True, use_cache=False)
    states = expected.hidden_states
    positions = torch.arange(3 * WINDOW).expand(2, -1)
    assert len(states) == opened.depth + 1
    for layer in range(opened.depth):
        assert torch.equal(opened.run(opened.embed(ids), 0, layer, positions), states[layer])
    last = opened.run(opened.embed(ids), 0, opened.depth, positions)
    assert torch.equal(opened.model.get_decoder().norm(last), states[opened.depth])
    assert torch.equal(opened.logits(last), expected.logits)
    assert not torch.allclose(last, states[opened.depth])
    # Without memory, two depths are the full forward.
    for inject in range(opened.depth):
        close(opened.logits(filled(opened, inject, ids).prefix), expected.logits)


@fused_layouts
def test_encoder_states_are_hidden_states_behind_a_start_token(opened: Backbone) -> None:
    ids = random_ids(2, 11)
    with_start = torch.cat([torch.full((2, 1), opened.bos_token_id), ids], dim=1)
    states = opened.model(with_start, output_hidden_states=True).hidden_states
    for layer in range(opened.depth):
        assert torch.equal(states_at(opened, ids, [layer])[layer], states[layer])
        assert torch.equal(encode(opened, ids, [layer])[0], states[layer][:, 1:])


@fused_layouts
def test_short_rows_of_a_batch_are_encoded_like_themselves(opened: Backbone) -> None:
    ids = random_ids(3, 12)
    lengths = [12, 7, 1]
    padded = ids * (torch.arange(12)[None] < torch.tensor(lengths)[:, None])
    together = encode(opened, padded, [3])
    for row, length in enumerate(lengths):
        alone = encode(opened, ids[row : row + 1, :length], [3])
        close(together[:, row : row + 1, :length], alone)


# Two depths


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


@fused_layouts
@pytest.mark.parametrize("inject", range(4))
def test_true_states_equal_the_forward_in_which_lower_layers_see_the_question_alone(
    opened: Backbone, inject: int
) -> None:
    """Also one token at a time. The start token falls out of a window of the lower layers although
    they hold few columns: the memory's positions lie between it and the question there as well.
    """
    memory, expected = two_depth_reference(opened, inject, CONTEXT, QUESTION)
    before, count = 3, len(CONTEXT)
    start = [opened.bos_token_id]
    result = filled(opened, inject, torch.tensor([start + QUESTION]), memory)
    close(result.prefix, expected[:, [0, *range(1 + count, expected.shape[1])]])
    close(result.restored, expected[:, 1 : 1 + count])
    prefix = torch.tensor([start + QUESTION[:before]])
    cache = GrowingCache()
    filled(opened, inject, prefix, memory, cache)
    for at in range(before, len(QUESTION)):
        state = step(opened, inject, torch.tensor([QUESTION[at]]), cache)
        close(state, expected[:, 1 + count + at])


@fused_layouts
def test_the_reference_at_depth_zero_is_the_full_forward(opened: Backbone) -> None:
    _, hidden = two_depth_reference(opened, 0, CONTEXT, QUESTION)
    order = [opened.bos_token_id, *CONTEXT, *QUESTION]
    close(opened.logits(hidden), opened.model(torch.tensor([order])).logits)


@all_layouts
def test_embeddings_injected_at_depth_zero_equal_the_concatenation(opened: Backbone) -> None:
    ids = random_ids(1, 12)
    ids[:, 0] = opened.bos_token_id
    expected = opened.model(ids, use_cache=False).logits
    prefix = torch.cat([ids[:, :1], ids[:, 8:]], dim=1)
    result = filled(opened, 0, prefix, opened.embed(ids[:, 1:8]))
    close(opened.logits(result.prefix), expected[:, [0, *range(8, 12)]])
    close(opened.logits(result.restored), expected[:, 1:8])


# Decoding from one cache of unequal lengths


@all_layouts
@pytest.mark.parametrize("inject", [0, 2])
def test_cached_steps_equal_hugging_face_beyond_a_window(opened: Backbone, inject: int) -> None:
    ids = random_ids(1, 3 * WINDOW)
    expected = opened.model(ids, use_cache=False).logits
    atol = 1e-4 if opened.model.config.model_type in EAGER_FAMILIES else 2e-5
    for before in (2, WINDOW, 2 * WINDOW):
        cache = GrowingCache()
        given = filled(opened, inject, ids[:, :before], cache=cache)
        close(opened.logits(given.prefix), expected[:, :before], atol)
        for at in range(before, ids.shape[1]):
            state = step(opened, inject, ids[:, at], cache)
            close(opened.logits(state), expected[:, at], atol)


@fused_layouts
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


@fused_layouts
@pytest.mark.parametrize("inject", [0, 2])
def test_rows_of_a_batch_equal_the_same_rows_alone(opened: Backbone, inject: int) -> None:
    memories = [random_states(opened, count, seed) for seed, (_, count) in enumerate(ROWS)]
    shared, alone = GrowingCache(), [GrowingCache() for _ in ROWS]
    together = padded_batch(opened, inject, memories, shared)
    for row, (question, count) in enumerate(ROWS):
        ids = torch.tensor([[opened.bos_token_id, *question]])
        result = filled(opened, inject, ids, memories[row], alone[row])
        close(together.prefix[row, -ids.shape[1] :], result.prefix[0])
        close(together.restored[row, :count], result.restored[0])
    for tokens in ([31, 32, 33], [41, 42, 43], [51, 52, 53]):
        states = step(opened, inject, torch.tensor(tokens), shared)
        for row, cache in enumerate(alone):
            close(states[row : row + 1], step(opened, inject, torch.tensor([tokens[row]]), cache))


# Adapters


@fused_layouts
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


@fused_layouts
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


# Layouts that only the eager engine runs


def test_greedy_answers_equal_hugging_face(folder: str) -> None:
    backbone = open_backbone(folder)
    ids = random_ids(2, 2 * WINDOW)
    (end,) = {backbone.model.generation_config.eos_token_id, backbone.eos_token_id}
    expected = backbone.model.generate(ids, max_new_tokens=WINDOW, do_sample=False)
    cache = GrowingCache()
    given = filled(backbone, 2, ids, cache=cache)
    found = [backbone.logits(given.prefix[:, -1]).argmax(-1)]
    for _ in range(WINDOW - 1):
        found.append(backbone.logits(step(backbone, 2, found[-1], cache)).argmax(-1))
    rows = torch.stack(found, dim=1).tolist()
    for row, tokens in zip(rows, expected[:, ids.shape[1] :].tolist(), strict=True):
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert row[:length] == tokens[:length]


@eager_layouts
def test_independent_blocks_are_those_of_one_mask(opened: Backbone) -> None:
    """With biases: kept keys and values are attended to as in one pass with a mask over it all."""
    ids, states = random_ids(2, 5), torch.randn(2, 3, 4, opened.width)
    everything, real = torch.ones_like(ids, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool)
    ids[:, 0] = opened.bos_token_id
    bias = torch.tensor([[0.0, -1.0, -3.0]] * 2).repeat_interleave(4, dim=1)
    number = torch.arange(3).repeat_interleave(4).expand(2, -1)
    at_once = prefill(
        opened,
        2,
        ids,
        everything,
        states.flatten(1, 2),
        real,
        blocks=RestoredBlocks(number, "independent", bias),
    )
    cache = GrowingCache()
    for layer, pair in enumerate(keys_values(opened, 2, states.flatten(0, 1)), start=2):
        key, value = (t.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3) for t in pair)
        cache.upper.update(key, value, layer)
    blocks = RestoredBlocks(number, "independent", bias)
    alone = prefill(opened, 2, ids, everything, None, real, blocks=blocks, cache=cache)
    close(alone.prefix, at_once.prefix)


@eager_layouts
def test_a_bias_of_log_2_counts_a_state_twice(opened: Backbone) -> None:
    """A sink is one logit more, which no bias and no number of blocks changes."""
    ids = random_ids(1, 5)
    ids[:, 0] = opened.bos_token_id
    memory = keys_values(opened, 2, torch.randn(1, 3, opened.width))
    twice = [
        (torch.cat([key, key], dim=2), torch.cat([value, value], dim=2)) for key, value in memory
    ]

    def states(kept: KeysValues, count: int, bias: float) -> Tensor:
        real, cache = torch.ones(1, 3 * count, dtype=torch.bool), GrowingCache()
        number = torch.arange(count).repeat_interleave(3)[None]
        cache.upper.stored.update(enumerate(kept, start=2))
        everything = torch.ones_like(ids, dtype=torch.bool)
        blocks = RestoredBlocks(number, "independent", torch.full(real.shape, bias))
        return prefill(opened, 2, ids, everything, None, real, blocks=blocks, cache=cache).prefix

    close(states(memory, 1, math.log(2)), states(twice, 2, 0.0))
    assert not torch.allclose(states(memory, 1, 0.0), states(twice, 2, 0.0), atol=1e-4)


def test_sinks_matter(tiny_folder: Callable[..., str]) -> None:
    backbone, ids = open_backbone(tiny_folder("gpt_oss", **CHANGES["gpt_oss"])), random_ids(1, 5)
    given = backbone.model(ids).logits
    for layer in backbone.model.get_decoder().layers:
        layer.self_attn.sinks.fill_(-1e9)
    assert not torch.allclose(backbone.model(ids).logits, given, atol=1e-2)


def test_what_is_set_away_from_llama_matters(folder: str, tiny_folder: Callable[..., str]) -> None:
    """Otherwise the comparisons would also pass for a layout that ignores the settings."""
    backbone = open_backbone(folder)
    family = backbone.model.config.model_type
    if not CHANGES[family]:
        return
    ids = random_ids(1, 3 * WINDOW)
    plain = open_backbone(tiny_folder(family, **EXPERTS.get(family, {}))).model(ids).logits
    assert not torch.allclose(backbone.model(ids).logits, plain, atol=1e-2)


def test_adapters_sit_on_all_attention_matrices(folder: str) -> None:
    backbone = open_backbone(folder)
    backbone.add_lora(2, 4)
    adapted = {n.split(".")[-4] for n, _ in backbone.named_parameters() if "lora_A" in n}
    joined = backbone.model.config.model_type == "phi3"
    wanted = {"qkv_proj", "o_proj"} if joined else {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted == wanted


def test_adapters_on_experts_are_refused(tiny_folder: Callable[..., str]) -> None:
    for family, missing in (("qwen3_moe", 3), ("gpt_oss", 4)):
        backbone = open_backbone(tiny_folder(family, **CHANGES[family]))
        with pytest.raises(ConfigError, match=f"on 'gate_proj', but {missing} of 4 layers have no"):
            backbone.add_lora(2, 4, ["q_proj", "gate_proj"])


def test_stage_1_learns_on_it(folder: str, config: SedemConfig) -> None:
    backbone = open_backbone(folder)
    model = SeDeM(config.with_changes(encoder=folder), backbone, backbone)
    stage, ids = Stage1(model, Stage1Losses()), random_ids(2, 20)
    with torch.enable_grad():
        stage(ids[:, :16], ids[:, 16:])["loss"].backward()
    for name, parameters in stage.parameter_groups().items():
        grads = [p.grad for p in parameters if p.grad is not None]
        assert grads and all(bool(g.isfinite().all()) for g in grads), name
        assert any(bool(g.any()) for g in grads), name


def test_the_eager_engine_answers_and_says_why_it_is_used(
    folder: str, config: SedemConfig, documents: list[Document], caplog: pytest.LogCaptureFixture
) -> None:
    backbone = open_backbone(folder)
    model = SeDeM(config.with_changes(encoder=folder), backbone, backbone).eval()
    family = backbone.model.config.model_type
    with caplog.at_level(logging.WARNING):
        model.engine = open_engine("auto", model)
    assert caplog.messages == [
        f"engine 'eager' runs this model: the fast one is unproven on {family}"
    ]
    assert model.engine.name == "eager"
    answer = model.answer(model.read(documents), "What is the rent?", decoding=Decoding(3))
    assert answer.citations
    with pytest.raises(ConfigError, match=f"engine 'static' is proven .* not on {family}; use"):
        open_engine("static", model)

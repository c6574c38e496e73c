"""The static engine against the reference, for every family: the same answers and memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from answers import all_logits, inputs_for, opened
from conftest import LEASE, RECIPE, small_config
from torch import Tensor

from sedem import Decoding, Document, SeDeM
from sedem.backbone.decoder import FAMILIES
from sedem.engine.interface import AnswerInputs
from sedem.engine.static import open_engine
from sedem.method.compressor import encode
from sedem.selecting.plan import Request

WINDOW = 6
KINDS: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    ("mistral", {"sliding_window": WINDOW}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
]
IDS = [*FAMILIES, "untied-biased", "llama3-rope", "mistral-w", "qwen2-w", "qwen3-w"]
QUESTIONS = ["What is the rent?", "How many eggs?", "Pets?", "Who may leave, and when exactly?"]


def build(folder: str, **changes: object) -> SeDeM:
    """A model with random adapters, the same every time."""
    return opened(small_config(folder), lora=True, **changes)  # type: ignore[arg-type]


def static(model: SeDeM) -> SeDeM:
    model.engine = open_engine("static", model)
    return model


@pytest.fixture(params=KINDS, ids=IDS)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> str:
    family, changes = request.param
    return tiny_folder(family, **changes)


def requests(model: SeDeM) -> list[Request]:
    """Rows of different banks, K and lengths; some blocks are short."""
    both = model.read([Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)])
    short = model.read([Document("short.txt", "Short."), Document("one.txt", "1 2 3 4 5 6 7 8 9")])
    lease, recipe, pets, leave = QUESTIONS
    return [
        Request(both, lease, 2),
        Request(both, recipe, 5),
        Request(short, pets, "all"),
        Request(both, leave, blocks=[]),
        Request(both, leave, blocks=[7, 3]),
    ]


def test_greedy_answers_are_the_same(folder: str) -> None:
    slow, fast = build(folder), static(build(folder))
    expected = slow.answer_requests(requests(slow), Decoding(24))
    answers = fast.answer_requests(requests(fast), Decoding(24))
    assert [a.text for a in answers] == [a.text for a in expected]
    assert [a.citations for a in answers] == [a.citations for a in expected]
    assert [a.conditioning for a in answers] == [a.conditioning for a in expected]


def starts(model: SeDeM) -> list[AnswerInputs]:
    return [inputs_for(model, request) for request in requests(model)]


def forced(steps: int, rows: int) -> Tensor:
    return torch.randint(2, 258, (steps, rows), generator=torch.Generator().manual_seed(3))


CONTEXTS = ["joint", "separate", "independent"]
WAYS: list[tuple[tuple[str, dict[str, object]], dict[str, object]]] = [
    *((kind, {"block_context": one, "guidance": True}) for kind in KINDS for one in CONTEXTS),
    *((KINDS[0], {"block_context": one}) for one in CONTEXTS),
    *((KINDS[0], {"inject_layer": inject}) for inject in (0, 1, 3)),
    (KINDS[0], {"decompressor": "none", "inject_layer": 0}),
    (KINDS[0], {"decompressor": "identity", "compression": 1}),
]
"""Every context of blocks with and without guidance, depths of injection, and memory that is not
decompressed."""


@pytest.mark.parametrize(("folder", "changes"), WAYS, indirect=["folder"])
def test_logits_are_those_of_the_reference(folder: str, changes: dict[str, object]) -> None:
    slow = build(folder, **changes)
    rows, tokens = starts(slow), forced(6, 5)
    expected = all_logits(slow, rows, tokens)
    fast = static(slow)
    actual = all_logits(fast, rows, tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    # Buffers that another batch has used.
    again = all_logits(fast, rows[::-1], tokens.flip(1)).flip(1)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_about_as_exact_as_eager_attention_and_sdpa(folder: str) -> None:
    low = torch.bfloat16
    exact, sdpa = build(folder), build(folder, dtype=low)
    rows, tokens = starts(exact), forced(8, 5)
    truth = all_logits(exact, rows, tokens)
    reference = all_logits(sdpa, rows, tokens).float()
    sdpa.decoder.model.set_attn_implementation("eager")
    other = all_logits(sdpa, rows, tokens).float()
    sdpa.decoder.model.set_attn_implementation("sdpa")
    fast = all_logits(static(sdpa), rows, tokens).float()

    def error(logits: Tensor) -> float:
        return float((logits - truth).pow(2).mean().sqrt())

    # Nearly the same distance from float32, and not much farther from sdpa than eager attention is.
    assert error(fast) <= 1.25 * max(error(reference), error(other))
    apart = float((fast - reference).pow(2).mean().sqrt())
    assert apart <= 1.5 * max(error(reference), float((other - reference).pow(2).mean().sqrt()))


def test_reading_gives_the_same_states_and_bytes(folder: str) -> None:
    slow, fast = build(folder), static(build(folder))
    documents = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]
    expected, bank = slow.read(documents), fast.read(documents)
    assert torch.equal(bank.memory(range(len(bank))), expected.memory(range(len(bank))))
    assert bank.fingerprint == expected.fingerprint
    ids = torch.randint(2, 258, (3, 16))
    assert torch.equal(fast.engine.encode(ids), encode(slow.encoder, ids, (3,)))


def test_mixtures_of_layers_read_and_answer_alike(tiny_folder: Callable[..., str]) -> None:
    layers = {"extract_layers": (1, 3, 4), "layer_mixing": "learned"}
    slow, fast = build(tiny_folder(), **layers), static(build(tiny_folder(), **layers))
    expected = slow.answer_requests(requests(slow), Decoding(8))
    answers = fast.answer_requests(requests(fast), Decoding(8))
    assert [a.text for a in answers] == [a.text for a in expected]


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ["eager", "static", "graphs"])
def test_an_engine_on_a_gpu_has_the_logits_of_the_reference_on_a_cpu(
    folder: str, engine: str
) -> None:
    slow, tokens = build(folder), forced(6, 5)
    expected = all_logits(slow, starts(slow), tokens)
    fast = build(folder).to("cuda")
    rows = starts(fast)
    fast.engine = open_engine(engine, fast)
    actual = all_logits(fast, rows, tokens.to("cuda"))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-3)

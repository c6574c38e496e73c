"""Compiled layers: one graph without a break, one compilation for all layers, equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from answers import opened
from conftest import LEASE
from torch import Tensor

from sedem import Document, SedemConfig
from sedem.engine import compiled
from sedem.engine.static import Static

QUESTIONS = ["What is the rent?", "Pets?", "Who may leave, and when?"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled; they run as they were traced, for a compiler takes minutes."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    compiler = torch.compile

    def traced(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        assert settings == {"fullgraph": True, "mode": None}
        return compiler(function, fullgraph=True, backend=backend)

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "_COMPILED", {})
    monkeypatch.setattr(torch, "compile", traced)
    yield seen
    torch._dynamo.reset()


def test_answers_are_those_of_the_layers_that_are_not_compiled(
    config: SedemConfig, graphs: list[torch.fx.GraphModule]
) -> None:
    models = [opened(config, name, lora=True) for name in ("static", "compiled")]
    plain, fast = models
    banks = [model.read([Document("lease.txt", LEASE)]) for model in models]
    assert torch.equal(banks[0].memory([0, 1]), banks[1].memory([0, 1]))
    for asked in (QUESTIONS[:1], QUESTIONS):
        answers = [m.answer(b, asked) for m, b in zip(models, banks, strict=True)]
        assert [a.text for a in answers[0]] == [a.text for a in answers[1]]
        assert [a.citations for a in answers[0]] == [a.citations for a in answers[1]]
    assert isinstance(fast.engine, Static) and fast.engine.name == "compiled"
    assert isinstance(plain.engine, Static) and plain.engine.name == "static"
    # All layers share the forms of one, and other numbers of tokens and rows bring no new ones.
    forms = len(graphs)
    fast.answer(banks[1], ["Who pays for water, heating and the garden, and how is it shared?"])
    fast.answer(banks[1], [*QUESTIONS, "Plums?"])
    assert 3 <= forms == len(graphs)

"""Questions to the tiny model, and what an answer is checked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sedem import Answer, Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.bank.index import keys_of
from sedem.engine.interface import AnswerInputs, Engine, Rows
from sedem.engine.static import Static, open_engine
from sedem.guidance import Queries
from sedem.method.selector import block_scores
from sedem.selecting.plan import Prepared, Request, Scores, plan_of, prepare
from sedem.selecting.select import choose, select

RENT = "What is the rent?"
QUESTIONS = (
    RENT,
    "Pets?",
    "How long does the pie keep, and with which fruit or seed is it served in Görlitz? 🥧",
    "When may the tenant leave the flat in Mill Lane 4?",
)
SHORT = Decoding(max_new_tokens=12)


def build(config: SedemConfig, backbone: Backbone, **changes: object) -> SeDeM:
    """Build an untrained model from a configuration with some settings changed."""
    torch.manual_seed(1)
    return SeDeM(config.with_changes(**changes), backbone, backbone).eval()


def opened(
    config: SedemConfig,
    engine: str = "eager",
    *,
    lora: bool = False,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> SeDeM:
    """Open backbones and build an untrained, frozen model on them, with random adapters or none."""
    config = config.with_changes(**changes)
    encoder = open_backbone(config.encoder, dtype=dtype)
    decoder = open_backbone(str(config.decoder), dtype=dtype) if config.cross_model else encoder
    torch.manual_seed(1)
    model = SeDeM(config, encoder, decoder)
    if lora:
        decoder.add_lora(config.lora_rank, config.lora_alpha)
        for factor in decoder.lora_parameters():
            factor.data = torch.randn(factor.shape) * 0.2
    model.requires_grad_(False).eval()
    model.engine = open_engine(engine, model)
    return model


@torch.no_grad()
def teach(part: Queries) -> None:
    """Give queries random weights, so that they differ from the selector's."""
    up = part.up.weight
    up.copy_(torch.randn(up.shape, generator=torch.Generator().manual_seed(1)))


def scores_by(model: SeDeM, bank: MemoryBank, part: Queries, hidden_QE: Tensor) -> Tensor:
    """The scores `[N]` by the queries of a part, written out."""
    selector, every = model.selector, range(len(bank))
    weight = selector.w_query.weight + part.up.weight @ part.down.weight
    heads = (selector.norm_query(hidden_QE) @ weight.T).unflatten(-1, (selector.heads, -1))
    return block_scores(
        (heads / heads.norm(dim=-1, keepdim=True))[None],
        torch.ones(1, len(hidden_QE), dtype=torch.bool),
        keys_of(bank, selector, every).dequantize()[None],
        torch.as_tensor(bank.slot_tokens(every))[None] > 0,
    )[0]


def engine_of(model: SeDeM) -> Static:
    """Return the fast engine that runs a model."""
    assert isinstance(model.engine, Static)
    return model.engine


def inputs_for(model: SeDeM, request: Request, turn: int = 0) -> AnswerInputs:
    """Return the inputs of an answer from blocks that no question chose."""
    scores = torch.arange(len(request.bank)).roll(turn).float()
    plan = plan_of(model, request)
    inputs = prepare(model, plan, choose(model, plan, Scores(scores)), 1).inputs
    assert inputs is not None
    return inputs


def prepared_for(model: SeDeM, request: Request, limit: int) -> Prepared:
    """Select the blocks of a request, and make the inputs of its answer."""
    plan = plan_of(model, request)
    selection = plan.selected or select(model, model.engine, [plan])[0]
    return prepare(model, plan, selection, limit)


@contextmanager
def joined(
    engine: Engine, inputs: Sequence[AnswerInputs], limit: int
) -> Iterator[tuple[Tensor, Rows]]:
    """Let some rows join together; yield the logits after their prefixes, and the rows."""
    with torch.no_grad(), engine.open_rows(len(inputs)) as rows:
        yield rows.join(range(len(inputs)), inputs, [limit] * len(inputs)), rows


def all_logits(model: SeDeM, rows: Sequence[AnswerInputs], tokens: Tensor) -> Tensor:
    """Logits after the prefixes of some rows, and after each of some tokens `[1 + steps, B, V]`."""
    with joined(model.engine, rows, len(tokens) + 1) as (first, running):
        return torch.stack([first, *(running.step(ids) for ids in tokens)])


def untimed(answer: Answer) -> Answer:
    """Leave out the timings, which differ between runs."""
    return replace(answer, timings={})


def assert_cites(answer: Answer, documents: Sequence[Document]) -> None:
    """Check that there are k citations, ranked by score, and that each quotes its document."""
    texts = {document.name: document.text for document in documents}
    assert [c.rank for c in answer.citations] == list(range(1, answer.k + 1))
    assert all(texts[c.document][c.start : c.end] == c.text for c in answer.citations)
    assert all(0 <= c.start < c.end for c in answer.citations)
    if answer.model == "full-context":
        assert {c.score for c in answer.citations} == {None}
    else:
        scores = [c.score for c in answer.citations if c.score is not None]
        assert len(scores) == answer.k and scores == sorted(scores, reverse=True)
    assert 0 <= answer.k <= answer.blocks


def assert_same_sources(one: Answer, other: Answer) -> None:
    """Check that two answers cite the same blocks with nearly the same scores."""
    assert (one.k, one.blocks, one.finish_reason, one.cut) == (
        other.k,
        other.blocks,
        other.finish_reason,
        other.cut,
    )
    for left, right in zip(one.citations, other.citations, strict=True):
        exact = {"score": 0.0, "state_score": 0.0}
        assert replace(left, **exact) == replace(right, **exact)
        assert left.state_score == pytest.approx(right.state_score, abs=1e-4)
        assert left.score == pytest.approx(right.score, abs=1e-4)

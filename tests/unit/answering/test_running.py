"""Questions that are asked ahead."""

from __future__ import annotations

import pytest
from conftest import LEASE

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.answering.running import USUAL
from sedem.backbone.loading import open_backbone
from sedem.engine.batch import StaticBatch
from sedem.engine.fused import QuestionBuffers
from sedem.engine.open import open_engine
from sedem.engine.rows import Batches
from sedem.engine.static import Static

LIMIT = Decoding(max_new_tokens=3)


def test_no_usual_question_needs_new_buffers_afterwards(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = open_backbone(config.encoder)
    model = SeDeM(config, backbone, backbone).requires_grad_(False).eval()
    model.engine = open_engine("static", model)
    bank = model.read([Document("lease.txt", LEASE)])
    made: list[object] = []
    new_batch, new_buffers = Batches._new, QuestionBuffers.__init__
    monkeypatch.setattr(Batches, "_new", lambda *a: made.append(a) or new_batch(*a))
    monkeypatch.setattr(
        QuestionBuffers, "__init__", lambda *a, **k: made.append(a) or new_buffers(*a, **k)
    )
    stepped, step = set[StaticBatch](), StaticBatch.step
    monkeypatch.setattr(StaticBatch, "step", lambda s, ids: stepped.add(s) or step(s, ids))
    model.rehearse(bank, decoding=LIMIT)
    assert made
    assert isinstance(model.engine, Static) and stepped == {*model.engine.batches.idle}
    made.clear()
    for letters in (1, 7, 20, USUAL):
        question = "x" * letters
        assert len(model.encoder.token_ids(question)) == letters
        model.answer(bank, question, decoding=LIMIT)
    assert not made
    model.answer(bank, "x" * 2 * USUAL, decoding=LIMIT)
    assert made

"""Parity of the engines on a device with the reference on a CPU, on sedem-nano."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sedem import SeDeM
from sedem.data.documents import read_documents
from sedem.demo import DOCUMENTS, QUESTIONS
from sedem.engine.open import ENGINES
from sedem.errors import ConfigError
from sedem.provenance import provenance

TOLERANCE = 1e-3
"""Maximum difference of two scores per token of the question, over which a score is summed.

Slots are stored in bfloat16. With another summation order, a value may round to a neighbour.
"""


def parity(checkpoint: Path, device: torch.device) -> dict[str, Any]:
    """Compare scores of blocks and answers of every engine with those of the reference.

    Args:
        checkpoint: a model of SeDeM.
        device: the device that the engines run on.

    Returns:
        By engine, the largest score difference per token of the question and the number of
        different answers; and the provenance.

    Raises:
        ConfigError: an engine gives different answers or scores.
    """
    expected_scores, expected = _asked(checkpoint, torch.device("cpu"), "eager")
    left_out = ("auto",) if device.type == "cuda" else ("auto", "graphs")
    engines = [engine for engine in ENGINES if engine not in left_out]
    found: dict[str, dict[str, float]] = {}
    for engine in engines:
        scores, answers = _asked(checkpoint, device, engine)
        found[engine] = {
            "score_difference": (scores - expected_scores).abs().max().item(),
            "other_answers": sum(a != b for a, b in zip(answers, expected, strict=True)),
        }
    for engine, row in found.items():
        if row["other_answers"] or row["score_difference"] > TOLERANCE:
            raise ConfigError(
                f"engine '{engine}' on {device} differs from the reference on the CPU: {row}; it "
                "must not be used there until the cause is found"
            )
    return {"engines": found, "questions": len(QUESTIONS), **provenance(device)}


def _asked(checkpoint: Path, device: torch.device, engine: str) -> tuple[torch.Tensor, list[str]]:
    """Scores of every block for every question, per token of the question, and the answers."""
    model = SeDeM.from_pretrained(checkpoint, dtype=torch.float32, device=device, engine=engine)
    memory = model.read(read_documents(sorted(DOCUMENTS.glob("*.txt"))))
    tokens = [len(model.encoder.token_ids(question)) for question in QUESTIONS]
    scores = torch.stack(
        [model.scores(memory, q) / n for q, n in zip(QUESTIONS, tokens, strict=True)]
    )
    return scores, [answer.text for answer in model.answer(memory, QUESTIONS)]

"""Fitting the confidence that the documents contain the evidence, after training.

Each question is scored twice: against all its documents, and against those without evidence.
Nothing is generated, so only the encoder and the selector run.

Letters: B questions in both contexts, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.answering.requests import encode_questions
from sedem.bank.blocks import BlockRow
from sedem.bank.keys import keys_of
from sedem.bank.memory_bank import BankReader
from sedem.bank.search import key_scores
from sedem.data.examples import Example
from sedem.data.labels import from_evidence
from sedem.errors import DataError
from sedem.evaluation.metrics import auroc, calibration_error
from sedem.guidance.scores import Confidence, confidence_features
from sedem.model import SeDeM
from sedem.reading.encoding import Progress
from sedem.types import Document

HELD_OUT = 0.25
"""Share of the questions that the metrics are computed on; the rest are used for fitting."""

LEAST = 16
"""Minimum number of usable questions, for fitting and measuring together."""


@dataclass(frozen=True)
class Calibration:
    """A fitted confidence, and its quality on held-out questions.

    Attributes:
        held_out: number of questions measured; each counts twice, with and without evidence.
        left_out: number of questions without evidence, or with evidence everywhere.
        auroc: probability that a question with evidence has more confidence than one without.
        calibration_error: mean distance between confidence and share of questions with evidence.
    """

    part: Confidence
    fitted: int
    held_out: int
    left_out: int
    auroc: float
    calibration_error: float

    def to_dict(self) -> dict[str, float]:
        """The metrics as values for JSON."""
        return {
            "fitted": self.fitted,
            "held_out": self.held_out,
            "left_out": self.left_out,
            "auroc": round(self.auroc, 4),
            "calibration_error": round(self.calibration_error, 4),
        }


def calibrate(
    model: SeDeM, examples: Sequence[Example], progress: Progress | None = None
) -> Calibration:
    """Fit a confidence to the first questions of a set, and measure it on the last ones.

    Questions about one document are adjacent in a file, so the two parts mostly have different
    documents.

    Raises:
        DataError: too few questions can be used.
    """
    features_BF, present_B = evidence_features(model, examples, progress)
    usable = len(present_B) // 2
    held_out = round(HELD_OUT * usable)
    if usable < LEAST:
        raise DataError(
            f"{usable} of {len(examples):,} questions have labelled evidence and blocks without "
            f"any, at least {LEAST} are needed; give more questions"
        )
    border = 2 * (usable - held_out)
    part = Confidence()
    part.fit(features_BF[:border], present_B[:border])
    with torch.no_grad():
        confidence_B = part(features_BF[border:])
    return Calibration(
        part,
        fitted=usable - held_out,
        held_out=held_out,
        left_out=len(examples) - usable,
        auroc=auroc(confidence_B, present_B[border:]),
        calibration_error=calibration_error(confidence_B, present_B[border:]),
    )


@torch.no_grad()
def evidence_features(
    model: SeDeM, examples: Sequence[Example], progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Features of questions against their documents, with the evidence and without.

    A question without evidence, or with nothing else, is left out.

    Returns:
        Features `[B, F]` on the CPU, and whether the evidence is present `[B]`. Each question has
        two rows: with the evidence, then without.
    """
    texts = list(dict.fromkeys(d.text for example in examples for d in example.documents))
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    bank = model.read(documents, progress=progress)
    blocks: dict[str, list[int]] = {text: [] for text in texts}
    for index, block in enumerate(bank.blocks):
        blocks[texts[block.document]].append(index)
    rows: list[Tensor] = []
    for example in examples:
        indices = [index for document in example.documents for index in blocks[document.text]]
        owners = [n for n, d in enumerate(example.documents) for _ in blocks[d.text]]
        absent_N = ~torch.tensor(_gold(bank, example, indices, owners))
        if bool(absent_N.all()) or not bool(absent_N.any()):
            continue
        scores_N, tokens = _scores(model, bank, example.question, indices)
        rows += [
            confidence_features(scores_N, tokens),
            confidence_features(scores_N[absent_N], tokens),
        ]
    features_BF = torch.stack(rows) if rows else torch.zeros(0, 0)
    return features_BF, torch.tensor([True, False]).repeat(len(rows) // 2)


def _gold(
    bank: BankReader, example: Example, indices: Sequence[int], owners: Sequence[int]
) -> list[bool]:
    """Which blocks count as evidence: whole documents, or blocks if all documents have evidence."""
    gold = {span.document for span in example.evidence}
    if gold < set(owners):
        return [owner in gold for owner in owners]
    blocks = (bank.blocks[index] for index in indices)
    rows = [
        BlockRow(owner, block.start, block.end, ())
        for owner, block in zip(owners, blocks, strict=True)
    ]
    return from_evidence(rows, example.evidence)


def _scores(
    model: SeDeM, bank: BankReader, question: str, indices: Sequence[int]
) -> tuple[Tensor, int]:
    """Scores of the given blocks `[N]` on the CPU, and the number of question tokens."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, [question])
    padding_P = (bank.slot_tokens(indices).flatten() == 0).nonzero()[:, 0]
    query_BQRH = model.selector.queries(hidden_BQE)
    keys_NJRH = keys_of(bank, model.selector, indices)
    scores_BN = key_scores(query_BQRH, mask_BQ, keys_NJRH, padding_P)
    return scores_BN[0].cpu(), int(mask_BQ.sum())

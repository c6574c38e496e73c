"""How well scores predict whether the evidence is there, on articles not used for fitting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.system.scales import Questions, Scale
from sedem import SeDeM
from sedem.evaluation.metrics import BINS, RESAMPLES, auroc, calibration_error
from sedem.evaluation.run import sample
from sedem.guidance.confidence import FEATURES, Confidence
from sedem.provenance import provenance
from sedem.training.calibration import evidence_features

FITTED = {
    "smoke": Questions("SQuAD", "squad.json", "squad"),
    "nano": Questions("SQuAD, training part", "squad/train-44-articles.json", "squad"),
    "paper": Questions("SQuAD", "squad", "squad", split="train"),
}
"""The questions used to fit the confidence, by scale."""
ASKED = {"paper": Questions("SQuAD-10", "squad", "squad", split="validation")}
"""The questions used to measure it, for scales without a set in SQuAD's schema."""

DISTRACTORS = (9, 39)
"""Number of paragraphs besides the one with evidence; the first number is used for fitting."""
LIMITS = (1000, 300)
"""Number of questions for each number of paragraphs."""
THRESHOLD = 0.5

Measure = Callable[[Tensor, Tensor], float]


def confidence(
    checkpoint: Path, scale: Scale, questions: str, data: Path, limit: int | None
) -> dict[str, Any]:
    """Fit a confidence to training questions, and measure it on the questions of a set.

    Each question is scored against all its paragraphs, and against all except the one with the
    evidence.

    Args:
        checkpoint: the model.
        scale: gives the sets.
        questions: key of the set, in SQuAD's schema unless `ASKED` has another one.
        data: folder of the data files.
        limit: number of questions of each context; None means `LIMITS`.

    Returns:
        By number of paragraphs: AUROC of the confidence and of each feature alone, the calibration
        error, and the shares of questions with and without evidence that `THRESHOLD` declines.
    """
    model = SeDeM.from_pretrained(checkpoint, engine="eager")
    part, fitted = Confidence(), FITTED[scale.name]
    asked = ASKED.get(scale.name) or scale.sets[questions]
    part.fit(*_features(model, fitted, data, DISTRACTORS[0], limit or LIMITS[0]))
    measured = {
        str(1 + distractors): measure_confidence(
            part,
            *_features(model, asked, data, distractors, limit or most),
        )
        for distractors, most in zip(DISTRACTORS, LIMITS, strict=True)
    }
    return {
        "by_paragraphs": measured,
        "fitted_to": {"data": Path(fitted.source).name, "limit": limit or LIMITS[0], "seed": 0},
        "parameters": {
            **dict(zip(FEATURES, part.weight.tolist(), strict=True)),
            "bias": part.bias.item(),
        },
        "questions": {"data": Path(asked.source).name, "seed": 0},
        "checkpoint": checkpoint.name,
        **provenance(),
    }


def _features(
    model: SeDeM, questions: Questions, data: Path, distractors: int, limit: int
) -> tuple[Tensor, Tensor]:
    """Features of a sample of a set's questions, with and without the evidence."""
    chosen = replace(questions, options={**questions.options, "distractors": distractors})
    return evidence_features(model, sample(chosen.examples(data), limit, 0))


@torch.no_grad()
def measure_confidence(part: Confidence, features_BF: Tensor, present_B: Tensor) -> dict[str, Any]:
    """Metrics of a confidence, each with its interval over questions.

    Args:
        part: the confidence.
        features_BF: features of questions, alternately with and without the evidence.
        present_B: whether the evidence is there.
    """
    confidence_B = part(features_BF)
    found = {
        "auroc": _with_interval(auroc, confidence_B, present_B),
        "calibration_error": _with_interval(calibration_error, confidence_B, present_B),
        "declined_with_evidence": _with_interval(_declined(True), confidence_B, present_B),
        "declined_without_evidence": _with_interval(_declined(False), confidence_B, present_B),
    }
    alone = {
        name: _with_interval(auroc, features_BF[:, number], present_B)
        for number, name in enumerate(FEATURES)
    }
    groups = confidence_B.argsort(stable=True).tensor_split(BINS)
    reliability = [
        {
            "confidence": round(float(confidence_B[group].mean()), 4),
            "with_evidence": round(float(present_B[group].float().mean()), 4),
        }
        for group in groups
        if len(group)
    ]
    return {**found, "auroc_of_one_feature": alone, "reliability": reliability}


def _declined(present: bool) -> Measure:
    """Percentage of the questions of one kind whose confidence is below the threshold."""

    def measure(confidence_B: Tensor, present_B: Tensor) -> float:
        return 100 * float((confidence_B[present_B == present] < THRESHOLD).float().mean())

    return measure


def _with_interval(measure: Measure, values_B: Tensor, present_B: Tensor) -> dict[str, Any]:
    """A metric, its 95 % bootstrap interval over questions, and the number of questions."""
    count = len(present_B) // 2
    rng = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES):
        # Both contexts of a question are drawn together.
        first_B = 2 * torch.from_numpy(rng.integers(count, size=count))
        rows_B = torch.stack([first_B, first_B + 1], 1).flatten()
        resampled.append(measure(values_B[rows_B], present_B[rows_B]))
    low, high = np.percentile(resampled, [2.5, 97.5])
    bounds = [round(float(low), 4), round(float(high), 4)]
    return {"mean": round(measure(values_B, present_B), 4), "interval": bounds, "n": count}

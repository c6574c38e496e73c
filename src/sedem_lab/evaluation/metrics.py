"""Answer and selection metrics, with bootstrap intervals over examples.

Normalization, EM and F1 are those of SQuAD's script v1.1: lower case, no punctuation, no articles,
single spaces. All scores are on a scale from 0 to 100. With several references the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

RESAMPLES = 2000
BINS = 10
"""Number of groups of predictions for the calibration error."""
DRAWN = 2**20
"""Number of random numbers drawn at once for resamples: 8 MB."""


def normalize(text: str) -> str:
    """Normalize an answer as SQuAD does before comparing it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


# Answers


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """100 if the prediction equals a reference after normalization, else 0."""
    return _best(lambda p, r: float(normalize(p) == normalize(r)), prediction, references)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Token-level F1 after normalization. Without common tokens it is 0, even if both are empty."""
    return _best(_f1, prediction, references)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L F1, as the package rouge-score computes it, on normalized text."""
    score = _rouge().score
    return _best(
        lambda p, r: score(normalize(r), normalize(p))["rougeL"].fmeasure, prediction, references
    )


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """100 if the prediction contains a reference, ignoring case, else 0 (RULER's QA score)."""
    return _best(lambda p, r: float(r.lower() in p.lower()), prediction, references)


# Selection; evidence[i] is true if block i has evidence


def recall_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """100 if one of the k best blocks is evidence, else 0."""
    return 100.0 * any(evidence[index] for index in ranked[:k])


def evidence_recall_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """Share of the evidence blocks that are among the k best. At least one must be evidence."""
    return 100.0 * sum(evidence[index] for index in ranked[:k]) / sum(evidence)


def precision_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """Share of the k best blocks that are evidence, or of all blocks if there are fewer than k."""
    best = ranked[:k]
    return 100.0 * sum(evidence[index] for index in best) / max(1, len(best))


def reciprocal_rank(ranked: Sequence[int], evidence: Sequence[bool]) -> float:
    """100 divided by the rank of the first evidence block; 0 if none is ranked."""
    ranks = (rank for rank, index in enumerate(ranked, start=1) if evidence[index])
    return next((100.0 / rank for rank in ranks), 0.0)


# Intervals


def bootstrap(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the lower and upper bound of its 95 % interval over resampled examples."""
    low, high = np.percentile(resampled_means(values), [2.5, 97.5])
    return float(np.mean(values)), float(low), float(high)


def resampled_means(values: Sequence[float]) -> list[float]:
    """Means of samples drawn with replacement, each of the size of `values`."""
    numbers = np.asarray(values, dtype=float)
    rng = np.random.default_rng(0)
    means: list[float] = []
    together = max(1, DRAWN // len(numbers))
    for start in range(0, RESAMPLES, together):
        size = min(together, RESAMPLES - start), len(numbers)
        means += rng.choice(numbers, size).mean(axis=1).tolist()
    return means


def summarize(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """A metric with JSON types: mean, interval and number of examples."""
    mean, low, high = (round(value, digits) for value in bootstrap(values))
    return {"mean": mean, "interval": [low, high], "n": len(values)}


def _best(score: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    return 100.0 * max(score(prediction, reference) for reference in references)


def _f1(prediction: str, reference: str) -> float:
    predicted, expected = normalize(prediction).split(), normalize(reference).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)


# Confidence


def auroc(confidence_B: Tensor, present_B: Tensor) -> float:
    """The probability that a question with evidence has more confidence than one without.

    Ties count half. Both kinds must be present. `present_B` is whether the documents had the
    evidence.
    """
    absent = np.sort(confidence_B[~present_B].double().numpy())
    present = confidence_B[present_B].double().numpy()
    below = np.searchsorted(absent, present, "left") + np.searchsorted(absent, present, "right")
    return float(below.mean() / (2 * len(absent)))


def calibration_error(confidence_B: Tensor, present_B: Tensor) -> float:
    """Expected calibration error: how far confidences are from observed shares.

    Questions are put into `BINS` groups of equal size by confidence. The error is the mean over
    groups of the distance between mean confidence and share of questions with evidence.
    """
    order_B = confidence_B.double().argsort(stable=True)
    groups = order_B.tensor_split(BINS)
    distances = [
        len(group) * (confidence_B[group].double().mean() - present_B[group].double().mean()).abs()
        for group in groups
        if len(group)
    ]
    return float(sum(distances) / len(order_B))

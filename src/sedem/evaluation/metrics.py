"""Answer and selection metrics, with bootstrap intervals over examples.

Normalization, EM and F1 are those of SQuAD's script v1.1: lower case, no punctuation, no articles,
single spaces. All scores are on a 0-100 scale; with several references the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

RESAMPLES = 2000


def normalize(text: str) -> str:
    """An answer as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


# Answers


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """100 when the prediction equals a reference after normalization."""
    return _best(lambda p, r: float(normalize(p) == normalize(r)), prediction, references)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Token-level F1 after normalization; nothing in common is 0, even where both are empty."""
    return _best(_f1, prediction, references)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L F1, as the package rouge-score computes it, on normalized text."""
    score = _rouge().score
    return _best(
        lambda p, r: score(normalize(r), normalize(p))["rougeL"].fmeasure, prediction, references
    )


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """100 when a reference stands somewhere in the prediction, case aside (RULER's QA score)."""
    return _best(lambda p, r: float(r.lower() in p.lower()), prediction, references)


# Selection; evidence[i] says whether block i holds some


def recall_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """100 when one of the k best blocks is evidence."""
    return 100.0 * any(evidence[index] for index in ranked[:k])


def evidence_recall_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """Share of the evidence blocks that are among the k best; there must be one."""
    return 100.0 * sum(evidence[index] for index in ranked[:k]) / sum(evidence)


def precision_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """Share of the k best blocks that are evidence; of fewer blocks, where there are no k."""
    best = ranked[:k]
    return 100.0 * sum(evidence[index] for index in best) / max(1, len(best))


def reciprocal_rank(ranked: Sequence[int], evidence: Sequence[bool]) -> float:
    """100 divided by the rank of the first evidence block; 0 when none is ranked."""
    ranks = (rank for rank, index in enumerate(ranked, start=1) if evidence[index])
    return next((100.0 / rank for rank in ranks), 0.0)


# Intervals


def bootstrap(
    values: Sequence[float], *, samples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Mean and its 95 % interval over resampled examples.

    Args:
        values: one number an example; not empty.
        samples: resamples.
        seed: of the resampling.

    Returns:
        Mean, lower and upper bound.
    """
    low, high = np.percentile(resampled_means(values, samples, seed), [2.5, 97.5])
    return float(np.mean(values)), float(low), float(high)


def resampled_means(
    values: Sequence[float], samples: int = RESAMPLES, seed: int = 0
) -> list[float]:
    """Means of samples with replacement, each as large as the values."""
    numbers = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    return [float(rng.choice(numbers, len(numbers)).mean()) for _ in range(samples)]


def summarize(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """A metric as results show it: mean, interval and number of examples."""
    mean, low, high = (round(value, digits) for value in bootstrap(values))
    return {"mean": mean, "interval": [low, high], "n": len(values)}


def _best(score: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    return 100.0 * max(score(prediction, reference) for reference in references)


def _f1(prediction: str, reference: str) -> float:
    got, wanted = normalize(prediction).split(), normalize(reference).split()
    common = sum((Counter(got) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(got), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)

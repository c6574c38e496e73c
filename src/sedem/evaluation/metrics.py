"""Answer and selection metrics, with bootstrap intervals over examples.

Normalization is SQuAD's: lower case, no punctuation, no articles, single spaces. All scores are on
a 0-100 scale; with several references the best one counts.
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


def normalize(text: str) -> str:
    """An answer as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """100 when the prediction equals a reference after normalization."""
    return _best(lambda p, r: float(normalize(p) == normalize(r)), prediction, references)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Token-level F1 after normalization."""
    return _best(_f1, prediction, references)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L F1, as the package rouge-score computes it, on normalized text."""
    score = _rouge().score
    return _best(
        lambda p, r: score(normalize(r), normalize(p))["rougeL"].fmeasure, prediction, references
    )


def recall_at(ranked: Sequence[int], evidence: Sequence[bool], k: int) -> float:
    """100 when one of the k best blocks is evidence."""
    return 100.0 * any(evidence[index] for index in ranked[:k])


def bootstrap(
    values: Sequence[float], *, samples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean and its 95 % interval over resampled examples.

    Args:
        values: one number an example; not empty.
        samples: resamples.
        seed: of the resampling.

    Returns:
        Mean, lower and upper bound.
    """
    numbers = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    means = [rng.choice(numbers, len(numbers)).mean() for _ in range(samples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(numbers.mean()), float(low), float(high)


def summarize(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """A metric as results show it: mean, interval and number of examples."""
    mean, low, high = (round(value, digits) for value in bootstrap(values))
    return {"mean": mean, "interval": [low, high], "n": len(values)}


def _best(score: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    return 100.0 * max(score(prediction, reference) for reference in references)


def _f1(prediction: str, reference: str) -> float:
    got, wanted = normalize(prediction).split(), normalize(reference).split()
    if not got or not wanted:
        return float(got == wanted)
    common = sum((Counter(got) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(got), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=False)

"""Answer metrics equal those of SQuAD and rouge-score; intervals have their coverage."""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from sedem_lab.evaluation import metrics
from sedem_lab.evaluation.metrics import (
    bootstrap,
    evidence_recall_at,
    exact_match,
    normalize,
    precision_at,
    recall_at,
    reciprocal_rank,
    resampled_means,
    rouge_l,
    string_match_part,
    summarize,
    token_f1,
)

# What SQuAD's own evaluation script (v1.1) computes, written out


def squad_normalize(answer: str) -> str:
    def remove_articles(text: str) -> str:
        return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

    def white_space_fix(text: str) -> str:
        return " ".join(text.split())

    def remove_punctuation(text: str) -> str:
        return "".join(character for character in text if character not in set(string.punctuation))

    return white_space_fix(remove_articles(remove_punctuation(answer.lower())))


def squad_f1(gold: str, prediction: str) -> float:
    gold_tokens, predicted_tokens = (squad_normalize(text).split() for text in (gold, prediction))
    common = collections.Counter(gold_tokens) & collections.Counter(predicted_tokens)
    same = sum(common.values())
    if same == 0:
        return 0
    precision, recall = same / len(predicted_tokens), same / len(gold_tokens)
    return (2 * precision * recall) / (precision + recall)


ANSWERS = st.lists(
    st.one_of(
        st.sampled_from(["the", "a", "An", "THE", "theory", "900", "euros", "U.S.", "a.m.", "-"]),
        st.text(max_size=6),
    ),
    max_size=6,
).map(" ".join)


@settings(deadline=None, max_examples=50)
@given(ANSWERS, st.lists(ANSWERS, min_size=1, max_size=3))
# Articles are whole words, and punctuation, of which only ASCII has any, goes first.
@example("A, the: an! another theory", ["the-cat a.m.", "$1,800.50"])
@example("“Görlitz” – ÄÖÜ 日本語。", ["görlitz äöü", "non\u00a0breaking  \ta day\n"])  # noqa: RUF001
# Equal after normalization, with no token in common: v1.1 gives these an F1 of 0.
@example("the", ["an"])
# Repeated tokens count as often as both have them: 2 of 3 and 2 of 2; 1 of 1 and 1 of 3.
@example("no no no", ["no no"])
@example("no", ["No, no, no!"])
@example("The 900 Euros.", ["nothing", "900", "900 euros a month", "900 euros"])
@example("", ["900 euros"])
def test_scores_are_those_of_squad_and_rouge_score(prediction: str, references: list[str]) -> None:
    assert normalize(prediction) == squad_normalize(prediction)
    normal = [squad_normalize(reference) for reference in references]
    assert exact_match(prediction, references) == 100.0 * (squad_normalize(prediction) in normal)
    f1 = max(squad_f1(reference, prediction) for reference in references)
    assert token_f1(prediction, references) == pytest.approx(100 * f1)
    score = RougeScorer(["rougeL"], use_stemmer=False).score
    longest = max(score(r, squad_normalize(prediction))["rougeL"].fmeasure for r in normal)
    assert rouge_l(prediction, references) == pytest.approx(100 * longest)


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        # The longest common subsequence.
        (rouge_l, "police killed gunman", ["police kill gunman"], 100 * 2 / 3),
        (rouge_l, "b c d e", ["x b y d z"], 100 * 2 * (2 / 4) * (2 / 5) / (2 / 4 + 2 / 5)),
        (rouge_l, "", ["police"], 0),
        (string_match_part, "It is 900 Euros a month", ["1,800 euros", "900 EUROS"], 100),
        (string_match_part, "900", ["900 euros"], 0),
        # Part of a word is a match, as in RULER; nothing is normalized.
        (string_match_part, "category", ["cat"], 100),
        (string_match_part, "900 euros", ["the 900 euros"], 0),
        (string_match_part, "", ["900"], 0),
    ],
)
def test_parts_of_answers_are_scored(
    metric: Callable[..., float], prediction: str, references: list[str], score: float
) -> None:
    assert metric(prediction, references) == pytest.approx(score)


def test_selection_counts_evidence_blocks_and_ranks_the_first() -> None:
    ranked, evidence = [4, 0, 2, 1], [False, True, True, False, False]
    for k, *expected in (
        (1, 0, 0, 0), (2, 0, 0, 0), (3, 100, 50, 100 / 3), (4, 100, 100, 50), (9, 100, 100, 50)
    ):  # fmt: skip
        scores = (recall_at, evidence_recall_at, precision_at)
        found = [score(ranked, evidence, k) for score in scores]
        assert found == pytest.approx(expected)
        assert recall_at([], evidence, k) == 0
    assert reciprocal_rank(ranked, evidence) == pytest.approx(100 / 3)
    assert reciprocal_rank([0, 3], evidence) == 0


# Intervals


def test_the_interval_is_that_of_the_mean() -> None:
    values = np.random.default_rng(2).normal(50, 20, 400)
    mean, low, high = bootstrap(values.tolist())
    half = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert low == pytest.approx(mean - half, abs=0.15 * half)
    assert high == pytest.approx(mean + half, abs=0.15 * half)
    assert bootstrap([3.5] * 7) == (3.5, 3.5, 3.5)
    assert summarize([0.0, 100.0, 100.0]) == {"mean": 66.67, "interval": [0, 100], "n": 3}


def test_the_interval_covers_the_truth_about_95_times_in_100(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "RESAMPLES", 300)
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        _, low, high = bootstrap((100.0 * (rng.random(150) < 0.3)).tolist())
        covered += low <= 30.0 <= high
    assert 88 <= covered <= 100


@pytest.mark.parametrize("drawn", [1, 37 * 50, metrics.DRAWN])
def test_means_that_are_drawn_together_are_those_drawn_one_after_the_other(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(4).normal(50, 20, 37).tolist()
    rng = np.random.default_rng(0)
    naive = []
    for _ in range(101):
        places = [int(rng.integers(len(values))) for _ in values]
        naive.append(sum(values[place] for place in places) / len(values))
    monkeypatch.setattr(metrics, "DRAWN", drawn)
    monkeypatch.setattr(metrics, "RESAMPLES", 101)
    assert resampled_means(values) == pytest.approx(naive, rel=1e-12)

"""The metrics of one prediction, from explicit ranks and flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.evaluation.conftest import Echo, hill

from sedem import Citation
from sedem_lab.evaluation.records import ANSWERS, measure, to_record, values

EXAMPLE = hill(1)
ANSWER = Echo().answer([EXAMPLE])[0]
HILL, LAKE = ("hill", 0, 10), ("lake", 0, 4)


def cited(*spans: tuple[str, int, int]) -> tuple[Citation, ...]:
    return tuple(Citation(rank, *span, 0.0, "") for rank, span in enumerate(spans, start=1))


def record(
    selected: list[tuple[str, int, int]],
    ranking: list[tuple[str, int, int]] | None,
    blocks: int = 9,
) -> dict[str, Any]:
    answer = replace(
        ANSWER,
        citations=cited(*selected),
        k=len(selected),
        blocks=blocks,
        ranking=None if ranking is None else tuple(ranking),
    )
    return to_record(EXAMPLE, answer)


def test_ranks_are_taken_from_the_whole_ranking_if_there_is_one() -> None:
    # Three evidence blocks at ranks 2, 3 and 5, two blocks selected.
    ranking = [LAKE, HILL, ("hill", 10, 20), ("lake", 4, 9), ("hill", 20, 30)]
    found = values(record(ranking[:2], ranking), depth=2)
    assert found["mrr"] == 50
    assert (found["recall@1"], found["recall@2"]) == (0, 100)
    assert (found["precision@1"], found["precision@2"]) == (0, 50)
    assert (found["evidence_recall@1"], found["evidence_recall@2"]) == (0, pytest.approx(100 / 3))
    # A document counts once, wherever its evidence stands.
    twice = values(record([LAKE, ("lake", 4, 9), HILL], None), depth=3)
    assert [twice[f"document_recall@{k}"] for k in (1, 2, 3)] == [0, 100, 100]
    # Evidence that was not selected has a rank too.
    assert values(record([LAKE], ranking), depth=1)["mrr"] == 50


@pytest.mark.parametrize(
    ("span", "evidence"),
    [
        (("hill", 0, 10), False),
        (("hill", 0, 11), True),
        (("hill", 19, 30), True),
        (("hill", 20, 30), False),
        (("hill", 12, 13), True),
        (("lake", 10, 20), False),
    ],
)
def test_a_block_is_evidence_from_one_shared_character_on(
    span: tuple[str, int, int], evidence: bool
) -> None:
    example = replace(EXAMPLE, evidence=(replace(EXAMPLE.evidence[0], start=10, end=20),))
    answer = replace(ANSWER, citations=cited(span), k=1, blocks=9, ranking=(span,))
    found = to_record(example, answer)
    assert found["selected"][0]["evidence"] is evidence
    assert found["evidence_ranks"] == ([1] if evidence else [])


def test_ranks_are_among_the_selected_blocks_if_no_others_are_ranked() -> None:
    found = values(record([LAKE, HILL], None), depth=2)
    assert found["mrr"] == 50
    assert "evidence_recall@2" not in found
    assert values(record([LAKE], None), depth=1)["mrr"] == 0
    # Every block was selected, so this is the whole ranking.
    assert values(record([LAKE, HILL], None, blocks=2), depth=2)["evidence_recall@2"] == 100


def test_a_method_that_selects_nothing_has_no_selection_metrics() -> None:
    metrics = measure([record([], [HILL])])
    assert not {name for name in metrics if "@" in name or name == "mrr"}
    # One that reads everything in order cites every document, and here the evidence first.
    unscored = tuple(replace(c, score=None) for c in cited(HILL, LAKE))
    answer = replace(ANSWER, citations=unscored, k=2, blocks=2, ranking=None)
    found = to_record(EXAMPLE, answer)
    assert [block["score"] for block in found["selected"]] == [None, None]
    assert found["evidence_ranks"] is None
    metrics = measure([found])
    assert metrics["em"]["mean"] == 100 and metrics["counts"]["ranked_every_block"] == 0
    assert not any("@" in name or name == "mrr" for name in metrics)


def test_selection_is_measured_up_to_the_blocks_used_and_at_most_ten() -> None:
    wide = [("lake", at, at + 1) for at in range(11)] + [HILL]
    metrics = measure([record([HILL], [HILL]), record(wide, wide)])
    assert (metrics["recall@1"]["mean"], metrics["recall@10"]["mean"]) == (50, 50)
    assert "recall@11" not in metrics
    assert metrics["mrr"]["mean"] == 54.17  # (100 + 100 / 12) / 2


def test_yes_no_questions_are_measured_apart_as_well() -> None:
    answers = [("Yes.", "yes"), ("no", "yes"), ("Rome", "Rome"), ("yes", "Paris")]
    found = [
        {**record([HILL], [HILL]), "prediction": prediction, "references": [reference]}
        for prediction, reference in answers
    ]
    failed = {**found[0], "error": "too long"}
    metrics = measure([*found, failed])
    assert set(metrics["yes_no"]) == set(metrics["other"]) == set(ANSWERS)
    assert (metrics["yes_no"]["em"]["n"], metrics["other"]["em"]["n"]) == (3, 2)
    assert metrics["yes_no"]["em"]["mean"] == pytest.approx(100 / 3, abs=0.01)
    assert metrics["other"]["f1"]["mean"] == 50 and len(metrics["other"]["f1"]["interval"]) == 2
    # A set of one kind is not split.
    assert not {"yes_no", "other"} & set(measure([record([HILL], [HILL])]))
    only = {**record([HILL], [HILL]), "references": ["No"]}
    assert "other" not in measure([only]) and measure([only])["yes_no"]["em"]["n"] == 1

"""A line of predictions.jsonl: the question, the answer, and the scores of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sedem.config import WholeAbove0, WholeFrom0
from sedem.errors import SedemError
from sedem.types import Answer, Citation, Span
from sedem_lab.data.examples import Example
from sedem_lab.evaluation.metrics import (
    evidence_recall_at,
    exact_match,
    normalize,
    precision_at,
    recall_at,
    reciprocal_rank,
    rouge_l,
    string_match_part,
    summarize,
    token_f1,
)

Record = dict[str, Any]

ANSWERS = {
    "em": exact_match,
    "f1": token_f1,
    "rouge_l": rouge_l,
    "string_match": string_match_part,
}
"""Metrics of an answer against its references."""

YES_NO = ("yes", "no")
"""References that make a question a yes/no question."""

DEPTH = 8
"""Maximum number of blocks among which selection is measured."""


class Block(BaseModel):
    """A selected block in a line of predictions.jsonl."""

    model_config = ConfigDict(strict=True)

    score: float | None
    evidence: bool


class Prediction(BaseModel):
    """The fields of a line of predictions.jsonl that its metrics need."""

    model_config = ConfigDict(strict=True)

    id: str
    question: str
    prediction: str
    references: Annotated[list[str], Field(min_length=1)]
    labelled: bool
    selected: list[Block]
    evidence_ranks: list[WholeAbove0] | None
    k: WholeFrom0
    blocks: WholeFrom0
    finish_reason: str
    cut: list[str]
    timings: dict[str, float]
    conditioning: float | None
    stored_bytes: float | None
    context_tokens: float | None
    batch: WholeAbove0


def to_record(example: Example, answer: Answer, batch: int = 1) -> Record:
    """Return the line of predictions.jsonl for an answer.

    Args:
        batch: number of questions answered together; `timings` are those of the whole batch.
    """
    return {
        "id": example.id,
        "question": example.question,
        "references": list(example.answers),
        "labelled": bool(example.evidence),
        "prediction": answer.text,
        "selected": [
            {
                "document": citation.document,
                "start": citation.start,
                "end": citation.end,
                "score": None if citation.score is None else round(citation.score, 4),
                "evidence": _is_evidence(_span(citation), example),
            }
            for citation in answer.citations
        ],
        "evidence_ranks": _evidence_ranks(answer, example),
        "k": answer.k,
        "blocks": answer.blocks,
        "finish_reason": answer.finish_reason,
        "cut": list(answer.cut),
        "conditioning": answer.conditioning,
        "stored_bytes": answer.stored_bytes,
        "context_tokens": answer.context_tokens,
        "timings": {name: round(value, 2) for name, value in answer.timings.items()},
        "batch": batch,
    }


def failed_record(example: Example, error: SedemError) -> Record:
    """Return the line for an example that could not be answered: wrong, with the error."""
    record = to_record(example, Answer("", (), 0, 0, {}, "error", ""))
    return {**record, "evidence_ranks": None, "error": str(error)}


def values(record: Record, depth: int = DEPTH) -> dict[str, float]:
    """Return the value of each metric for one example, without the metrics that do not apply.

    Selection is measured among `depth` blocks.
    """
    if "error" in record:
        names = _selection_names(depth) if record["labelled"] else []
        return dict.fromkeys([*ANSWERS, *names], 0.0)
    answer = record["prediction"], record["references"]
    scores = {name: score(*answer) for name, score in ANSWERS.items()}
    if _has_selection(record):
        scores |= _selection_scores(record, depth)
    if record["conditioning"] is not None:
        scores["conditioning"] = float(record["conditioning"])
    if record["stored_bytes"] is not None and record["context_tokens"]:
        scores["bytes_per_token"] = record["stored_bytes"] / record["context_tokens"]
    if "ttft_ms" in record["timings"]:
        scores["ttft_ms"] = record["timings"]["ttft_ms"]
    return scores


def measure(records: Sequence[Record]) -> dict[str, Any]:
    """Return the metrics of predictions, each with its 95 % interval, and counts.

    Selection is measured over labelled examples, for K up to the largest number of blocks that one
    of them used. A method that selects nothing has no selection metrics. If there are yes/no
    questions, `yes_no` and `other` have the metrics of the answers to each kind.
    """
    answered = [record for record in records if "error" not in record]
    failed = [record for record in records if "error" in record]
    budgets = (record["k"] for record in answered if _has_selection(record))
    depth = min(max(budgets, default=0), DEPTH)
    columns: dict[str, list[float]] = {name: [] for name in ANSWERS}
    for record in answered:
        for name, value in values(record, depth).items():
            columns.setdefault(name, []).append(value)
    for record in failed:
        for name in values(record, depth).keys() & columns.keys():
            columns[name].append(0.0)
    return {
        **{name: summarize(column) for name, column in columns.items()},
        **_by_kind(records),
        "counts": {
            "examples": len(records),
            "blocks_mean": _mean(record["blocks"] for record in answered),
            "something_cut": sum(bool(record["cut"]) for record in records),
            "ended_by_limit": sum(record["finish_reason"] == "length" for record in records),
            "not_answered": len(failed),
            "ranked_every_block": sum(r["evidence_ranks"] is not None for r in records),
        },
        "first_error": f"{failed[0]['id']}: {failed[0]['error']}" if failed else None,
    }


def _by_kind(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Metrics of the answers to yes/no questions and to the others; empty without yes/no ones."""
    kinds: dict[str, list[dict[str, float]]] = {"yes_no": [], "other": []}
    for record in records:
        yes_no = any(normalize(reference) in YES_NO for reference in record["references"])
        kind = "yes_no" if yes_no else "other"
        kinds[kind].append(values(record))
    if not kinds["yes_no"]:
        return {}
    return {
        kind: {name: summarize([scores[name] for scores in found]) for name in ANSWERS}
        for kind, found in kinds.items()
        if found
    }


def _has_selection(record: Record) -> bool:
    """Whether selection can be measured: blocks have scores and the evidence is labelled."""
    selected = record["selected"]
    return bool(record["labelled"] and selected and selected[0]["score"] is not None)


def _selection_scores(record: Record, depth: int) -> dict[str, float]:
    flags = [bool(block["evidence"]) for block in record["selected"]]
    selected, ranks = range(len(flags)), record["evidence_ranks"]
    scores = {f"recall@{k}": recall_at(selected, flags, k) for k in range(1, depth + 1)}
    scores |= {f"precision@{k}": precision_at(selected, flags, k) for k in range(1, depth + 1)}
    if ranks is None:
        return {**scores, "mrr": reciprocal_rank(selected, flags)}
    # Evidence blocks that were not selected count as well.
    all_flags = flags + [True] * (len(ranks) - sum(flags))
    if any(all_flags):
        for k in range(1, depth + 1):
            scores[f"evidence_recall@{k}"] = evidence_recall_at(selected, all_flags, k)
    return {**scores, "mrr": 100.0 / ranks[0] if ranks else 0.0}


def _selection_names(depth: int) -> list[str]:
    kinds = ("recall", "precision", "evidence_recall")
    names = [f"{kind}@{k}" for kind in kinds for k in range(1, depth + 1)]
    return [*names, "mrr"] if depth else []


def _evidence_ranks(answer: Answer, example: Example) -> list[int] | None:
    """Ranks of all evidence blocks; None if the answer does not rank every block."""
    ranking = answer.ranking
    if ranking is None:
        unscored = any(citation.score is None for citation in answer.citations)
        if unscored or len(answer.citations) < answer.blocks:
            return None
        ranking = tuple(map(_span, answer.citations))
    return [rank for rank, span in enumerate(ranking, start=1) if _is_evidence(span, example)]


def _span(citation: Citation) -> Span:
    return citation.document, citation.start, citation.end


def _is_evidence(block: Span, example: Example) -> bool:
    name, start, end = block
    return any(
        example.documents[span.document].name == name and span.overlaps(start, end)
        for span in example.evidence
    )


def _mean(numbers: Iterable[float]) -> float:
    terms = list(numbers)
    return round(sum(terms) / len(terms), 2) if terms else 0.0

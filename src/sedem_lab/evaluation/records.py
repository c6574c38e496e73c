"""A line of predictions.jsonl: the question, the answer, and the scores of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sedem.config import WholeAbove0, WholeFrom0
from sedem.errors import SedemError
from sedem.types import Answer
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

DEPTH = 10
"""Maximum number of blocks among which selection is measured."""


class Block(BaseModel):
    """A selected block in a line of predictions.jsonl."""

    model_config = ConfigDict(strict=True)

    score: float | None
    evidence: bool
    document: str = ""
    of_evidence: bool = False


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

    def is_evidence(document: str, start: int, end: int) -> bool:
        return any(
            example.documents[span.document].name == document and span.overlaps(start, end)
            for span in example.evidence
        )

    selected, named = [], {example.documents[span.document].name for span in example.evidence}
    for citation in answer.citations:
        document, start, end = citation.document, citation.start, citation.end
        score = None if citation.score is None else round(citation.score, 4)
        block = {"document": document, "start": start, "end": end, "score": score}
        found = {"evidence": is_evidence(document, start, end), "of_evidence": document in named}
        selected.append({**block, **found})
    # Ranks of all evidence blocks; None if the answer does not rank every block.
    ranks = None
    if answer.ranking is not None:
        flags = [is_evidence(*span) for span in answer.ranking]
        ranks = [rank for rank, flag in enumerate(flags, start=1) if flag]
    elif len(selected) >= answer.blocks and all(b["score"] is not None for b in selected):
        ranks = [rank for rank, block in enumerate(selected, start=1) if block["evidence"]]
    return {
        "id": example.id,
        "question": example.question,
        "references": list(example.answers),
        "labelled": bool(example.evidence),
        "prediction": answer.text,
        "selected": selected,
        "evidence_ranks": ranks,
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
        kinds = ("recall", "precision", "evidence_recall", "document_recall")
        names = [f"{kind}@{k}" for kind in kinds for k in range(1, depth + 1)]
        selection = [*names, "mrr"] if record["labelled"] and depth else []
        return dict.fromkeys([*ANSWERS, *selection], 0.0)
    answer = record["prediction"], record["references"]
    scores = {name: score(*answer) for name, score in ANSWERS.items()}
    if _has_selection(record):
        flags = [bool(block["evidence"]) for block in record["selected"]]
        selected, ranks = range(len(flags)), record["evidence_ranks"]
        # Evidence blocks that were not selected count as well, if every block has a rank.
        every = flags + [True] * (len(ranks or ()) - sum(flags))
        depths = range(1, depth + 1)
        scores |= {f"recall@{k}": recall_at(selected, flags, k) for k in depths}
        scores |= {f"precision@{k}": precision_at(selected, flags, k) for k in depths}
        # Documents by their best blocks; lines of earlier versions do not say which have evidence.
        hits = [*{b["document"]: b.get("of_evidence") for b in record["selected"]}.values()]
        if None not in hits:
            hit = range(len(hits))
            scores |= {f"document_recall@{k}": recall_at(hit, hits, k) for k in depths}
        if ranks is not None and any(every):
            found = {f"evidence_recall@{k}": evidence_recall_at(selected, every, k) for k in depths}
            scores |= found
        if ranks is None:
            scores["mrr"] = reciprocal_rank(selected, flags)
        else:
            scores["mrr"] = 100.0 / ranks[0] if ranks else 0.0
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
    kinds: dict[str, list[dict[str, float]]] = {"yes_no": [], "other": []}
    for record in records:
        yes_no = any(normalize(reference) in YES_NO for reference in record["references"])
        kinds["yes_no" if yes_no else "other"].append(values(record))
    by_kind = {
        kind: {name: summarize([scores[name] for scores in found]) for name in ANSWERS}
        for kind, found in kinds.items()
        if found and kinds["yes_no"]
    }
    blocks = [record["blocks"] for record in answered]
    return {
        **{name: summarize(column) for name, column in columns.items()},
        **by_kind,
        "counts": {
            "examples": len(records),
            "blocks_mean": round(sum(blocks) / len(blocks), 2) if blocks else 0.0,
            "something_cut": sum(bool(record["cut"]) for record in records),
            "ended_by_limit": sum(record["finish_reason"] == "length" for record in records),
            "not_answered": len(failed),
            "ranked_every_block": sum(r["evidence_ranks"] is not None for r in records),
        },
        "first_error": f"{failed[0]['id']}: {failed[0]['error']}" if failed else None,
    }


def _has_selection(record: Record) -> bool:
    """Whether selection can be measured: blocks have scores and the evidence is labelled."""
    selected = record["selected"]
    return bool(record["labelled"] and selected and selected[0]["score"] is not None)

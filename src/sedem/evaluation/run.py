"""The harness: the same examples, prompts, limits and metrics for every method, resumable."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sedem.contracts import Answer, Citation
from sedem.data.examples import Example
from sedem.errors import ConfigError, DataError
from sedem.evaluation.methods import Method
from sedem.evaluation.metrics import exact_match, rouge_l, summarize, token_f1
from sedem.provenance import provenance

PREDICTIONS = "predictions.jsonl"
METRICS = "metrics.json"
SETTINGS = "settings.json"

Progress = Callable[[int, int], None]


def sample(examples: Sequence[Example], limit: int | None, seed: int) -> list[Example]:
    """A seeded sample in file order; all of them without a limit."""
    if limit is None or limit >= len(examples):
        return list(examples)
    if limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")
    kept = sorted(random.Random(seed).sample(range(len(examples)), limit))
    return [examples[index] for index in kept]


def evaluate(
    method: Method,
    examples: Sequence[Example],
    settings: dict[str, Any],
    out: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer examples and measure the answers.

    What was answered before a kill is kept: the run goes on after the last whole line.

    Args:
        method: answers.
        examples: what is asked.
        settings: everything that decides the result, as JSON-ready values.
        out: folder for settings, predictions and metrics.
        progress: called with examples done and examples in all.

    Returns:
        The metrics, as metrics.json holds them.

    Raises:
        ConfigError: the folder holds results of other settings.
        DataError: there are no examples, or two have one id.
    """
    if not examples:
        raise DataError("there are no examples to evaluate")
    for name, count in Counter(example.id for example in examples).items():
        if count > 1:
            raise DataError(f"two examples have the id '{name}'; give each its own")
    _claim(out, settings)
    path = out / PREDICTIONS
    done = {record["id"]: record for record in _kept(path)}
    open_examples = [example for example in examples if example.id not in done]
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, len(open_examples), method.batch):
            batch = open_examples[start : start + method.batch]
            for example, answer in zip(batch, method.answer(batch), strict=True):
                record = to_record(example, answer)
                done[example.id] = record
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            if progress is not None:
                progress(len(done), len(examples))
    records = [done[example.id] for example in examples]
    metrics = {**measure(records), "settings": settings, **provenance()}
    (out / METRICS).write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return metrics


def to_record(example: Example, answer: Answer) -> dict[str, Any]:
    """One line of predictions.jsonl."""
    return {
        "id": example.id,
        "question": example.question,
        "references": list(example.answers),
        "prediction": answer.text,
        "labelled": bool(example.evidence),
        "selected": [
            {
                "document": citation.document,
                "start": citation.start,
                "end": citation.end,
                "score": round(citation.score, 4),
                "evidence": _is_evidence(citation, example),
            }
            for citation in answer.citations
        ],
        "k": answer.k,
        "blocks": answer.blocks,
        "finish_reason": answer.finish_reason,
        "cut": list(answer.cut),
        "timings": {name: round(value, 2) for name, value in answer.timings.items()},
    }


def measure(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of predictions, each with its 95 % interval.

    `recall@i` is the share of labelled examples with evidence among the i best of what the method
    selected; a method that selects nothing has none.
    """
    answers = [(record["prediction"], record["references"]) for record in records]
    metrics: dict[str, Any] = {
        "em": summarize([exact_match(*answer) for answer in answers]),
        "f1": summarize([token_f1(*answer) for answer in answers]),
        "rouge_l": summarize([rouge_l(*answer) for answer in answers]),
    }
    labelled = [record for record in records if record["labelled"] and record["selected"]]
    depth = max((record["k"] for record in labelled), default=0)
    for k in range(1, min(depth, 8) + 1):
        found = [
            100.0 * any(block["evidence"] for block in record["selected"][:k])
            for record in labelled
        ]
        metrics[f"recall@{k}"] = summarize(found)
    metrics["counts"] = {
        "examples": len(records),
        "blocks_mean": round(sum(record["blocks"] for record in records) / len(records), 2),
        "something_cut": sum(bool(record["cut"]) for record in records),
        "ended_by_limit": sum(record["finish_reason"] == "length" for record in records),
    }
    return metrics


def _is_evidence(citation: Citation, example: Example) -> bool:
    return any(
        example.documents[span.document].name == citation.document
        and span.start < citation.end
        and citation.start < span.end
        for span in example.evidence
    )


def _claim(out: Path, settings: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / SETTINGS
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) != settings:
        raise ConfigError(
            f"'{out}' holds results of other settings (see '{path}'); give another --out"
        )
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _kept(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of an earlier run; a last line that a kill cut off is taken away."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    # Of bytes: Unicode has line separators that are ordinary characters in a line of JSON.
    for line in whole.splitlines():
        yield json.loads(line)

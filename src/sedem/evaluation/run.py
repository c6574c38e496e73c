"""The harness: the same examples, prompts, limits and metrics for every method, resumable."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sedem.data.examples import Example
from sedem.errors import ConfigError, DataError, SedemError
from sedem.evaluation.method import Method
from sedem.evaluation.records import Record, failed_record, measure, to_record
from sedem.evaluation.results import Signatures, claim, write_json
from sedem.evaluation.storage import compression

PREDICTIONS = "predictions.jsonl"
METRICS = "metrics.json"

NEEDED = {"id", "prediction", "references", "labelled", "selected", "k", "timings"}
"""What every prediction has."""

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

    What was answered before a kill is kept: the run goes on after the last whole line. An example
    that the method refuses with a `SedemError` counts as wrong; any other error ends the run.

    Args:
        method: answers.
        examples: what is asked.
        settings: everything that decides the result, as JSON-ready values.
        out: folder for settings, predictions and metrics.
        progress: called with examples done and examples in all.

    Returns:
        The metrics, as metrics.json holds them.

    Raises:
        ConfigError: the folder holds results of other settings, or what is no result.
        DataError: there are no examples, or two have one id.
    """
    if not examples:
        raise DataError("there are no examples to evaluate")
    for name, count in Counter(example.id for example in examples).items():
        if count > 1:
            raise DataError(f"two examples have the id '{name}'; give each its own")
    claim(out, settings)
    path = out / PREDICTIONS
    done = {record["id"]: record for record in _kept(path)}
    open_examples = [example for example in examples if example.id not in done]
    device = method.backbone.device if method.backbone else None
    # A process signs the first example that it answers.
    signatures = Signatures(out, list(done)[:1], METRICS, device)
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, len(open_examples), method.batch):
            records = _answered(method, open_examples[start : start + method.batch])
            if not start:
                signatures.sign(records[0]["id"])
            for record in records:
                done[record["id"]] = record
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            if progress is not None:
                progress(len(done), len(examples))
    records = [done[example.id] for example in examples]
    size = compression(records, method.backbone.model.config) if method.backbone else {}
    metrics = {**measure(records), **size, "settings": settings, **signatures.of(done)}
    write_json(out / METRICS, metrics)
    return metrics


def read_predictions(content: bytes, path: Path) -> Iterator[Record]:
    """The lines of a predictions.jsonl.

    Raises:
        DataError: a line is no record of the harness.
    """
    # Of bytes: Unicode has line separators that are ordinary characters in a line of JSON.
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or NEEDED - record.keys():
            raise DataError(f"'{path}', line {number} is no prediction of 'sedem eval'")
        yield record


def _answered(method: Method, batch: Sequence[Example]) -> list[Record]:
    """Records of a batch; one that is refused is halved until what cannot be answered is alone."""
    try:
        answers = method.answer(batch)
    except SedemError as error:
        if len(batch) == 1:
            return [failed_record(batch[0], error)]
        half = len(batch) // 2
        return _answered(method, batch[:half]) + _answered(method, batch[half:])
    return [to_record(*pair, len(batch)) for pair in zip(batch, answers, strict=True)]


def _kept(path: Path) -> Iterator[Record]:
    """Whole lines of an earlier run; a last line that a kill cut off is taken away."""
    if not path.is_file():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    yield from read_predictions(whole, path)

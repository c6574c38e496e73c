"""The harness: the same examples, prompts, limits and metrics for every method, resumable."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from sedem.backbone.decoder import Backbone
from sedem.errors import ConfigError, DataError, SedemError
from sedem.types import Answer, DocumentReader
from sedem.untrusted import JSON_BYTES, parse_json, read_bytes
from sedem_lab.data.examples import Example
from sedem_lab.evaluation.records import Prediction, Record, failed_record, measure, to_record
from sedem_lab.evaluation.results import Signatures, claim, write_json
from sedem_lab.evaluation.storage import compression

PREDICTIONS = "predictions.jsonl"
METRICS = "metrics.json"

Progress = Callable[[int, int], None]


class Method(Protocol):
    """Answers batches of examples.

    Attributes:
        batch: number of examples answered together.
        backbone: the backbone that answers, or None if unknown. Sizes of memory are compared with
            its keys and values.
        reader: the same method for one question at a time, which the bench measures.
    """

    batch: int
    backbone: Backbone | None
    reader: DocumentReader

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        ...


def sample(examples: Sequence[Example], limit: int | None, seed: int) -> list[Example]:
    """A seeded sample of the examples in file order, or all of them without a limit."""
    if limit is None or limit >= len(examples):
        return list(examples)
    if limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1")
    indices = sorted(random.Random(seed).sample(range(len(examples)), limit))
    return [examples[index] for index in indices]


def evaluate(
    method: Method,
    examples: Sequence[Example],
    settings: dict[str, Any],
    out: Path,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer examples and measure the answers.

    A killed run is resumed after the last complete line of its predictions. An example that the
    method refuses with a `SedemError` counts as wrong; any other error ends the run.

    Args:
        settings: everything that decides the result, with JSON types.
        out: folder for settings, predictions and metrics.
        progress: called with the number of finished examples and the number of examples.

    Returns:
        The metrics, as in metrics.json.

    Raises:
        ConfigError: the folder has results of other settings, or files that are not results.
        DataError: there are no examples, or two have the same id.
    """
    if not examples:
        raise DataError("there are no examples to evaluate")
    for name, count in Counter(example.id for example in examples).items():
        if count > 1:
            raise DataError(f"two examples have the id '{name}'; give each its own")
    claim(out, settings)
    path = out / PREDICTIONS
    # The complete lines of an earlier run. A last line that a kill cut off is removed.
    content = read_bytes(path, DataError, JSON_BYTES) if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        path.write_bytes(complete)
    done = {record["id"]: record for record in read_predictions(complete, path)}
    remaining = [example for example in examples if example.id not in done]
    device = method.backbone.device if method.backbone else None
    # Each process signs the first example that it answers.
    signatures = Signatures(out, list(done)[:1], METRICS, device)
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, len(remaining), method.batch):
            records = _answer(method, remaining[start : start + method.batch])
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
    """Read the lines of a predictions.jsonl; `path` is for the message.

    Raises:
        DataError: a line is not a record of the harness.
    """
    # Split bytes, because text would also be split at the line separators of Unicode.
    for number, line in enumerate(content.splitlines(), start=1):
        place = f"'{path}', line {number}"
        try:
            record = parse_json(line.decode("utf-8"), place, DataError)
            Prediction.model_validate(record)
        except (DataError, ValueError):
            raise DataError(f"{place} is not a 'sedem eval' prediction") from None
        yield record


def _answer(method: Method, batch: Sequence[Example]) -> list[Record]:
    """Records of a batch. A refused batch is halved until the refused example is alone."""
    try:
        answers = method.answer(batch)
    except SedemError as error:
        if len(batch) == 1:
            return [failed_record(batch[0], error)]
        half = len(batch) // 2
        return _answer(method, batch[:half]) + _answer(method, batch[half:])
    return [to_record(*pair, len(batch)) for pair in zip(batch, answers, strict=True)]

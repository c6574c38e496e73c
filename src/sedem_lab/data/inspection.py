"""Inspection of a set: counts, dropped examples with reasons, and lengths in tokens and blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

from sedem.bank.blocks import BlockRow
from sedem.errors import DataError
from sedem_lab.data import labels
from sedem_lab.data.examples import ExampleSet
from sedem_lab.data.tokenizer import Span, Tokenizer

TOGETHER = 64
"""Number of texts tokenized per call."""
MOST_BINS = 12
"""Maximum bars of a histogram."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Inspection:
    """The findings about a set.

    Attributes:
        measures: one number for each context, example or text, by what is measured.
        tokenizer: the tokenizer whose tokens are counted.
        dropped, noted, dropped_ids: as in `ExampleSet`.
    """

    name: str
    counts: dict[str, int]
    measures: dict[str, list[int]]
    tokenizer: str
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    dropped_ids: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON types; each measure as mean, median, minimum and maximum."""
        return {
            "name": self.name,
            **self.counts,
            "dropped": dict(self.dropped),
            "dropped_ids": self.dropped_ids,
            "noted": dict(self.noted),
            "tokenizer": self.tokenizer,
            "measures": {name: summary(values) for name, values in self.measures.items()},
        }


def summary(values: Sequence[int]) -> dict[str, float]:
    """Mean, median, minimum and maximum."""
    return {
        "mean": round(mean(values), 2),
        "median": median(values),
        "min": min(values),
        "max": max(values),
    }


def inspect_examples(
    examples: ExampleSet,
    tokenizer: Tokenizer,
    *,
    segment_length: int = 128,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect questions.

    Args:
        segment_length: T; blocks are windows of T tokens of a document.
        progress: called with the counts of tokenized and of all documents.

    Raises:
        DataError: there is no example to measure.
    """
    chosen = examples.examples[:limit]
    if not chosen:
        reasons = ", ".join(f"{n:,} {why}" for why, n in examples.dropped.items())
        raise DataError(f"{examples.name} holds no example ({reasons or 'it is empty'})")
    texts = list(dict.fromkeys(d.text for example in chosen for d in example.documents))
    cuts: dict[str, tuple[int, list[Span]]] = {}
    for start in range(0, len(texts), TOGETHER):
        together = texts[start : start + TOGETHER]
        for text, spans in zip(together, tokenizer.spans(together), strict=True):
            cuts[text] = (len(spans), blocks(spans, segment_length))
        if progress is not None:
            progress(min(start + TOGETHER, len(texts)), len(texts))
    measures: dict[str, list[int]] = {
        "tokens per context": [],
        "documents per context": [],
        f"blocks of {segment_length} tokens per context": [],
        "positive blocks per example": [],
        "tokens per answer": tokenizer.counts([example.answers[0] for example in chosen]),
    }
    tokens, documents, count, positive, _ = measures.values()
    for example in chosen:
        rows = [
            BlockRow(number, start, end, ())
            for number, document in enumerate(example.documents)
            for start, end in cuts[document.text][1]
        ]
        tokens.append(sum(cuts[document.text][0] for document in example.documents))
        documents.append(len(example.documents))
        count.append(len(rows))
        # The labels that training gives, unless the recipe specifies them.
        if labels.labelling_of(example, "evidence") == "evidence":
            marked = labels.from_evidence(rows, example.evidence)
        else:
            marked = labels.from_answers(rows, example.documents, example.answers)
        positive.append(sum(marked))
    with_evidence = sum(bool(example.evidence) for example in chosen)
    counts = {
        "examples": len(examples.examples),
        "measured": len(chosen),
        "with evidence": with_evidence,
        "labelled by answer string": len(chosen) - with_evidence,
        "without any positive block": positive.count(0),
        "different documents": len(texts),
    }
    return Inspection(
        examples.name,
        counts,
        measures,
        tokenizer.name,
        examples.dropped,
        examples.noted,
        examples.dropped_ids,
    )


def inspect_texts(
    name: str,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect stage-1 text.

    Args:
        progress: called with the count of done texts and, if known, of all.

    Raises:
        DataError: there is no text.
    """
    measures: dict[str, list[int]] = {"tokens per text": [], "characters per text": []}
    left = islice(texts, limit)
    while together := list(islice(left, TOGETHER)):
        measures["tokens per text"] += tokenizer.counts(together)
        measures["characters per text"] += map(len, together)
        if progress is not None:
            done = len(measures["tokens per text"])
            progress(done, max(done, limit or 0))
    totals = {f"{name.split()[0]}": sum(values) for name, values in measures.items()}
    if not totals["characters"]:
        raise DataError(f"'{name}' holds no text; give a corpus with text in it")
    counts = {"texts": len(measures["tokens per text"]), **totals}
    return Inspection(Path(name).name, counts, measures, tokenizer.name)


def blocks(spans: Sequence[Span], length: int) -> list[Span]:
    """Character spans of windows of `length` tokens."""
    return [
        (spans[at][0], spans[min(at + length, len(spans)) - 1][1])
        for at in range(0, len(spans), length)
    ]


def bins(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """A histogram: first and last number of each bin, and its number of values.

    Bins have equal width, 1, 2 or 5 times a power of ten, and there are at most `MOST_BINS`.
    """
    low, high = min(values), max(values)
    width = next(
        factor * 10**power
        for power in range(20)
        for factor in (1, 2, 5)
        if high // (factor * 10**power) - low // (factor * 10**power) < MOST_BINS
    )
    found = Counter(value // width for value in values)
    return [
        (number * width, (number + 1) * width - 1, found[number])
        for number in range(low // width, high // width + 1)
    ]


def plot(inspection: Inspection, path: Path) -> None:
    """Draw every measure as a histogram, one panel each.

    Raises:
        DataError: the file cannot be written, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DataError("matplotlib draws the picture; install 'sedem[train]'") from None

    figure = Figure(figsize=(10, 2.6 * (-(-len(inspection.measures) // 2))), layout="constrained")
    panels = figure.subplots(-(-len(inspection.measures) // 2), 2, squeeze=False).flat
    counted = "texts" if "texts" in inspection.counts else "examples"
    for (name, values), panel in zip(inspection.measures.items(), panels, strict=False):
        bars = bins(values)
        width = bars[0][1] - bars[0][0] + 1
        # A bar for a single number is centred on it; a wider bar spans its numbers.
        align = "center" if width == 1 else "edge"
        panel.bar([low for low, _, _ in bars], [n for *_, n in bars], 0.95 * width, align=align)
        panel.axvline(mean(values), color="black", linewidth=1)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.set_title(f"{name}: mean {mean(values):,.1f}, at most {max(values):,}", fontsize=9)
        panel.set_xlabel(name.rpartition(" per ")[0])
        panel.set_ylabel(counted)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels:
        panel.set_visible(False)
    figure.suptitle(inspection.name)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be drawn: {error}") from None

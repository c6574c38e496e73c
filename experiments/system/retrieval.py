"""BM25 over SeDeM's blocks: what a keyword search finds among what the selector sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sedem import Document, SeDeM
    from sedem.data.examples import Example

BUDGETS = (1, 2, 4)


def block_recall(checkpoint: Path, examples: Sequence[Example]) -> dict[str, Any]:
    """Recall of the evidence by BM25 over the blocks that the selector chooses from.

    Args:
        checkpoint: the model; decides how a text is cut into blocks.
        examples: questions with evidence.

    Returns:
        `recall@K` for several K: mean, interval and number of questions.
    """
    from sedem import SeDeM
    from sedem.bank.blocks import BlockRow
    from sedem.baselines.bm25 import bm25_scores, index_texts
    from sedem.data import labels
    from sedem.evaluation.metrics import recall_at, summarize
    from sedem.provenance import provenance

    model = SeDeM.from_pretrained(checkpoint)
    spans: dict[str, list[tuple[int, int]]] = {}
    recalls: dict[int, list[float]] = {k: [] for k in BUDGETS}
    for example in examples:
        rows = []
        for number, document in enumerate(example.documents):
            if document.text not in spans:
                spans[document.text] = _spans(model, document)
            rows += [BlockRow(number, start, end, ()) for start, end in spans[document.text]]
        texts = [example.documents[row.document].text[row.start : row.end] for row in rows]
        scores = bm25_scores(index_texts(texts), len(texts), example.question)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        evidence = labels.from_evidence(rows, example.evidence)
        for k, values in recalls.items():
            values.append(recall_at(ranked, evidence, k))
    return {f"recall@{k}": summarize(values) for k, values in recalls.items()} | provenance()


def _spans(model: SeDeM, document: Document) -> list[tuple[int, int]]:
    """Start and end of every block of a document, in characters."""
    from sedem.method.segments import segment_text

    config = model.config
    cut = segment_text(document.text, model.encoder, config.segment_length, config.segmentation)
    ends = cut.ends.gather(1, cut.lengths[:, None] - 1)[:, 0]
    return list(zip(cut.starts[:, 0].tolist(), ends.tolist(), strict=True))

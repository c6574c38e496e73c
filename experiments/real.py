"""sedem-smol, the model on a real backbone, beside the same backbone without memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system.cells import Cell
from experiments.system.models import Variant, guided_model
from experiments.system.scales import Scale
from experiments.system.tables import Number, scores, study

NAME = "sedem-smol"
MODEL = Variant(NAME, shipped=NAME)
CHAT = Variant(f"{NAME}-chat", shipped=NAME, start=(("chat_template", True),))
QUESTIONS = {
    "squad-10": 500,
    "squad-10-swapped": 200,
    "exact-facts": 200,
    "household": 22,
    "hotpotqa": 300,
    "2wiki": 100,
    "musique": 40,
}
"""Number of questions of each set."""
COSTLY = 200
"""The same at most, for rows that read all of a context as text."""

ROWS: dict[str, dict[str, Any]] = {
    f"{NAME}, K=1": {"k": 1},
    f"{NAME}, K=4": {"k": 4},
    f"{NAME}, every block": {"k": "all"},
    "the same four blocks as text (RAG with the same reader)": {"k": 4, "condition": "text"},
    "every block as text (full context, tuned)": {"k": "all", "condition": "text"},
    f"{NAME}, K=4, in the chat template": {"k": 4, "variant": CHAT},
    f"{NAME}, no memory": {"k": 2, "control": "none"},
    "frozen backbone, every paragraph as text": {"method": "full-context"},
    "frozen backbone, BM25's four paragraphs as text": {"method": "bm25", "k": 4},
}
"""Ways to answer: table rows, with the fields of their cells."""
AS_TEXT = ("every block as text", "frozen backbone, every")


@study(
    "A real backbone",
    "The paper gives no numbers. Answers are greedy, in float32, and as long as a set allows.",
    drawn=("F1",),
)
def real_model(scale: Scale) -> Iterator[Number]:
    """Scores by way to answer; sedem-nano's in the last row."""
    for row, fields in ROWS.items():
        for key, limit in QUESTIONS.items():
            few = min(limit, COSTLY) if row.startswith(AS_TEXT) else limit
            fields = {"variant": MODEL, "dtype": "float32", **fields}
            cell = Cell(questions=key, limit=few, **fields)
            yield from _scores(row, scale, cell)
    for key, limit in QUESTIONS.items():
        nano = guided_model(scale)
        cell = Cell(variant=nano, questions=key, dtype="float32", limit=limit, k=4)
        yield from _scores("sedem-nano, K=4", scale, cell)


def _scores(row: str, scale: Scale, cell: Cell) -> list[Number]:
    return scores(row, scale.sets[cell.questions].title, cell, ("f1", "em"))


@study(
    "Evidence that sedem-smol selects",
    "The paper gives no numbers.",
)
def real_selection(scale: Scale) -> Iterator[Number]:
    """Recall of the evidence by set, of the answers with four blocks."""
    for key, limit in QUESTIONS.items():
        cell = Cell(variant=MODEL, questions=key, dtype="float32", limit=limit, k=4)
        recall = ("recall@1", "recall@2", "recall@4")
        yield from scores(scale.sets[key].title, "", cell, recall)

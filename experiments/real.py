"""sedem-smol, the model on a real backbone, beside the same backbone without memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from experiments.system.answers import WAYS
from experiments.system.cells import Cell
from experiments.system.models import guided_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, scores, study

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
FROZEN = 50
"""The same at most, for the frozen backbone, which stops at no answer by itself."""

LABELS = {
    "K=1": "sedem-smol, K=1",
    "K=4": "sedem-smol, K=4",
    "K=all": "sedem-smol, every block",
    "text, K=4": "the same four blocks as text (RAG with the same reader)",
    "text, K=all": "every block as text (full context, tuned)",
    "no memory": "sedem-smol, no memory",
}
METRICS = ("f1", "em")


@study(
    "A real backbone",
    "The paper gives no numbers. Answers are greedy, in float32, and as long as a set allows.",
    drawn=("F1",),
)
def real_model(scale: Scale) -> Iterator[Number]:
    """Scores by way to answer; sedem-nano's in the last row."""
    if SMOL not in scale.shipped:
        return
    model = guided_model(scale, SMOL)
    chat = replace(model, name=f"{model.name}-chat", start=(("chat_template", True),))
    for key, limit in QUESTIONS.items():
        title = scale.sets[key].title
        cell = Cell("ways", variant=model, questions=key, limit=limit, dtype="float32")
        for way in WAYS:
            for metric in METRICS:
                number = f"ways.{way}.{metric}"
                yield Number(LABELS[way], f"{title} {metric.upper()}", None, cell, number)
        answers = replace(cell, measure="answers", k=4)
        rows = {
            "sedem-smol, K=4, in the chat template": replace(answers, variant=chat),
            "frozen backbone, every paragraph as text": replace(
                answers, method="full-context", k=None, limit=min(limit, FROZEN)
            ),
            "frozen backbone, BM25's four paragraphs as text": replace(
                answers, method="bm25", limit=min(limit, FROZEN)
            ),
            "sedem-nano, K=4": replace(answers, variant=guided_model(scale)),
        }
        for row, one in rows.items():
            yield from scores(row, title, one, METRICS)


@study("Evidence that sedem-smol selects", "The paper gives no numbers.")
def real_selection(scale: Scale) -> Iterator[Number]:
    """Recall of the evidence by set."""
    for key, limit in QUESTIONS.items() if SMOL in scale.shipped else ():
        cell = Cell(
            "ways",
            variant=guided_model(scale, SMOL),
            questions=key,
            limit=limit,
            dtype="float32",
        )
        for k in (1, 2, 4):
            number = f"ways.K=4.recall@{k}"
            yield Number(scale.sets[key].title, f"recall@{k}", None, cell, number)

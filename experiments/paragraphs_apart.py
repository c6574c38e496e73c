"""Selected paragraphs read as text, jointly and independently, by K. Not in the paper."""

from __future__ import annotations

from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command, scores
from experiments.system.variants import main_model

BUDGETS = (1, 2, 4, 8)
SETTINGS = {"together": "", "apart": "_apart"}
"""The recipe of raw-text RAG, by how paragraphs are read."""


def numbers(scale: Scale) -> list[Number]:
    """F1, or EM of exact facts, by form and K."""
    result = []
    for label, setting in SETTINGS.items():
        for k in BUDGETS:
            for key in (*scale.ablation, "hotpotqa"):
                cell = answer_cell(
                    scale,
                    main_model(scale),
                    key,
                    "rag",
                    k=k,
                    setting=setting,
                    limit=scale.costly_limit,
                )
                metric = "em" if key == "exact-facts" else "f1"
                title = scale.sets[key].title
                result += scores(f"{label}, K={k}", title, cell, (metric,))
    return result


STUDY = Study(
    "paragraphs_apart",
    "Selected paragraphs read as text, together and apart",
    numbers,
    "The paper gives no numbers. Both readers were trained on two of four paragraphs.",
)

if __name__ == "__main__":
    command(STUDY)()

"""Answers by the type in which keys and values of blocks are kept. The paper has no such table."""

from __future__ import annotations

from dataclasses import replace

from experiments import more_memory
from experiments.system.budgets import BUDGETS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

TYPES = {"": "as computed (float32)", "bfloat16": "bfloat16", "int8": "int8", "fp8": "fp8"}


def numbers(scale: Scale) -> list[Number]:
    """F1, or EM of exact facts, by type and K, on the sets of the ablations."""
    result = []
    for kept, label in TYPES.items():
        for key in scale.ablation:
            cell = replace(more_memory.answers(scale, key), kept=kept)
            metric, title = ("em", "EM") if key == "exact-facts" else ("f1", "F1")
            for k in BUDGETS:
                column = f"{scale.sets[key].title} {title}, K={k}"
                result.append(Number(label, column, None, cell, f"budgets.{k}.{metric}"))
    return result


STUDY = Study(
    "kept_types",
    "Answers with kept keys and values in fewer bytes",
    numbers,
    "The paper gives no numbers. Answers have at most 32 new tokens.",
)

if __name__ == "__main__":
    command(STUDY)()

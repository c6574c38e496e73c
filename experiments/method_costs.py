"""What every method selects, stores and reads, and its training cost. Not in the paper."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.measures import SELECTING
from experiments.system.peers import answer_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import equal_budget, main_model
from sedem.baselines.registry import TRAINED
from sedem.evaluation.registry import METHODS

SET = "hotpotqa"
RECALL = "recall@2"
ANSWERS = (
    ("recall@2", RECALL, 1.0, 1),
    ("bytes a token", "bytes_per_token", 1.0, 0),
    ("positions", "conditioning", 1.0, 0),
    ("trained parameters, M", "training.trained_parameters", 1e6, 2),
    ("training tokens, thousands", "training.all_tokens_seen", 1e3, 0),
)
"""Column, metric of the answers' result, divisor, and number of decimals."""


def numbers(scale: Scale) -> list[Number]:
    """The answers to HotpotQA, and the times of the bench."""
    result = []
    variant = main_model(scale)
    times = Cell("peers", variant=variant) if scale.name == "nano" else None
    for method in METHODS:
        budget = {"k": scale.sets[SET].k} if method == "sedem" else {}
        result += _row(method, answer_cell(scale, variant, SET, method, **budget))
        for clock in ("online", "prebuilt") if times else ():
            column = f"{clock} TTFT, times sooner than full context"
            result.append(Number(method, column, None, times, f"times_sooner.{method}.{clock}"))
    if scale.name != "paper":
        equal = Cell(variant=equal_budget(scale), questions=SET, limit=scale.costly_limit)
        result += _row("sedem, trained as little as the others", equal)
    return result


def _row(label: str, cell: Cell | None) -> list[Number]:
    return [
        Number(label, column, None, cell, metric, per, digits)
        for column, metric, per, digits in ANSWERS
        if cell is None or _has(metric, cell)
    ]


def _has(metric: str, cell: Cell) -> bool:
    """Whether a result has a metric: only some methods rank documents, and only some train."""
    if metric == RECALL:
        return cell.method in (*SELECTING, "longllmlingua")
    shipped = cell.method == "sedem" and cell.variant is not None and cell.variant.main
    untrained = cell.method not in TRAINED and cell.method != "sedem"
    return not (metric.startswith("training") and (shipped or untrained))


STUDY = Study(
    "method_costs",
    "What every method keeps, reads and takes",
    numbers,
    "The paper gives no numbers of all methods side by side.",
)

if __name__ == "__main__":
    command(STUDY)()

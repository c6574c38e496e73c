"""What every method selects, keeps, reads and takes, beside how it was trained."""

from __future__ import annotations

from experiments import peers
from experiments.cells import SELECTING, Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import equal_budget, main
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
"""Column, metric of the answers' result, what it is divided by, digits."""


def numbers(scale: Scale) -> list[Number]:
    """HotpotQA's answers, and the bench's clocks."""
    result = []
    variant = main(scale.backbones[0])
    times = Cell("peers", variant=variant) if scale.name == "nano" else None
    for method in METHODS:
        budget = {"k": scale.sets[SET].k} if method == "sedem" else {}
        cell = peers.own(scale, variant, SET, method, **budget)
        result += _row(method, cell)
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
        if _has(metric, cell)
    ]


def _has(metric: str, cell: Cell | None) -> bool:
    """What does not rank keeps its documents in order; what is not trained has no budget."""
    if cell is None:
        return True
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
app = command(STUDY)

if __name__ == "__main__":
    app()

"""The search for the learning rates of the trained baselines. The paper has no such table."""

from __future__ import annotations

from experiments.system.cells import Cell
from experiments.system.peers import answer_cell
from experiments.system.rate_search import key
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model
from sedem.baselines.registry import TRAINED


def numbers(scale: Scale) -> list[Number]:
    """Held-out loss after a few steps, by method and learning rate."""
    result = []
    for backbone in scale.backbones:
        for method in TRAINED:
            variant = main_model(scale, backbone)
            if answer_cell(scale, variant, "hotpotqa", method) is None:
                continue
            cell = Cell("search", method, variant)
            row = method if len(scale.backbones) == 1 else f"{backbone}: {method}"
            measured = cell.read(scale)
            for rate in scale.rates:
                if measured is not None and key(rate) not in measured["rates"]:
                    continue
                metric = f"rates.{key(rate)}.loss"
                result.append(Number(row, f"{rate:g}", None, cell, metric, digits=3))
    return result


STUDY = Study(
    "learning_rates",
    "Learning rates of trained baselines",
    numbers,
    "The paper gives no numbers. A number is the method's own loss on held-out training data after "
    "a few steps, at one rate for all its parts. Only the numbers of a row compare. The recipe "
    "takes the rate of the lowest loss. If questions come after text, their rate is half of it by "
    "rule. Three rates are tried, and the next higher one while the highest is the best.",
)

if __name__ == "__main__":
    command(STUDY)()

"""The learning rate of every trained baseline, searched for on training data."""

from __future__ import annotations

from experiments import peers
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.search import key
from experiments.study import Number, Study, command
from experiments.variants import main
from sedem.baselines.registry import TRAINED


def numbers(scale: Scale) -> list[Number]:
    """Held-out loss after a few steps, by method and rate."""
    result = []
    for backbone in scale.backbones:
        for method in TRAINED:
            known = peers.own(scale, main(backbone), "hotpotqa", method)
            if known is None:
                continue
            cell = Cell("search", method, known.variant)
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
    "The paper gives no numbers. The method's own loss on held-out training data after a few steps "
    "at one rate for all its parts; only the numbers of a row compare, their lowest is what the "
    "recipe takes. The rate of questions that come after text is half of it, by rule and not by "
    "search. Three rates are tried, and higher ones as long as the highest is the best.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

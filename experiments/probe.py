"""`sedem probe` compared with trained models, at the ends of Table layer_extraction_injection."""

from __future__ import annotations

from experiments.depth import variant
from experiments.system.cells import Cell
from experiments.system.probe import ends_of_grid, steps_of
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model


def numbers(scale: Scale) -> list[Number]:
    """Continuation loss after the training of the depth study, and after each probe budget."""
    cell, result = Cell("probe", variant=main_model(scale)), []
    budgets = [f"{steps} steps" for steps in steps_of(scale)]
    for (extract, inject), end in zip(ends_of_grid(scale), ("best", "worst"), strict=True):
        row, pair = (
            f"{extract} to {inject} of {scale.depth}, {end} when trained",
            f"{extract}-{inject}",
        )
        trained = Cell("memory", variant=variant(scale, extract, inject))
        shown = [("trained", trained, "continuation.memory")]
        shown += [(f"probe, {b}", cell, f"{b}.{pair}.continuation.memory") for b in budgets]
        # The decoder's own states need no training, so one budget is enough.
        own = f"{budgets[0]}.{pair}.continuation.true_states"
        shown.append(("probe, own states", cell, own))
        result += [
            Number(row, name, None, where, metric, digits=3) for name, where, metric in shown
        ]
    return result


STUDY = Study(
    "probe",
    "A probe at the ends of the depth grid",
    numbers,
    "The paper gives no numbers. Losses of the text after a segment, on held-out windows. Those of "
    "a probe and of a training are on different windows, so only the order of rows compares.",
)

if __name__ == "__main__":
    command(STUDY)()

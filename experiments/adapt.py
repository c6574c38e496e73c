"""What `sedem adapt` reaches without labels, compared with labelled training. Not in the paper."""

from __future__ import annotations

from experiments.guided_training import of_row
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import Variant, guided_model


def rows(scale: Scale) -> dict[str, Variant]:
    """The untrained backbone, adapted, trained as long with labels, and the main model."""
    return {
        "untrained (sedem init)": Variant("adapt-untrained", adapted="untrained"),
        "adapted without labels": Variant("adapt-adapted", adapted="without labels"),
        "the same, stage 2 with labels": Variant("adapt-labelled", adapted="with labels"),
        "the main model, trained with labels": guided_model(scale),
    }


def numbers(scale: Scale) -> list[Number]:
    """Losses of the reference answer by K, and recall of the evidence, on held-out questions."""
    return [n for label, variant in rows(scale).items() for n in of_row(label, variant, scale)]


STUDY = Study(
    "adapt",
    "Adapted to documents without labels: answer losses by K on held-out questions",
    numbers,
    "The paper gives no numbers. The main model has had many times the training of the others.",
)

if __name__ == "__main__":
    command(STUDY)()

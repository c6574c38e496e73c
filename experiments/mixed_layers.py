"""Table mixed_extraction_layers: mixtures of extraction layers, learned and uniform."""

from __future__ import annotations

from experiments.system import ablation, paper
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import Variant, without_selector

INJECT = 10


def numbers(scale: Scale) -> list[Number]:
    """The three mixtures, and the learned weights of the first."""
    rows = []
    for row in paper.rows("tab:mixed_extraction_layers"):
        printed = {"hotpotqa f1": row["f1"], "hotpotqa rouge_l": row["rouge_l"]}
        layers = [scale.layer(layer) for layer in row["layers"]]
        label = f"{_list(row['layers'])} of 28, {row['mixing']}"
        if scale.depth != 28:
            label += f"; {_list(layers)} of {scale.depth}"
        rows.append((label, _variant(scale, row["layers"], row["mixing"]), printed))
    return [
        *ablation.numbers(scale, rows, ("f1", "rouge_l"), only="hotpotqa"),
        *_weights(scale),
    ]


def _weights(scale: Scale) -> list[Number]:
    result = []
    studied = [row["layer"] for row in paper.rows("inline_mixed_layer_weights")]
    variant = _variant(scale, studied, "learned")
    trained = without_selector(scale, variant)
    cell = Cell("loss", variant=trained, questions=scale.ablation[0], limit=scale.limit)
    for layer in studied:
        label, metric = f"weight of layer {layer} of 28", f"mixture.{scale.layer(layer)}"
        printed = paper.number("inline_mixed_layer_weights", "weight", layer=layer)
        result.append(Number(label, "weight", printed, cell, metric, digits=3))
    return result


def _variant(scale: Scale, studied: list[int], mixing: str) -> Variant:
    layers = list(dict.fromkeys(scale.layer(layer) for layer in studied))
    changes = (
        f"model.extract_layers={layers}",
        f"model.inject_layer={scale.layer(INJECT)}",
        f"model.layer_mixing={mixing}",
    )
    name = f"mixed-{'-'.join(map(str, layers))}-{mixing}"
    return Variant(name, changes, stage2=ablation.subset(scale))


def _list(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


STUDY = Study(
    "mixed_layers", "Mixtures of extraction layers (Table mixed_extraction_layers)", numbers
)

if __name__ == "__main__":
    command(STUDY)()

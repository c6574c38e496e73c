"""Table layer_extraction_injection: one extraction and one injection layer."""

from __future__ import annotations

from experiments.system import ablation, paper
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, Variant


def numbers(scale: Scale) -> list[Number]:
    """The paper's grid; a smaller backbone uses layers at the same relative depth."""
    rows = []
    for row in paper.rows("tab:layer_extraction_injection"):
        extract, inject = scale.layer(row["l_extract"]), scale.layer(row["l_inject"])
        label = f"{row['l_extract']} to {row['l_inject']} of 28"
        if scale.depth != 28:
            label += f"; {extract} to {inject} of {scale.depth}"
        printed = {"hotpotqa f1": row["f1"], "hotpotqa rouge_l": row["rouge_l"]}
        rows.append((label, variant(scale, extract, inject), printed))
    return ablation.numbers(scale, rows, ("f1", "rouge_l"), only="hotpotqa")


def variant(scale: Scale, extract: int, inject: int) -> Variant:
    """A variant with one extraction and one injection layer."""
    if (extract, inject) == scale.layers:
        return BASE
    changes = (f"model.extract_layers=[{extract}]", f"model.inject_layer={inject}")
    return Variant(f"layers-{extract}-{inject}", changes, stage2=ablation.subset(scale))


STUDY = Study(
    "depth",
    "Extraction and injection depth, layers run (Table layer_extraction_injection)",
    numbers,
)

if __name__ == "__main__":
    command(STUDY)()

"""Table decompressor_ablation: slots as soft prompt at the decoder's input, not decompressed."""

from __future__ import annotations

from experiments.system import ablation, paper
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import BASE, NEXT_TOKEN_ALONE, Variant

DIRECT = ("model.decompressor=none", "model.inject_layer=0")
WITHOUT = ("losses.reconstruct=0",)
LINEAR = Variant("direct-linear", DIRECT, NEXT_TOKEN_ALONE, WITHOUT)
MLP = Variant("direct-mlp", (*DIRECT, "model.compressor=mlp"), NEXT_TOKEN_ALONE, WITHOUT)
VARIANTS = {"No decomp. (lin.)": LINEAR, "No decomp. (MLP)": MLP, "SeDeM": BASE}


def numbers(scale: Scale) -> list[Number]:
    """The three rows of the paper's table."""
    rows: list[ablation.Row] = []
    for label, variant in VARIANTS.items():
        printed = {
            f"{key} f1": paper.number("tab:decompressor_ablation", f"{key}_f1", method=label)
            for key in ("hotpotqa", "qasper")
        }
        rows.append((label, variant, printed))
    return ablation.numbers(scale, rows)


STUDY = Study(
    "decompression",
    "Is decompression necessary? (Table decompressor_ablation)",
    numbers,
    "The variants without a decompressor see as many windows and questions. They learn from the "
    "next token alone.",
)

if __name__ == "__main__":
    command(STUDY)()

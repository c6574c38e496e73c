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
LITERAL = Variant("context-at-restored", stage1=("losses.context_at_restored=true",))
NOT_TAUGHT = Variant("recall-not-distilled", stage1=("losses.distill_recall=false",))
OURS = {
    "SeDeM, L_ctx of the context too": LITERAL,
    "SeDeM, recall windows not distilled": NOT_TAUGHT,
}
"""Other losses of stage 1, in addition to the paper's rows."""


def numbers(scale: Scale) -> list[Number]:
    """The three rows of the paper's table, and SeDeM with other losses of stage 1."""
    rows: list[ablation.Row] = []
    for label, variant in VARIANTS.items():
        printed = {
            f"{key} f1": paper.number("tab:decompressor_ablation", f"{key}_f1", method=label)
            for key in ("hotpotqa", "qasper")
        }
        rows.append((label, variant, printed))
    # The paper's stage 1 has no recall windows, and only one reading of L_ctx.
    rows += [(label, variant, {}) for label, variant in OURS.items() if scale.name != "paper"]
    return ablation.numbers(scale, rows)


STUDY = Study(
    "decompression",
    "Is decompression necessary? (Table decompressor_ablation)",
    numbers,
    "The variants without a decompressor see as many windows and questions. They learn from the "
    "next token alone. The last two rows are SeDeM with other losses of stage 1; the paper does "
    "not have them.",
)

if __name__ == "__main__":
    command(STUDY)()

"""FLOPs of one query."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command

BACKBONES = {"Llama-3.2-1B": "llama-3.2-1b", "Llama-3.2-3B": "llama-3.2-3b"}


def numbers(scale: Scale) -> list[Number]:
    """GFLOPs to encode and to decode, by method and backbone."""
    result = []
    for row in paper.rows("tab:inference_flops_query"):
        backbone = BACKBONES[row["backbone"]]
        cell = Cell("cost", backbone=backbone) if row["method"] == "SeDeM" else None
        label = f"{backbone}: {row['method']}"
        for stage in ("encode", "decode", "total"):
            value = row[f"{stage}_gflops"]
            result.append(
                Number(
                    label, f"{stage}, GFLOPs", value, cell, f"paper.flops.stages.{stage}.ours", 1e9
                )
            )
    return result


STUDY = Study(
    "flops",
    "FLOPs of one query: 2,048 context, 30 question and 16 answer tokens "
    "(Table inference_flops_query)",
    numbers,
)
app = command(STUDY)

if __name__ == "__main__":
    app()

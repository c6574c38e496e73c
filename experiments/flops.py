"""FLOPs of one query."""

from __future__ import annotations

from experiments import paper
from experiments.cells import Cell
from experiments.peers import PEERS
from experiments.scales import Scale
from experiments.study import Number, Study, command

BACKBONES = {"Llama-3.2-1B": "llama-3.2-1b", "Llama-3.2-3B": "llama-3.2-3b"}


def numbers(scale: Scale) -> list[Number]:
    """GFLOPs to encode and to decode, by method and backbone."""
    result = []
    for row in paper.rows("tab:inference_flops_query"):
        backbone = BACKBONES[row["backbone"]]
        method = PEERS[row["method"]]
        cell = Cell("cost", method=method, backbone=backbone)
        # SeDeM's stages are finer than the paper's two.
        metric = "paper.flops.stages.{}.ours" if method == "sedem" else "flops.{}"
        label = f"{backbone}: {row['method']}"
        for stage in ("encode", "decode", "total"):
            value = row[f"{stage}_gflops"]
            column = f"{stage}, GFLOPs"
            result.append(Number(label, column, value, cell, metric.format(stage), 1e9))
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

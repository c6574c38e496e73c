"""Table inference_flops_query: FLOPs of one query, by our counting and by the paper's."""

from __future__ import annotations

from experiments.system.costs import cost_rows
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

STAGES = ("encode", "decode", "total")
SEDEM_STAGE = "paper.flops.stages.{}"
"""SeDeM's stages are finer than the paper's; its cell also has the sums that match the paper's."""


def numbers(scale: Scale) -> list[Number]:
    """GFLOPs to encode and to decode, by method and backbone; the same at every scale."""
    result = []
    for label, cell, row in cost_rows("tab:inference_flops_query"):
        metrics = {label: "flops.{}"}
        if cell.method == "sedem":
            metrics = {
                label: f"{SEDEM_STAGE}.ours",
                f"{label}, counted as in the paper": f"{SEDEM_STAGE}.convention",
            }
        for name, metric in metrics.items():
            for stage in STAGES:
                printed, column = row[f"{stage}_gflops"], f"{stage}, GFLOPs"
                result.append(Number(name, column, printed, cell, metric.format(stage), 1e9))
    return result


STUDY = Study(
    "flops",
    "FLOPs of one query: 2,048 context, 30 question and 16 answer tokens "
    "(Table inference_flops_query)",
    numbers,
    "Counted as in the paper, 1,536 tokens run through 14 layers and 128 states through every "
    "layer of the decoder. All pairs of tokens count, and no decompressor. The paper states 2,048 "
    "context tokens, but neither layers nor K.",
)

if __name__ == "__main__":
    command(STUDY)()

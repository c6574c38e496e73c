"""RULER qa_2: answers as contexts grow."""

from __future__ import annotations

from experiments import paper, peers
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main

METHODS = {"Full-context reference": "Backbone (Frozen)", "SeDeM": "SeDeM", "ICAE": "ICAE"}
LENGTHS = ("4k", "8k", "16k")


def numbers(scale: Scale) -> list[Number]:
    """string_match_part by method and length; the paper's backbone is the 3B one."""
    backbone = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else scale.backbones[0]
    result = []
    for printed, method in METHODS.items():
        for length in LENGTHS:
            key = f"ruler-{length}"
            if key not in scale.sets:
                continue
            value = paper.number("tab:ruler_qa2", length, method=printed)
            cell = peers.cell(scale, method, main(backbone), key)
            result.append(Number(printed, scale.sets[key].title, value, cell, "string_match"))
    return result


STUDY = Study(
    "ruler",
    "RULER qa_2 by context length (Table ruler_qa2)",
    numbers,
    "Lengths are counted in the backbone's own tokens; what a backbone cannot read is cut off and "
    "counted in the result.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

"""Table ruler_qa2: answers to RULER qa_2 as contexts grow."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.peers import paper_cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

METHODS = {"Full-context reference": "Backbone (Frozen)", "SeDeM": "SeDeM", "ICAE": "ICAE"}
LENGTHS = ("4k", "8k", "16k")


def numbers(scale: Scale) -> list[Number]:
    """string_match_part by method and length; the paper uses the 3B backbone."""
    backbone = "llama-3.2-3b" if "llama-3.2-3b" in scale.backbones else None
    result = []
    for printed, method in METHODS.items():
        for length in LENGTHS:
            key = f"ruler-{length}"
            if key not in scale.sets:
                continue
            value = paper.number("tab:ruler_qa2", length, method=printed)
            cell = paper_cell(scale, method, main_model(scale, backbone), key)
            result.append(Number(printed, scale.sets[key].title, value, cell, "string_match"))
    return result


STUDY = Study(
    "ruler",
    "RULER qa_2 by context length (Table ruler_qa2)",
    numbers,
    "Lengths are counted in the backbone's own tokens. Text beyond its positions is cut off, and "
    "the result counts it.",
)

if __name__ == "__main__":
    command(STUDY)()

"""Table efficiency_varb_icae: time to the first token and decoding speed, compared with ICAE."""

from __future__ import annotations

from experiments.system import paper
from experiments.system.bench import CONTEXTS, bench_cells
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

FIGURES = {
    "online_ttft_ms": ("TTFT, ms (paper, A100)", "TTFT, ms (bench)"),
    "decode_tok_s": ("tok/s (paper, A100)", "tok/s (bench)"),
}
"""Bench measurements, with the column of the paper's numbers and the column of ours."""


def numbers(scale: Scale) -> list[Number]:
    """Online times: the paper's on its four sets, the bench's at its own lengths."""
    result = []
    for row in paper.rows("tab:efficiency_varb_icae"):
        for backbone, short in (("1B", "1b"), ("3B", "3b")):
            for method, column in (("SeDeM", "ours"), ("ICAE", "icae")):
                label = f"{backbone}, {row['dataset']}: {method}"
                printed = (row.get(f"{short}_ttft_{column}_ms"), row.get(f"{short}_tok_s_{column}"))
                result += [
                    Number(label, heading, value, metric="")
                    for (heading, _), value in zip(FIGURES.values(), printed, strict=True)
                ]
    for name, cell in bench_cells(scale).items():
        for tokens in CONTEXTS[scale.name]:
            label = f"{name}, {tokens:,} tokens: SeDeM"
            result += [
                Number(label, heading, None, cell, f"results.sedem.{tokens}.{figure}.median")
                for figure, (_, heading) in FIGURES.items()
            ]
    return result


STUDY = Study(
    "efficiency",
    "Online time to the first token and decoding speed (Table efficiency_varb_icae)",
    numbers,
    "The paper's times are of one A100-SXM4-40GB and its own sets. Ours are of the bench, on "
    "another backbone and the machine that docs/performance.md names. The two do not compare.",
)

if __name__ == "__main__":
    command(STUDY)()

"""Time to the first token and decoding speed, beside ICAE."""

from __future__ import annotations

from experiments import paper
from experiments.scales import Scale
from experiments.study import Number, Study, command


def numbers(scale: Scale) -> list[Number]:
    """Online times of both backbones, on the four sets."""
    result = []
    for row in paper.rows("tab:efficiency_varb_icae"):
        for backbone, short in (("1B", "1b"), ("3B", "3b")):
            for name, column in (("SeDeM", "ours"), ("ICAE", "icae")):
                label = f"{backbone}, {row['dataset']}: {name}"
                result += [
                    Number(label, "TTFT, ms (A100)", row.get(f"{short}_ttft_{column}_ms")),
                    Number(label, "tok/s (A100)", row.get(f"{short}_tok_s_{column}")),
                ]
    return result


STUDY = Study(
    "efficiency",
    "Online time to the first token and decoding speed (Table efficiency_varb_icae)",
    numbers,
    "The paper's times are of one A100-SXM4-40GB. None of ours is here: times need the bench.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

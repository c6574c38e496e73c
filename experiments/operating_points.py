"""Operating points: few blocks or all of them, beside ComprExIT."""

from __future__ import annotations

from experiments import paper, peers
from experiments.cells import Cell
from experiments.scales import Scale
from experiments.study import Number, Study, command
from experiments.variants import main

CONFIGURATIONS = {"SeDeM learned-K=2": 2, "SeDeM full-bank": "all"}


def numbers(scale: Scale) -> list[Number]:
    """F1, EM and time to the first token on HotpotQA and 2Wiki."""
    result = []
    variant = main(scale.backbones[0])
    for key in ("hotpotqa", "2wiki"):
        for row in paper.rows("tab:comprexit_operating_points"):
            if row["dataset"] != paper.DATASETS[key]:
                continue
            label = f"{scale.sets[key].title}: {row['method']}"
            k = CONFIGURATIONS.get(row["method"])
            cell = (
                peers.cell(scale, row["method"], variant, key)
                if k is None
                else Cell(variant=variant, questions=key, k=k, limit=_limit(scale, k))
            )
            for metric, name in (("f1", "F1"), ("em", "EM")):
                result.append(Number(label, name, row[metric], cell, metric))
            result.append(Number(label, "TTFT, ms (A100)", row["ttft_ms"], metric=""))
    return result


def _limit(scale: Scale, k: int | str) -> int | None:
    return scale.costly_limit if k == "all" else None


STUDY = Study(
    "operating_points",
    "Operating points beside ComprExIT (Table comprexit_operating_points)",
    numbers,
    "A full bank that does not fit the decoder's positions is its best blocks as far as they fit.",
)
app = command(STUDY)

if __name__ == "__main__":
    app()

"""Cost and benefit of keeping the keys and values of blocks. The paper has no such table."""

from __future__ import annotations

from experiments.system import bench_tables
from experiments.system.bench import KEPT_CONTEXTS, KEPT_ROWS, bench_cells
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

WORTH = {
    "hit_rate": "hit rate that pays, %",
    "questions": "questions that pay for warming",
}


def numbers(scale: Scale) -> list[Number]:
    """Times and bytes by method, and the point from which keeping pays off."""
    result = []
    for name, cell in bench_cells(scale, "kept").items():
        for tokens in KEPT_CONTEXTS[scale.name]:
            place = f"{name}, {tokens:,} tokens"
            for method, label in KEPT_ROWS.items():
                row, found = f"{place}: {label}", f"results.{method}.{tokens}"
                time = f"{found}.prebuilt_ttft_ms.median"
                ratio = f"worth.{tokens}.ratio.{method}"
                result.append(Number(row, "prebuilt TTFT, ms", None, cell, time))
                result.append(Number(row, "times warm's", None, cell, ratio, digits=2))
                if method != "sedem":
                    kept = f"{found}.kept.bytes_per_token"
                    result.append(Number(row, "kept bytes a token", None, cell, kept, digits=0))
            for metric, column in WORTH.items():
                figure = f"worth.{tokens}.{metric}"
                result.append(Number(f"{place}: sedem, warm", column, None, cell, figure, digits=0))
    return result


def render(scale: Scale) -> str:
    """The blocks of docs/performance.md."""
    return bench_tables.blocks(scale, "kept")


STUDY = Study(
    "kept",
    "Keys and values that are kept",
    numbers,
    "The paper gives no numbers of this kind.",
    drawn=("TTFT", "kept bytes"),
    render=render,
)

if __name__ == "__main__":
    command(STUDY)()

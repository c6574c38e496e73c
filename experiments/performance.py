"""Time to the first token, decoding and building of every method. The paper has no such table."""

from __future__ import annotations

from pathlib import Path

from experiments.system import bench_tables
from experiments.system.bench import CONTEXTS, METHODS, PEERS, bench_cells
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from sedem.evaluation.registry import METHODS as EVERY

FIGURES = {
    "online_ttft_ms": "online TTFT, ms",
    "prebuilt_ttft_ms": "prebuilt TTFT, ms",
    "decode_tok_s": "decode tok/s",
}


def numbers(scale: Scale) -> list[Number]:
    """Medians by method and context length."""
    return [
        Number(
            f"{name}, {tokens:,} tokens: {method}",
            column,
            None,
            cell,
            f"results.{method}.{tokens}.{figure}.median",
        )
        for name, cell in bench_cells(scale).items()
        for tokens in CONTEXTS[scale.name]
        for method in (*METHODS.get(scale.name, tuple(EVERY)), *PEERS.get(scale.name, ()))
        for figure, column in FIGURES.items()
    ]


def render(scale: Scale) -> str:
    """The blocks of docs/performance.md."""
    return bench_tables.blocks(scale, "bench", f"{scale.name}-performance.svg")


def draw(scale: Scale, path: Path) -> None:
    """Draw the times of the scale's first model against context length.

    Raises:
        FileNotFoundError: the bench has not been run.
    """
    from sedem.bench.plot import draw as draw_bench

    cell = next(iter(bench_cells(scale).values()))
    result = cell.read(scale)
    if result is None:
        raise FileNotFoundError(f"'{cell.name}' has no result at {scale.name} scale; run it first")
    draw_bench(result, path)


STUDY = Study(
    "performance",
    "Times of every method",
    numbers,
    "The paper gives no numbers of this kind.",
    render=render,
    draw=draw,
)

if __name__ == "__main__":
    command(STUDY)()

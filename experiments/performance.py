"""The page of times: `run` measures what is missing, `page` writes tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from experiments.bench import SHAPES
from experiments.cells import Cell, measure
from experiments.scales import NANO, PAPER, ROOT, Scale
from experiments.study import NOT_RUN
from experiments.variants import main
from sedem.bench.table import lines

PAGE = ROOT / "docs" / "performance.md"

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


KINDS = ("bench", "batches", "memories")


def cells() -> dict[str, tuple[Cell, Scale]]:
    """What the page shows, by its marks."""
    shown = {_mark(kind, "sedem-nano"): (nano(NANO, kind), NANO) for kind in KINDS}
    for shape in SHAPES:
        shown |= {_mark(k, shape): (Cell(measure=k, backbone=shape), PAPER) for k in KINDS}
    return shown


def nano(scale: Scale, kind: str = "bench") -> Cell:
    """A bench of a scale's main checkpoint."""
    return Cell(measure=kind, variant=main(scale.backbones[0]))


def _mark(kind: str, name: str) -> str:
    return name if kind == "bench" else f"{name}-{kind}"


@app.command()
def run() -> None:
    """Measure sedem-nano on this machine; the shapes of the paper too where there is a GPU."""
    import torch

    for cell, scale in cells().values():
        if scale is NANO or torch.cuda.is_available():
            measure(cell, scale, Path("data"))


@app.command()
def page() -> None:
    """Write the tables of docs/performance.md and its pictures from the committed results."""
    from sedem.bench.plot import draw

    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, (cell, scale) in cells().items():
        result = cell.read(scale)
        if result is not None and cell.measure == "bench":
            draw(result, PAGE.parent / _picture(name))


def rendered(text: str) -> str:
    """A page, what stands between its `<!-- bench NAME -->` and `<!-- end -->` marks renewed."""
    known = cells()

    def renewed(match: re.Match[str]) -> str:
        cell, scale = known[match[2]]
        return "\n".join([match[1], *_shown(match[2], cell, cell.read(scale)), "<!-- end -->"])

    return re.sub(r"(<!-- bench ([\w.-]+) -->)\n.*?<!-- end -->", renewed, text, flags=re.DOTALL)


def _picture(name: str) -> str:
    return f"performance-{name}.svg"


def _shown(name: str, cell: Cell, result: dict[str, Any] | None) -> Iterator[str]:
    if result is None:
        yield NOT_RUN
        return
    if cell.measure == "bench":
        yield f"![Time to the first token against context length]({_picture(name)})"
        yield ""
    yield from _provenance(result)
    yield ""
    yield from _table(lines(result))
    if cell.measure != "bench":
        return
    yield ""
    yield from _table(_building(result))
    yield ""
    yield from _table(_stages(result))
    if result["selection"]:
        yield ""
        yield from _table(_selection(result))


def _provenance(result: dict[str, Any]) -> Iterator[str]:
    settings, machine, ceilings = result["settings"], result["machine"], result["ceilings"]
    commit = result["commit"] or {"id": "unknown", "dirty": False}
    device = machine["processor"] if settings["device"] == "cpu" else machine["device"]
    before, after = result["load_average"]
    yield (
        f"{device}, {machine['cores']} cores, {machine['threads']} threads, {settings['dtype']}; "
        f"torch {result['versions']['torch']}, transformers {result['versions']['transformers']}; "
        f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}; "
        f"medians of {settings['runs']} runs (quartiles), {settings['answer_tokens']} answer "
        f"tokens. Ceilings measured in the same process: {ceilings['bytes_per_s'] / 1e9:,.1f} GB/s "
        f"copied, {ceilings['flops_per_s'] / 1e12:,.2f} TFLOP/s. Load of the machine at the start "
        f"and at the end: {before:.1f} and {after:.1f}."
    )
    for made in result.get("earlier", []):
        yield f"- a part of it is older: {_made(made)}"
    for note in [*result["notes"], *(f"{k}: {v}" for k, v in result["left_out"].items())]:
        yield f"- {note}"


def _made(signature: dict[str, Any] | None) -> str:
    """Who made a part that the rest was not made with."""
    if signature is None:
        return "it is not known what measured it"
    versions, commit = signature["versions"], signature["commit"] or {"id": "unknown"}
    return (
        f"commit {commit['id'][:10]} on {signature['machine']['device']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )


def _building(result: dict[str, Any]) -> list[list[str]]:
    """Building a bank beside Hugging Face's forward of the same layers."""
    shown = [["tokens", "build tok/s", "Hugging Face's forward of these layers, tok/s", "ratio"]]
    for tokens, row in result["results"].get("sedem", {}).items():
        if row["layers_tok_s"] is None:
            continue
        own, rival = row["build_tok_s"]["median"], row["layers_tok_s"]["median"]
        shown.append([f"{int(tokens):,}", f"{own:,.0f}", f"{rival:,.0f}", f"{own / rival:.2f}"])
    return shown


def _stages(result: dict[str, Any]) -> list[list[str]]:
    """Where SeDeM's time goes, by context length."""
    names = ("segment", "encode", "compress", "question", "score", "gather", "prefill")
    shown = [["tokens", *(f"{name}, ms" for name in names)]]
    for tokens, row in result["results"].get("sedem", {}).items():
        stages = {name: entry["median"] for name, entry in row["stages"].items() if entry}
        build = row["build_stages"]
        found = [build["segment_ms"], build["encode_ms"], build["compress_ms"]]
        asked = ("encode_ms", "score_ms", "gather_ms", "prefill_ms")
        found += [stages.get(name) for name in asked]
        times = ["-" if value is None else f"{value:,.1f}" for value in found]
        shown.append([f"{int(tokens):,}", *times])
    return shown


def _selection(result: dict[str, Any]) -> list[list[str]]:
    shown = [["blocks", "tokens", "MB", "score, ms", "floor"]]
    for row in result["selection"].values():
        times = row["score_ms"]
        shown.append(
            [
                f"{row['blocks']:,}",
                f"{row['tokens']:,}",
                f"{row['bytes'] / 1e6:,.0f}",
                f"{times['median']:,.1f} ({times['q1']:,.1f}-{times['q3']:,.1f})",
                f"{row['floor_ms']:,.1f}",
            ]
        )
    return shown


def _table(rows: list[list[str]]) -> Iterator[str]:
    first, *rest = rows
    yield f"| {' | '.join(first)} |"
    yield "|" + "---|" * len(first)
    for row in rest:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    app()

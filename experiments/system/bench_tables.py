"""Results of the bench as blocks of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system.bench import bench_cells
from experiments.system.scales import Scale
from experiments.system.study import NOT_RUN, markdown_table
from sedem.bench.table import lines


def blocks(scale: Scale, kind: str, picture: str = "") -> str:
    """What the bench measured of each model of a scale, one model after another.

    Args:
        scale: nano shows sedem-nano, paper the shapes of Llama.
        kind: "bench", "batches" or "memories".
        picture: file of the first model's picture; empty for none.
    """
    cells, shown = bench_cells(scale, kind), []
    for name, cell in cells.items():
        result = cell.read(scale)
        parts = [] if len(cells) == 1 else [f"{name}:"]
        if result is None:
            parts.append(NOT_RUN)
        else:
            if picture:
                parts.append(f"![Time to the first token against context length]({picture})")
            parts += [measured_on(result), markdown_table(lines(result))]
            if kind == "bench":
                parts += [markdown_table(table) for table in details(result)]
        shown.append("\n\n".join(parts))
        picture = ""
    return "\n\n".join(shown)


def measured_on(result: dict[str, Any]) -> str:
    """Machine, versions, ceilings and load of a result, and its notes."""
    settings, machine, ceilings = result["settings"], result["machine"], result["ceilings"]
    commit = result["commit"] or {"id": "unknown", "dirty": False}
    device = machine["processor"] if settings["device"] == "cpu" else machine["device"]
    before, after = result["load_average"]
    shown = [
        f"{device}, {machine['cores']} cores, {machine['threads']} threads, {settings['dtype']}; "
        f"torch {result['versions']['torch']}, transformers {result['versions']['transformers']}; "
        f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}. "
        f"Medians of {settings['runs']} runs (quartiles), {settings['answer_tokens']} answer "
        f"tokens. Ceilings of the same process: {ceilings['bytes_per_s'] / 1e9:,.1f} GB/s copied, "
        f"{ceilings['flops_per_s'] / 1e12:,.2f} TFLOP/s. Load of the machine: {before:.1f} at the "
        f"start, {after:.1f} at the end.",
        *(f"- a part is older: {_made(made)}" for made in result.get("earlier", [])),
        *(f"- {note}" for note in result["notes"]),
        *(f"- {name}: {reason}" for name, reason in result["left_out"].items()),
    ]
    return "\n".join(shown)


def _made(signature: dict[str, Any] | None) -> str:
    """Commit, machine and versions of an older part."""
    if signature is None:
        return "its machine and versions are not known"
    versions, commit = signature["versions"], signature["commit"] or {"id": "unknown"}
    return (
        f"commit {commit['id'][:10]} on {signature['machine']['device']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )


def details(result: dict[str, Any]) -> Iterator[list[list[str]]]:
    """Tables of building, of SeDeM's stages, and of scoring large banks."""
    yield _building(result)
    yield _stages(result)
    if result["selection"]:
        yield _selection(result)


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
    """SeDeM's time by stage and context length."""
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

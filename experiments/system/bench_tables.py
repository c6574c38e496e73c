"""Results of the bench as blocks of docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system.bench import KEPT_ROWS, bench_cells
from experiments.system.measured import load_of, made_on, versions_of
from experiments.system.scales import Scale
from experiments.system.study import NOT_RUN, markdown_table
from sedem.bench.table import lines

KEPT_HEADINGS = (
    "tokens",
    "method",
    "decoder reads",
    "prebuilt TTFT ms",
    "times warm's",
    "bank, B/token",
    "kept, B/token",
)
WORTH_HEADINGS = (
    "tokens",
    "nothing kept, ms",
    "nothing found, ms",
    "all found, ms",
    "hit rate that pays, %",
    "warming the bank, ms",
    "questions that pay for it",
)


def blocks(scale: Scale, kind: str, picture: str = "") -> str:
    """The bench's measurements for each model of a scale, one model after another.

    Args:
        scale: nano shows sedem-nano, paper the shapes of Llama.
        kind: "bench", "batches", "memories" or "kept".
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
            parts.append(measured_on(result))
            if kind == "kept":
                parts += [markdown_table(_kept(result)), markdown_table(_worth(result))]
            else:
                parts.append(markdown_table(lines(result)))
            if kind == "bench":
                parts += [markdown_table(table) for table in details(result)]
        shown.append("\n\n".join(parts))
        picture = ""
    return "\n\n".join(shown)


def measured_on(result: dict[str, Any]) -> str:
    """Machine, versions, ceilings and load of a result, and its notes."""
    settings, ceilings = result["settings"], result["ceilings"]
    commit = result["commit"] or {"id": "unknown", "dirty": False}
    device = "processor" if settings["device"] == "cpu" else "device"
    shown = [
        f"{made_on(result, device, settings['dtype'])}; "
        f"commit {commit['id'][:10]}{' with changes' if commit['dirty'] else ''}. "
        f"Medians of {settings['runs']} runs (quartiles), {settings['answer_tokens']} answer "
        f"tokens. Ceilings of the same process: {ceilings['bytes_per_s'] / 1e9:,.1f} GB/s copied, "
        f"{ceilings['flops_per_s'] / 1e12:,.2f} TFLOP/s. {load_of(result)}",
        *(f"- a part is older: {_made(made)}" for made in result.get("earlier", [])),
        *(f"- {note}" for note in result["notes"]),
        *(f"- {name}: {reason}" for name, reason in result["left_out"].items()),
    ]
    return "\n".join(shown)


def _made(signature: dict[str, Any] | None) -> str:
    """Commit, machine and versions of an older part."""
    if signature is None:
        return "its machine and versions are not known"
    commit = signature["commit"] or {"id": "unknown"}
    return (
        f"commit {commit['id'][:10]} on {signature['machine']['device']}, {versions_of(signature)}"
    )


def details(result: dict[str, Any]) -> Iterator[list[list[str]]]:
    """Tables of building, of SeDeM's stages, and of scoring large banks."""
    yield _building(result)
    yield _stages(result)
    if result["selection"]:
        yield _selection(result)


def _building(result: dict[str, Any]) -> list[list[str]]:
    """Building a bank, compared with Hugging Face's forward of the same layers."""
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


def _kept(result: dict[str, Any]) -> list[list[str]]:
    """Times and bytes of every row of the comparison, by context length."""
    shown = [list(KEPT_HEADINGS)]
    for tokens, found in result["worth"].items():
        for name, label in KEPT_ROWS.items():
            row = result["results"][name][tokens]
            times, kept = row["prebuilt_ttft_ms"], row["kept"] or {"bytes_per_token": 0}
            # For a prefix, only the cache is stored.
            bank = 0 if name == "hf-prefix" else row["stored_bytes_per_token"]
            shown.append(
                [
                    f"{int(tokens):,}",
                    label,
                    f"{row['decoder_tokens']:,}",
                    f"{times['median']:,.1f} ({times['q1']:,.1f}-{times['q3']:,.1f})",
                    f"{found['ratio'][name]:.2f}",
                    f"{bank:,.0f}" if bank else "-",
                    f"{kept['bytes_per_token']:,.0f}" if kept["bytes_per_token"] else "-",
                ]
            )
    return shown


def _worth(result: dict[str, Any]) -> list[list[str]]:
    """Times of SeDeM by what is found, and the point from which keeping pays off."""
    shown = [list(WORTH_HEADINGS)]
    for tokens, found in result["worth"].items():
        cold, warm = (result["results"][name][tokens] for name in ("sedem", "sedem-warm"))
        times = [cold["prebuilt_ttft_ms"], warm["missed_ttft_ms"], warm["prebuilt_ttft_ms"]]
        shown.append(
            [
                f"{int(tokens):,}",
                *(f"{time['median']:,.1f}" for time in times),
                _number(found["hit_rate"]),
                f"{warm['warm_ms']['median']:,.0f}",
                _number(found["questions"]),
            ]
        )
    return shown


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"

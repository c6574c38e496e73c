"""Speed: times and memory of methods, batches, kept keys and values, and growing banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.system import paper
from experiments.system.bench import (
    BATCHES,
    BESIDE_CONTEXTS,
    CONTEXTS,
    KEPT_CONTEXTS,
    METHODS,
    SEDEM_CONTEXTS,
    SLOT_TYPES,
    bench_cells,
    comprexit_times,
    icae_times,
    timed_context,
    timed_shapes,
)
from experiments.system.cells import Cell
from experiments.system.models import main_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import (
    NOT_RUN,
    Number,
    Study,
    entries,
    load_of,
    made_on,
    markdown_table,
    mean_of,
    ratio_of,
    study,
    versions_of,
)
from experiments.system.timing import GROWN, RATES, WAYS
from sedem.bench.report import draw as draw_bench
from sedem.bench.report import lines

NONE_PRINTED = "The paper gives no numbers of this kind."
KEPT_ROWS = {
    "sedem": "sedem, cold",
    "sedem-warm": "sedem, warm",
    "text-blocks": "text-blocks",
    "hf-prefix": "hf-prefix",
}
"""Rows of the comparison of kept keys and values, and their labels."""
INT8 = "sedem-warm-int8-weights"
BESIDE_ROWS = {
    INT8: "sedem",
    "hf": "Hugging Face, whole text",
    "hf-prefix": "Hugging Face, prefix cache",
    "llama-cpp": "llama.cpp, prefix cache",
}
"""Rows of the comparison with llama.cpp, and their labels."""
WITHOUT_BANK = ("hf", "hf-prefix", "llama-cpp")
ONLINE = "online TTFT, ms", "online_ttft_ms.median"
PREBUILT = "prebuilt TTFT, ms", "prebuilt_ttft_ms.median"


def _rows(
    scale: Scale,
    kind: str,
    contexts: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, str],
    *columns: tuple[Any, ...],
) -> Iterator[Number]:
    """Figures of a bench: a row per model, context length and method.

    Args:
        kind: the measure of the cells.
        contexts: context lengths by scale.
        rows: methods of the bench by label.
        columns: the column and the place in a row of the bench, with more as in `entries`.
    """
    for name, cell in bench_cells(scale, kind).items():
        for tokens in contexts[scale.size]:
            for label, method in rows.items():
                place = f"results.{method}.{tokens}"
                own = ((title, f"{place}.{within}", *more) for title, within, *more in columns)
                yield from entries(f"{name}, {tokens:,} tokens: {label}", cell, *own)


def _timed(
    scale: Scale, cell: Cell, method: str, row: str, column: str, printed: float | None, within: str
) -> Number:
    """One time of a method in a cell of the paper's tables of times."""
    place = f"results.{method}.{timed_context(cell, scale)}.{within}"
    return Number(row, column, printed, cell, place)


OTHER_MACHINE = (
    "Random weights, batch 1, greedy. The paper's times are of an A100-SXM4-40GB, ours of another "
    "machine, so compare ratios, not times. A small scale times the shape of its own backbone."
)
BESIDE_ICAE = {"ours": ("SeDeM", "sedem"), "icae": ("ICAE", "icae")}
"""The paper's columns of the comparison: our label, and the method of the bench."""


@study(
    "Online time to the first token and decoding speed (Table efficiency_varb_icae)",
    f"{OTHER_MACHINE} The average ratio is that of the average times.",
)
def efficiency(scale: Scale) -> Iterator[Number]:
    """SeDeM, ICAE and their ratio on contexts of each set's mean length, and the averages."""
    columns = {
        "TTFT, ms": ("ttft", "_ms", ONLINE[1], ("icae", "ours")),
        "tok/s": ("tok_s", "", "decode_tok_s.median", ("ours", "icae")),
    }
    keys = {name: key for key, name in paper.DATASETS.items()}
    for shape, short in timed_shapes(scale).items():
        for column, (name, unit, within, order) in columns.items():
            sets: dict[str, list[Number]] = {own: [] for own in BESIDE_ICAE}
            for row in paper.rows("tab:efficiency_varb_icae"):
                group, key, pair = f"{shape}, {row['dataset']}", keys.get(row["dataset"]), {}
                for own, (label, method) in BESIDE_ICAE.items():
                    line, printed = f"{group}: {label}", row[f"{short}_{name}_{own}{unit}"]
                    if key:
                        cell = icae_times(scale, shape, key)
                        pair[own] = _timed(scale, cell, method, line, column, printed, within)
                        sets[own].append(pair[own])
                    else:
                        pair[own] = mean_of(line, column, printed, sets[own])
                yield from pair.values()
                printed = row[f"{short}_{name}_ratio"]
                yield ratio_of(f"{group}: ratio", column, printed, [pair[own] for own in order])


@study(
    "Early exit of the encoder (section Inference Efficiency)",
    f"{OTHER_MACHINE} The paper gives no numbers but those of selection at 3B, about.",
)
def early_exit(scale: Scale) -> Iterator[Number]:
    """Times of SeDeM whose encoder ends at the extraction layer, or runs all layers.

    The times of selection are those of encoding and scoring a question.
    """
    rows = {True: ("ends at extraction", "sedem"), False: ("all layers", "sedem-all-layers")}
    columns = {
        "selection, ms": "stages.select_ms.median",
        "reading, ms": "stages.build_ms.median",
        "TTFT, ms": ONLINE[1],
    }
    printed = {
        (paper.backbone_of(row), row["early_exit"]): row["selection_ms"]
        for row in paper.rows("inline_early_exit")
    }
    for shape in timed_shapes(scale):
        cell = icae_times(scale, shape, "hotpotqa")
        for exits, (label, method) in rows.items():
            for column, within in columns.items():
                known = printed.get((shape, exits)) if column == "selection, ms" else None
                line = f"{shape}: {label}"
                yield _timed(scale, cell, method, line, column, known, within)


BESIDE_COMPREXIT = {
    "SeDeM learned-K=2": "sedem",
    "SeDeM full-bank": "sedem-all-blocks",
    "ComprExIT (reference)": "comprexit",
    "ComprExIT (matched)": "comprexit-128",
}
"""The methods of the bench by the paper's names."""


def beside_comprexit(scale: Scale, row: str, column: str, method: str, printed: float) -> Number:
    """The time to the first token of a configuration, by the paper's name; one for all sets."""
    cell = comprexit_times(scale)
    return _timed(scale, cell, BESIDE_COMPREXIT[method], row, column, printed, ONLINE[1])


@study(
    "Online time to the first token beside ComprExIT (Table comprexit_ttft)",
    f"{OTHER_MACHINE} The context has 1,536 tokens for both sets, so both columns show one time.",
)
def comprexit_ttft(scale: Scale) -> Iterator[Number]:
    """SeDeM with two blocks or all, and ComprExIT with pieces of 512 and of 128 tokens."""
    for row in paper.rows("tab:comprexit_ttft"):
        for key in ("hotpotqa", "2wiki"):
            column, printed = f"{scale.sets[key].title} TTFT, ms", row[f"{key}_ttft_ms"]
            yield beside_comprexit(scale, row["method"], column, row["method"], printed)


def _draw_bench(one: Study, scale: Scale, path: Path) -> None:
    """Draw the times of the scale's first model against context length.

    Raises:
        FileNotFoundError: the bench has not been run.
    """
    cell = next(iter(bench_cells(scale).values()))
    result = cell.read(scale)
    if result is None:
        raise FileNotFoundError(f"'{cell.name}' has no result at {scale.name} scale; run it first")
    draw_bench(result, path)


@study(
    "Times of every method",
    NONE_PRINTED,
    render=lambda scale: _blocks(scale, "bench", f"{scale.name}-performance.svg"),
    draw=_draw_bench,
)
def performance(scale: Scale) -> Iterator[Number]:
    """Time to the first token, decoding and building, by method and context length."""
    methods = {method: method for method in METHODS[scale.name]}
    decoding = "decode tok/s", "decode_tok_s.median"
    yield from _rows(scale, "bench", CONTEXTS, methods, ONLINE, PREBUILT, decoding)


@study("Many questions over one bank", NONE_PRINTED, render=lambda scale: _blocks(scale, "batches"))
def batches(scale: Scale) -> Iterator[Number]:
    """Medians by the number of questions asked together."""
    for name, cell in bench_cells(scale, "batches").items():
        for tokens in SEDEM_CONTEXTS[scale.size]:
            for count in BATCHES[scale.size]:
                row = f"{name}, {tokens:,} tokens: {count} together"
                metric = f"results.sedem.{tokens}.batches.{count}.questions_per_s.median"
                yield from entries(row, cell, ("questions a second", metric, 2))


@study(
    "Times with slots in fewer bytes",
    NONE_PRINTED,
    render=lambda scale: _blocks(scale, "memories"),
)
def memories(scale: Scale) -> Iterator[Number]:
    """Times and bytes by the type of the stored slots."""
    methods = {t: "sedem" if t == "bfloat16" else f"sedem-{t}" for t in SLOT_TYPES}
    stored = "bytes a token", "stored_bytes_per_token"
    yield from _rows(scale, "memories", SEDEM_CONTEXTS, methods, ONLINE, PREBUILT, stored)


@study(
    "Keys and values that are kept",
    NONE_PRINTED,
    drawn=("TTFT", "kept bytes"),
    render=lambda scale: _blocks(scale, "kept"),
)
def kept(scale: Scale) -> Iterator[Number]:
    """Times and bytes by method, and the point from which keeping pays off."""
    for name, cell in bench_cells(scale, "kept").items():
        for tokens in KEPT_CONTEXTS[scale.size]:
            row, worth = f"{name}, {tokens:,} tokens", f"worth.{tokens}"
            for method, label in KEPT_ROWS.items():
                place = f"results.{method}.{tokens}"
                columns = [
                    ("prebuilt TTFT, ms", f"{place}.prebuilt_ttft_ms.median", 1),
                    ("times warm's", f"{worth}.ratio.{method}", 2),
                    ("kept bytes a token", f"{place}.kept.bytes_per_token", 0),
                ]
                yield from entries(
                    f"{row}: {label}", cell, *columns[: 2 if method == "sedem" else 3]
                )
            yield from entries(
                f"{row}: sedem, warm",
                cell,
                ("hit rate that pays, %", f"{worth}.hit_rate", 0),
                ("questions that pay for warming", f"{worth}.questions", 0),
            )


@study(
    "sedem-smol and llama.cpp",
    NONE_PRINTED,
    render=lambda scale: _blocks(scale, "beside-llama-cpp"),
)
def beside_llama_cpp(scale: Scale) -> Iterator[Number]:
    """Times and kept bytes of a warm bank, and of the same backbone with the whole text."""
    if SMOL not in scale.shipped:
        return
    rows = {label: method for method, label in BESIDE_ROWS.items()}
    decoding = "decode tok/s", "decode_tok_s.median"
    yield from _rows(scale, "beside-llama-cpp", BESIDE_CONTEXTS, rows, PREBUILT, decoding)


@study(
    "Questions that arrive at random",
    NONE_PRINTED,
    about="{questions} questions with K of 1, 2 or 4 to a context of {tokens:,} tokens, up to "
    "{rows} at once, seed {seed}; medians of {rounds} rounds, in turn. TTFT is the time from the "
    "arrival of a question to its first token.",
)
def arrivals(scale: Scale) -> Iterator[Number]:
    """Throughput and waiting time by rate and kind of batch, of sedem-nano or a stand-in."""
    cell = Cell("arrivals", variant=main_model(scale) if scale.stand_in else None)
    for rate in RATES[scale.size]:
        for way in WAYS:
            yield from entries(
                f"{rate} a second, {way}",
                cell,
                ("tokens a second", f"rates.{rate}.{way}.tokens_s"),
                ("median TTFT, ms", f"rates.{rate}.{way}.ttft_median_ms", 0),
                ("p99 TTFT, ms", f"rates.{rate}.{way}.ttft_p99_ms", 0),
                ("mean time to the end, ms", f"rates.{rate}.{way}.end_mean_ms", 0),
            )


@study(
    "Preparing questions for stage 2",
    NONE_PRINTED,
    about="{examples} examples of {tokens:,} tokens in all; medians of processor time, the ways in "
    "turn.",
)
def preparation(scale: Scale) -> Iterator[Number]:
    """Milliseconds per example by preparation method, and bytes per example in the arrays."""
    cell = Cell("preparation", variant=main_model(scale), questions="hotpotqa")
    for way in ("one by one", "together", "from disk"):
        yield from entries(
            way,
            cell,
            ("ms an example", f"milliseconds.{way}", 2),
            ("times sooner", f"times_sooner.{way}"),
            *([] if way == "one by one" else [("bytes an example", "bytes", 0)]),
        )


@study(
    "Opening, appending and reading by the size of a bank",
    NONE_PRINTED,
    about="Blocks of {slots} slots, ten a document, {commit_blocks} a commit; processor time.",
)
def bank_size(scale: Scale) -> Iterator[Number]:
    """Costs by the number of blocks."""
    for size in GROWN[scale.size]:
        yield from entries(
            f"N={size}",
            Cell("bank-size"),
            ("opening, s", f"sizes.{size}.open_s", 3),
            ("memory of opening, MB", f"sizes.{size}.open_mb", 1),
            ("spans of all blocks, s", f"sizes.{size}.spans_s", 3),
            ("memory of them, MB", f"sizes.{size}.spans_mb", 1),
            ("8 blocks, ms", f"sizes.{size}.select_ms", 2),
            ("a commit of 800 blocks, ms", f"sizes.{size}.commit_ms", 1),
            ("seeing another's commit, ms", f"sizes.{size}.reload_ms", 1),
        )


# Blocks of docs/performance.md


def _blocks(scale: Scale, kind: str, picture: str = "") -> str:
    """The bench's measurements for each model of a scale, one model after another.

    Args:
        scale: nano shows sedem-nano, paper the shapes of Llama.
        kind: "bench", "batches", "memories", "kept" or "beside-llama-cpp".
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
            parts.append(_measured_on(result))
            tables = [lines(result)]
            if kind == "kept":
                tables = [_kept(result, KEPT_ROWS, "sedem-warm"), _worth(result)]
            elif kind == "beside-llama-cpp":
                tables = [_kept(result, BESIDE_ROWS, INT8, decoding=True)]
            elif kind == "bench":
                tables += _details(result)
            parts += map(markdown_table, tables)
        shown.append("\n\n".join(parts))
        picture = ""
    return "\n\n".join(shown)


def _measured_on(result: Mapping[str, Any]) -> str:
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


def _made(signature: Mapping[str, Any] | None) -> str:
    """Commit, machine and versions of an older part."""
    if signature is None:
        return "its machine and versions are not known"
    commit = signature["commit"] or {"id": "unknown"}
    return (
        f"commit {commit['id'][:10]} on {signature['machine']['device']}, {versions_of(signature)}"
    )


def _details(result: Mapping[str, Any]) -> Iterator[list[list[str]]]:
    """Tables of building, of SeDeM's stages, and of scoring large banks."""
    sedem = result["results"].get("sedem", {})
    building = [["tokens", "build tok/s", "Hugging Face's forward of these layers, tok/s", "ratio"]]
    for tokens, row in sedem.items():
        if row["layers_tok_s"] is not None:
            own, rival = row["build_tok_s"]["median"], row["layers_tok_s"]["median"]
            ratio = f"{own / rival:.2f}"
            building.append([f"{int(tokens):,}", f"{own:,.0f}", f"{rival:,.0f}", ratio])
    yield building
    names = ("segment", "encode", "compress", "question", "score", "gather", "prefill")
    stages = [["tokens", *(f"{name}, ms" for name in names)]]
    for tokens, row in sedem.items():
        asked = {name: entry["median"] for name, entry in row["stages"].items() if entry}
        found = [row["build_stages"][f"{name}_ms"] for name in names[:3]]
        found += [asked.get(f"{name}_ms") for name in ("encode", "score", "gather", "prefill")]
        times = ["-" if value is None else f"{value:,.1f}" for value in found]
        stages.append([f"{int(tokens):,}", *times])
    yield stages
    selection = [["blocks", "tokens", "MB", "score, ms", "floor"]]
    for row in result["selection"].values():
        counts = [f"{row['blocks']:,}", f"{row['tokens']:,}", f"{row['bytes'] / 1e6:,.0f}"]
        selection.append([*counts, _quartiles(row["score_ms"]), f"{row['floor_ms']:,.1f}"])
    if len(selection) > 1:
        yield selection


def _quartiles(times: Mapping[str, float]) -> str:
    return f"{times['median']:,.1f} ({times['q1']:,.1f}-{times['q3']:,.1f})"


def _kept(
    result: Mapping[str, Any], labels: Mapping[str, str], reference: str, *, decoding: bool = False
) -> list[list[str]]:
    """Times and bytes of the rows that were measured, by context length.

    Args:
        reference: the row that the others are divided by.
    """
    results, short = result["results"], labels[reference].split(", ")[-1]
    head = ["tokens", "method", "decoder reads", "prebuilt TTFT ms", f"times {short}'s"]
    shown = [[*head, *(["decode tok/s"] if decoding else []), "bank, B/token", "kept, B/token"]]
    for tokens, warm in results[reference].items():
        for name in (name for name in labels if name in results):
            row = results[name][tokens]
            ratio = row["prebuilt_ttft_ms"]["median"] / warm["prebuilt_ttft_ms"]["median"]
            # Text has no bank, and for a prefix, only the cache is stored.
            bank = 0 if name in WITHOUT_BANK else row["stored_bytes_per_token"]
            kept_bytes = row["kept"]["bytes_per_token"] if row["kept"] else 0
            shown.append(
                [
                    f"{int(tokens):,}",
                    labels[name],
                    f"{row['decoder_tokens']:,}",
                    _quartiles(row["prebuilt_ttft_ms"]),
                    f"{ratio:.2f}",
                    *([_quartiles(row["decode_tok_s"])] if decoding else []),
                    f"{bank:,.0f}" if bank else "-",
                    f"{kept_bytes:,.0f}" if kept_bytes else "-",
                ]
            )
    return shown


def _worth(result: Mapping[str, Any]) -> list[list[str]]:
    """Times of SeDeM by what is found, and the point from which keeping pays off."""
    head = ["tokens", "nothing kept, ms", "nothing found, ms", "all found, ms"]
    head += ["hit rate that pays, %", "warming the bank, ms", "questions that pay for it"]
    shown = [head]
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

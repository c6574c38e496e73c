"""Speed: times of methods, batches, kept keys and values, and growing banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.system import paper
from experiments.system.bench import (
    BATCHES,
    METHODS,
    PEERS_BESIDE,
    bench_cells,
    comprexit_times,
    contexts_of,
    icae_times,
    timed_context,
    timed_shapes,
)
from experiments.system.cells import Cell
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, entries, mean_of, ours, ratio_of, study
from experiments.system.timing import GROWN

OF_BENCH = (
    "Medians of {settings[runs]} runs, with quartiles, and {settings[answer_tokens]} answer tokens."
)
ONLINE = "online TTFT, ms", "online_ttft_ms", 0
PREBUILT = "prebuilt TTFT, ms", "prebuilt_ttft_ms", 1
DECODING = "decode tok/s", "decode_tok_s", 1
MEDIAN = "online_ttft_ms.median"


def _measured(
    scale: Scale, kind: str, methods: Mapping[str, str]
) -> Iterator[tuple[str, Cell, str, str, int]]:
    """Label, cell, place in the result, method and context length of every row of a bench.

    Args:
        kind: the measure of the cells.
        methods: labels by method of the bench. If there are several models, theirs come first.
    """
    cells = bench_cells(scale, kind)
    for name, cell in cells.items():
        for tokens in contexts_of(scale, kind):
            for method, label in methods.items():
                row = f"{name}: {label}" if len(cells) > 1 else label
                yield f"{row}, T={tokens}", cell, f"results.{method}.{tokens}", method, tokens


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


@study(OTHER_MACHINE)
def efficiency(scale: Scale) -> Iterator[Number]:
    """Online time to the first token and decoding speed (Table efficiency_varb_icae).

    The average ratio is that of the average times.
    """
    # Contexts have each set's mean length.
    columns = {
        "TTFT, ms": ("ttft", "_ms", MEDIAN, ("icae", "ours")),
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


@study(OTHER_MACHINE)
def early_exit(scale: Scale) -> Iterator[Number]:
    """Early exit of the encoder (section Inference Efficiency).

    The paper gives no numbers but those of selection at 3B, about.
    """
    # The encoder ends at the extraction layer, or runs all layers. The times of selection are those
    # of encoding and scoring a question.
    rows = {True: ("ends at extraction", "sedem"), False: ("all layers", "sedem-all-layers")}
    columns = {
        "selection, ms": "stages.select_ms.median",
        "reading, ms": "stages.build_ms.median",
        "TTFT, ms": MEDIAN,
    }
    printed = {
        (paper.backbone_of(row), row["early_exit"], "selection, ms"): row["selection_ms"]
        for row in paper.rows("inline_early_exit")
    }
    for shape in timed_shapes(scale):
        cell = icae_times(scale, shape, "hotpotqa")
        for exits, (label, method) in rows.items():
            for column, within in columns.items():
                known, line = printed.get((shape, exits, column)), f"{shape}: {label}"
                yield _timed(scale, cell, method, line, column, known, within)


BESIDE_COMPREXIT = {
    "SeDeM learned-K=2": "sedem",
    "SeDeM full-bank": "sedem-all-blocks",
    "ComprExIT (reference)": "comprexit",
    "ComprExIT (matched)": "comprexit-128",
}
"""The methods of the bench by the paper's names; ComprExIT has pieces of 512 and of 128 tokens."""


def beside_comprexit(scale: Scale, row: str, column: str, method: str, printed: float) -> Number:
    """The time to the first token of a configuration, by the paper's name; one for all sets."""
    cell = comprexit_times(scale)
    return _timed(scale, cell, BESIDE_COMPREXIT[method], row, column, printed, MEDIAN)


@study(OTHER_MACHINE)
def comprexit_ttft(scale: Scale) -> Iterator[Number]:
    """Online time to the first token beside ComprExIT (Table comprexit_ttft).

    The context has 1,536 tokens for both sets, so both columns show one time.
    """
    for row in paper.rows("tab:comprexit_ttft"):
        for key in ("hotpotqa", "2wiki"):
            column, printed = f"{scale.sets[key].title} TTFT, ms", row[f"{key}_ttft_ms"]
            yield beside_comprexit(scale, row["method"], column, row["method"], printed)


@ours(about=OF_BENCH)
def performance(scale: Scale) -> Iterator[Number]:
    """Times of every method."""
    columns = (
        ("reads, tokens", "reads_tokens", 0),
        ONLINE,
        PREBUILT,
        DECODING,
        ("build tok/s", "build_tok_s", 0),
        ("bytes a token", "stored_bytes_per_token", 1),
    )
    names = (*METHODS[scale.name], *PEERS_BESIDE.get(scale.size, ()))
    own = dict(zip(names, names, strict=True))
    for row, cell, place, *_ in _measured(scale, "bench", own):
        yield from entries(row, cell, *columns, at=place)


@ours(about=OF_BENCH)
def batches(scale: Scale) -> Iterator[Number]:
    """Many questions over one bank."""
    counts = BATCHES[scale.size]
    columns = [(f"{count} together", f"batches.{count}.questions_per_s", 2) for count in counts]
    rows = {"sedem": "questions a second"}
    for row, cell, place, *_ in _measured(scale, "batches", rows):
        yield from entries(row, cell, *columns, at=place)


def _beside(
    scale: Scale, kind: str, rows: Mapping[str, str], *more: tuple[Any, ...]
) -> Iterator[Number]:
    """Times of a warm bank, the first of the rows, and of other rows as its multiples."""
    warm, name = next(iter(rows.items()))
    for row, cell, place, method, tokens in _measured(scale, kind, rows):
        columns = [("decoder reads", "decoder_tokens", 0), PREBUILT, *more]
        if method.startswith("sedem"):
            columns.append(("bank, bytes a token", "stored_bytes_per_token", 0))
        if method != "sedem":  # which keeps nothing
            columns.append(("kept, bytes a token", "kept.bytes_per_token", 0))
        yield from entries(row, cell, *columns, at=place)
        both = [
            Number("", "", None, cell, f"results.{one}.{tokens}.{PREBUILT[1]}.median")
            for one in (method, warm)
        ]
        yield ratio_of(row, f"times {name}'s", None, both)


@ours(about=OF_BENCH)
def kept(scale: Scale) -> Iterator[Number]:
    """Keys and values that are kept."""
    rows = {"sedem-warm": "warm", "sedem": "cold", "hf-prefix": "hf-prefix"}
    return _beside(scale, "kept", rows)


@ours(about=OF_BENCH)
def beside_llama_cpp(scale: Scale) -> Iterator[Number]:
    """sedem-smol and llama.cpp."""
    rows = {
        "sedem-warm-int8-weights": "sedem",
        "hf-prefix": "Hugging Face, prefix cache",
        "llama-cpp": "llama.cpp, prefix cache",
    }
    if SMOL in scale.shipped:
        yield from _beside(scale, "beside-llama-cpp", rows, DECODING)


@ours(about="Blocks of {slots} slots, ten a document, {commit_blocks} a commit; processor time.")
def bank_size(scale: Scale) -> Iterator[Number]:
    """Opening, appending and reading by the size of a bank."""
    columns = (
        ("opening, s", "open_s", 3),
        ("memory of opening, MB", "open_mb", 1),
        ("spans of all blocks, s", "spans_s", 3),
        ("memory of them, MB", "spans_mb", 1),
        ("8 blocks, ms", "select_ms", 2),
        ("a commit of 800 blocks, ms", "commit_ms", 1),
        ("seeing another's commit, ms", "reload_ms", 1),
    )
    for size in GROWN[scale.size]:
        yield from entries(f"N={size}", Cell("bank-size"), *columns, at=f"sizes.{size}")

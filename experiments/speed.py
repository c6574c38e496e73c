"""Speed: times and memory of methods, batches, kept keys and values, and growing banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.system import paper
from experiments.system.bench import (
    BATCHES,
    BESIDE_CONTEXTS,
    CONTEXTS,
    KEPT_CONTEXTS,
    METHODS,
    PEERS_BESIDE,
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
from experiments.system.tables import Number, entries, mean_of, ratio_of, study
from experiments.system.timing import GROWN, RATES, WAYS

NONE_PRINTED = "The paper gives no numbers of this kind."
TIMES = (
    "Medians of {settings[runs]} runs, with quartiles, and {settings[answer_tokens]} answer tokens."
)
ONLINE = "online TTFT, ms", "online_ttft_ms", 0
PREBUILT = "prebuilt TTFT, ms", "prebuilt_ttft_ms", 1
DECODING = "decode tok/s", "decode_tok_s", 1
MEDIAN = "online_ttft_ms.median"
STORED = "bytes a token", "stored_bytes_per_token", 1


def _prefixed(scale: Scale, kind: str) -> Iterator[tuple[str, Cell]]:
    """The cells of a bench, and what their rows begin with if there are several."""
    cells = bench_cells(scale, kind)
    for name, cell in cells.items():
        yield f"{name}: " if len(cells) > 1 else "", cell


def _rows(
    scale: Scale,
    kind: str,
    contexts: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, str],
    *columns: tuple[Any, ...],
) -> Iterator[Number]:
    """Figures of a bench: a row per model, context length T and method.

    Args:
        kind: the measure of the cells.
        contexts: context lengths by scale.
        rows: labels by method of the bench.
        columns: the column and the place in a row of the bench, with more as in `entries`.
    """
    for prefix, cell in _prefixed(scale, kind):
        for tokens in contexts[scale.size]:
            for method, label in rows.items():
                place = f"results.{method}.{tokens}"
                own = ((title, f"{place}.{within}", *more) for title, within, *more in columns)
                yield from entries(f"{prefix}{label}, T={tokens}", cell, *own)


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
        "TTFT, ms": MEDIAN,
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
    return _timed(scale, cell, BESIDE_COMPREXIT[method], row, column, printed, MEDIAN)


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


@study("Times of every method", NONE_PRINTED, about=TIMES, spread="quartiles", drawn=("TTFT",))
def performance(scale: Scale) -> Iterator[Number]:
    """Times, floors, memory and bytes, by method and context length T."""
    names = (*METHODS[scale.name], *PEERS_BESIDE.get(scale.size, ()))
    yield from _rows(
        scale, "bench", CONTEXTS, {name: name for name in names},
        ("reads, tokens", "reads_tokens", 0),
        ONLINE, ("online floor, ms", "floor.online_ttft_ms", 0),
        PREBUILT, ("prebuilt floor, ms", "floor.prebuilt_ttft_ms", 1),
        DECODING, ("decode at most", "floor.decode_tok_s", 0),
        ("build tok/s", "build_tok_s", 0), ("build at most", "floor.build_tok_s", 0),
        ("peak MB", "memory.peak_bytes", 0, 1e6), STORED,
    )  # fmt: skip


@study("Building and answering by stage", NONE_PRINTED, about=TIMES, spread="quartiles")
def stages(scale: Scale) -> Iterator[Number]:
    """Speed of building beside Hugging Face's forward of these layers, and SeDeM's stages."""
    for prefix, cell in _prefixed(scale, "bench"):
        for tokens in CONTEXTS[scale.size]:
            row, place = f"{prefix}sedem, T={tokens}", f"results.sedem.{tokens}"
            columns = ("build tok/s", "build_tok_s"), ("layers alone, tok/s", "layers_tok_s")
            speeds = [
                Number(row, column, None, cell, f"{place}.{speed}.median", digits=0)
                for column, speed in columns
            ]
            yield from (*speeds, ratio_of(row, "ratio", None, speeds))
            built, asked = (
                ("segment", "encode", "compress"),
                ("encode", "score", "gather", "prefill"),
            )
            named = {"encode": "question"}
            yield from entries(
                row,
                cell,
                *((f"{stage}, ms", f"{place}.build_stages.{stage}_ms") for stage in built),
                *(
                    (f"{named.get(stage, stage)}, ms", f"{place}.stages.{stage}_ms.median")
                    for stage in asked
                ),
            )


@study("Many questions over one bank", NONE_PRINTED, about=TIMES, spread="quartiles")
def batches(scale: Scale) -> Iterator[Number]:
    """Questions a second by the number of questions asked together."""
    columns = [
        (f"{count} together", f"batches.{count}.questions_per_s", 2)
        for count in BATCHES[scale.size]
    ]
    yield from _rows(scale, "batches", SEDEM_CONTEXTS, {"sedem": "questions a second"}, *columns)


@study("Times with slots in fewer bytes", NONE_PRINTED, about=TIMES, spread="quartiles")
def memories(scale: Scale) -> Iterator[Number]:
    """Times and bytes by the type of the stored slots."""
    rows = {"sedem" if t == "bfloat16" else f"sedem-{t}": t for t in SLOT_TYPES}
    yield from _rows(scale, "memories", SEDEM_CONTEXTS, rows, ONLINE, PREBUILT, DECODING, STORED)


READS, KEPT = (
    ("decoder reads", "decoder_tokens", 0),
    ("kept, bytes a token", "kept.bytes_per_token", 0),
)


READS = "decoder reads", "decoder_tokens", 0
BANK = "bank, bytes a token", "stored_bytes_per_token", 0
KEPT = "kept, bytes a token", "kept.bytes_per_token", 0


def _beside(
    scale: Scale,
    kind: str,
    contexts: Mapping[str, tuple[int, ...]],
    rows: Mapping[str, str],
    without: str,
    *more: tuple[Any, ...],
) -> Iterator[Number]:
    """Times of a warm bank, the first of the rows, and of other rows as its multiples.

    Args:
        without: the method that keeps nothing.
    """
    first = next(iter(rows.values()))
    for prefix, cell in _prefixed(scale, kind):
        for tokens in contexts[scale.size]:
            times = [
                Number("", "", None, cell, f"results.{method}.{tokens}.{PREBUILT[1]}.median")
                for method in rows
            ]
            for time, (method, label) in zip(times, rows.items(), strict=True):
                row, place = f"{prefix}{label}, T={tokens}", f"results.{method}.{tokens}"
                columns = [READS, PREBUILT, *more]
                columns += [] if method.startswith(("hf", "llama")) else [BANK]
                columns += [] if method == without else [KEPT]
                own = ((title, f"{place}.{within}", *rest) for title, within, *rest in columns)
                yield from entries(row, cell, *own)
                yield ratio_of(row, f"times {first}'s", None, [time, times[0]])


@study(
    "Keys and values that are kept",
    NONE_PRINTED,
    about=TIMES,
    spread="quartiles",
    drawn=("TTFT", "kept, bytes"),
)
def kept(scale: Scale) -> Iterator[Number]:
    """Times and bytes by method, and the point from which keeping pays off."""
    names = ("sedem-warm", "sedem", "text-blocks", "hf-prefix")
    rows = dict(zip(names, ("warm", "cold", *names[2:]), strict=True))
    yield from _beside(scale, "kept", KEPT_CONTEXTS, rows, "sedem")
    for prefix, cell in _prefixed(scale, "kept"):
        for tokens in KEPT_CONTEXTS[scale.size]:
            row, place = f"{prefix}warm, T={tokens}", f"results.sedem-warm.{tokens}"
            times = [
                Number(row, column, None, cell, metric, digits=digits)
                for column, metric, digits in (
                    ("cold", f"results.sedem.{tokens}.{PREBUILT[1]}.median", 1),
                    ("found", f"{place}.{PREBUILT[1]}.median", 1),
                    ("nothing found, ms", f"{place}.missed_ttft_ms.median", 1),
                    ("warming, ms", f"{place}.warm_ms.median", 0),
                )
            ]
            yield from times[2:]
            for column, computed in (
                ("hit rate that pays, %", hit_rate),
                ("questions that pay for warming", paying_questions),
            ):
                yield Number(row, column, parts=tuple(times), computed=computed, digits=0)


NEVER = "never"


def hit_rate(times: Sequence[float]) -> float | str:
    """The share of blocks found from which keeping is faster, in percent.

    Times of an answer: `cold` if nothing is ever kept, `found` if every block is kept already,
    `missed` if all blocks are computed and kept. With a share h of found blocks, an answer takes
    h * found + (1 - h) * missed.
    """
    cold, found, missed, _ = times
    if missed <= cold:
        return 0.0
    return 100 * (missed - cold) / (missed - found) if found <= cold else NEVER


def paying_questions(times: Sequence[float]) -> float | str:
    """The number of questions after which warming the whole bank has paid off."""
    cold, found, _, warming = times
    return warming / (cold - found) if found < cold else NEVER


@study("sedem-smol and llama.cpp", NONE_PRINTED, about=TIMES, spread="quartiles", drawn=("TTFT",))
def beside_llama_cpp(scale: Scale) -> Iterator[Number]:
    """Times and kept bytes of a warm bank, and of the same backbone with the whole text."""
    if SMOL not in scale.shipped:
        return
    rows = {
        "sedem-warm-int8-weights": "sedem",
        "hf": "Hugging Face, whole text",
        "hf-prefix": "Hugging Face, prefix cache",
        "llama-cpp": "llama.cpp, prefix cache",
    }
    yield from _beside(scale, "beside-llama-cpp", BESIDE_CONTEXTS, rows, "hf", DECODING)


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

"""Speed: times and memory of methods, batches, kept keys and values, and growing banks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.system import paper
from experiments.system.bench import (
    BATCHES,
    METHODS,
    PEERS_BESIDE,
    SLOT_TYPES,
    bench_cells,
    comprexit_times,
    contexts_of,
    icae_times,
    timed_context,
    timed_shapes,
)
from experiments.system.cells import Cell
from experiments.system.models import main_model
from experiments.system.scales import SMOL, Scale
from experiments.system.tables import Number, entries, mean_of, ours, ratio_of, study
from experiments.system.timing import GROWN, RATES, WAYS

OF_BENCH = (
    "Medians of {settings[runs]} runs, with quartiles, and {settings[answer_tokens]} answer tokens."
)
ONLINE = "online TTFT, ms", "online_ttft_ms", 0
PREBUILT = "prebuilt TTFT, ms", "prebuilt_ttft_ms", 1
DECODING = "decode tok/s", "decode_tok_s", 1
MEDIAN = "online_ttft_ms.median"
STORED = "bytes a token", "stored_bytes_per_token", 1


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


@ours(about=OF_BENCH, spread="quartiles", drawn=("TTFT",))
def performance(scale: Scale) -> Iterator[Number]:
    """Times of every method."""
    columns = (
        ("reads, tokens", "reads_tokens", 0),
        ONLINE,
        ("online floor, ms", "floor.online_ttft_ms", 0),
        PREBUILT,
        ("prebuilt floor, ms", "floor.prebuilt_ttft_ms", 1),
        DECODING,
        ("decode at most", "floor.decode_tok_s", 0),
        ("build tok/s", "build_tok_s", 0),
        ("build at most", "floor.build_tok_s", 0),
        ("peak MB", "memory.peak_bytes", 0, 1e6),
        STORED,
    )
    names = (*METHODS[scale.name], *PEERS_BESIDE.get(scale.size, ()))
    own = dict(zip(names, names, strict=True))
    for row, cell, place, *_ in _measured(scale, "bench", own):
        yield from entries(row, cell, *columns, at=place)


@ours(about=OF_BENCH)
def stages(scale: Scale) -> Iterator[Number]:
    """Building and answering by stage."""
    built, named = ("segment", "encode", "compress"), {"encode": "question"}
    columns = [(f"{stage}, ms", f"build_stages.{stage}_ms") for stage in built]
    for stage in ("encode", "score", "gather", "prefill"):
        columns.append((f"{named.get(stage, stage)}, ms", f"stages.{stage}_ms.median"))
    for row, cell, place, *_ in _measured(scale, "bench", {"sedem": "sedem"}):
        # Beside Hugging Face's forward of these layers.
        speeds = [
            Number(row, column, None, cell, f"{place}.{speed}.median", 0)
            for column, speed in (
                ("build tok/s", "build_tok_s"),
                ("layers alone, tok/s", "layers_tok_s"),
            )
        ]
        yield from (*speeds, ratio_of(row, "ratio", None, speeds))
        yield from entries(row, cell, *columns, at=place)


@ours(about=OF_BENCH)
def batches(scale: Scale) -> Iterator[Number]:
    """Many questions over one bank."""
    counts = BATCHES[scale.size]
    columns = [(f"{count} together", f"batches.{count}.questions_per_s", 2) for count in counts]
    rows = {"sedem": "questions a second"}
    for row, cell, place, *_ in _measured(scale, "batches", rows):
        yield from entries(row, cell, *columns, at=place)


@ours(about=OF_BENCH)
def memories(scale: Scale) -> Iterator[Number]:
    """Times with slots in fewer bytes."""
    rows = {"sedem" if t == "bfloat16" else f"sedem-{t}": t for t in SLOT_TYPES}
    for row, cell, place, *_ in _measured(scale, "memories", rows):
        yield from entries(row, cell, ONLINE, PREBUILT, DECODING, STORED, at=place)


READS = "decoder reads", "decoder_tokens", 0
BANK = "bank, bytes a token", "stored_bytes_per_token", 0
KEPT = "kept, bytes a token", "kept.bytes_per_token", 0


def _beside(
    scale: Scale,
    kind: str,
    rows: Mapping[str, str],
    without: str,
    *more: tuple[Any, ...],
) -> Iterator[Number]:
    """Times of a warm bank, the first of the rows, and of other rows as its multiples.

    Args:
        without: the method that keeps nothing.
    """
    warm, name = next(iter(rows.items()))
    for row, cell, place, method, tokens in _measured(scale, kind, rows):
        columns = [READS, PREBUILT, *more]
        columns += [] if method.startswith(("hf", "llama")) else [BANK]
        columns += [] if method == without else [KEPT]
        yield from entries(row, cell, *columns, at=place)
        both = [
            Number("", "", None, cell, f"results.{one}.{tokens}.{PREBUILT[1]}.median")
            for one in (method, warm)
        ]
        yield ratio_of(row, f"times {name}'s", None, both)


@ours(about=OF_BENCH)
def kept(scale: Scale) -> Iterator[Number]:
    """Keys and values that are kept."""
    rows = {"sedem-warm": "warm", "sedem": "cold"}
    rows |= {"text-blocks": "text-blocks", "hf-prefix": "hf-prefix"}
    yield from _beside(scale, "kept", rows, "sedem")
    # The point from which keeping pays off.
    first = {"sedem-warm": "warm"}
    for row, cell, place, _, tokens in _measured(scale, "kept", first):
        times = [
            Number(row, column, None, cell, metric, digits)
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


@ours(about=OF_BENCH)
def beside_llama_cpp(scale: Scale) -> Iterator[Number]:
    """sedem-smol and llama.cpp."""
    rows = {
        "sedem-warm-int8-weights": "sedem",
        "hf": "Hugging Face, whole text",
        "hf-prefix": "Hugging Face, prefix cache",
        "llama-cpp": "llama.cpp, prefix cache",
    }
    if SMOL in scale.shipped:
        kind = "beside-llama-cpp"
        yield from _beside(scale, kind, rows, "hf", DECODING)


@ours(
    about="{questions} questions with K of 1, 2 or 4 to a context of {tokens:,} tokens, up to "
    "{rows} at once, seed {seed}; medians of {rounds} rounds, in turn. TTFT is the time from the "
    "arrival of a question to its first token."
)
def arrivals(scale: Scale) -> Iterator[Number]:
    """Questions that arrive at random."""
    columns = (
        ("tokens a second", "tokens_s"),
        ("median TTFT, ms", "ttft_median_ms", 0),
        ("p99 TTFT, ms", "ttft_p99_ms", 0),
        ("mean time to the end, ms", "end_mean_ms", 0),
    )
    cell = Cell("arrivals", variant=main_model(scale) if scale.stand_in else None)
    for rate in RATES[scale.size]:
        for way in WAYS:
            yield from entries(f"{rate} a second, {way}", cell, *columns, at=f"rates.{rate}.{way}")


@ours(
    about="{examples} examples of {tokens:,} tokens in all; medians of processor time, the ways in "
    "turn."
)
def preparation(scale: Scale) -> Iterator[Number]:
    """Preparing questions for stage 2."""
    cell = Cell("preparation", variant=main_model(scale), questions="hotpotqa")
    for way in ("one by one", "together", "from disk"):
        time, ratio = ("ms an example", f"milliseconds.{way}", 2), f"times_sooner.{way}"
        size = [] if way == "one by one" else [("bytes an example", "bytes", 0)]
        yield from entries(way, cell, time, ("times sooner", ratio), *size)


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

"""Selection: how many blocks, which ones, what a coarse search misses, and when to decline."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.speed import beside_comprexit
from experiments.system import paper
from experiments.system.cells import PEERS, Cell, paper_cell
from experiments.system.models import full_bank, guided_model, main_model
from experiments.system.scales import Scale
from experiments.system.search import BANK_SIZES, BEST, DISTRACTORS
from experiments.system.tables import Number, entries, mean_of, ours, scores, study
from sedem.selecting import select as search


@study()
def selection_budget(scale: Scale) -> Iterator[Number]:
    """Effect of the selection budget K (Table k_sweep)."""
    metrics = ("em", "f1", "rouge_l")
    for key in ("hotpotqa", "2wiki"):
        for k in scale.budgets:
            cell = Cell(variant=main_model(scale), questions=key, k=k)
            where = {"dataset": paper.DATASETS[key], "k": k}
            printed = {m: paper.number("tab:k_sweep", m, **where) for m in metrics}
            yield from scores(f"K={k}", scale.sets[key].title, cell, metrics, printed)


@study()
def operating_points(scale: Scale) -> Iterator[Number]:
    """Operating points beside ComprExIT (Table comprexit_operating_points).

    If the full bank exceeds the decoder's positions, its best blocks are used as far as they fit.
    Times are as in Table comprexit_ttft.
    """
    for key in ("hotpotqa", "2wiki"):
        for row in paper.rows("tab:comprexit_operating_points"):
            if row["dataset"] != paper.DATASETS[key]:
                continue
            method = row["method"]
            label, cell = f"{scale.sets[key].title}: {method}", None
            if method == "SeDeM learned-K=2":
                cell = Cell(variant=main_model(scale), questions=key, k=2)
            elif method == "SeDeM full-bank":
                model, limit = full_bank(scale, key), scale.costly_limit
                cell = Cell(variant=model, questions=key, k="all", limit=limit)
            else:
                cell = paper_cell(scale, method, main_model(scale), key)
            yield from scores(label, "", cell, ("f1", "em"), row)
            yield beside_comprexit(scale, label, "TTFT, ms", method, row["ttft_ms"])


@study()
def decoder_length(scale: Scale) -> Iterator[Number]:
    """Decoder-side positions by selection budget (Table length_matched_controls).

    The paper's blocks are the paragraphs of the multi-hop sets. Its 64 of QASPER are 8,192 tokens
    in windows of 128; the mean paper has 41 such windows, and the longest 272.
    """
    for key in ("hotpotqa", "2wiki", "musique", "qasper"):
        row, title = paper.row("tab:length_matched_controls", key), scale.sets[key].title
        counted = Cell("lengths", variant=main_model(scale), questions=key)
        for kind in ("paragraphs", "windows"):
            printed = row["blocks"] if (kind == "windows") == (key == "qasper") else None
            yield Number(title, f"blocks, {kind}", printed, counted, f"blocks.{kind}")
        # The paper's low and high K, if the scale's decoder has room.
        for level in ("low", "high"):
            k, length = row[f"k_{level}"], float(row[f"len_{level}"])
            fits = scale.name == "paper" or k <= max(scale.budgets)
            cell = Cell(variant=main_model(scale), questions=key, k=k) if fits else None
            yield Number(f"{title}, K={k}", "positions", length, cell, "conditioning", 0)


@study()
def effective_rank(scale: Scale) -> Iterator[Number]:
    """Normalized effective rank of memory slots (Table normalized_erank)."""
    table, column = "tab:normalized_erank", "normalized_effective_rank_pct"
    for method in ("ICAE", "SeDeM"):
        sets = []
        for key in ("hotpotqa", "qasper", "musique", "2wiki"):
            printed = paper.row(table, key, method=method)[column]
            cell = Cell("rank", PEERS[method], main_model(scale), questions=key, limit=100)
            title = scale.sets[key].title
            sets.append(Number(title, f"{method}, %", printed, cell, "effective_rank"))
        yield from sets
        printed = paper.number(table, column, dataset="Average", method=method)
        yield mean_of("Average", f"{method}, %", printed, sets)


def made_banks(scale: Scale) -> Cell:
    """The measurement of banks whose blocks are made from real ones."""
    limit = scale.limit if scale.stand_in else 20
    return Cell("large-banks", questions=scale.ablation[0], limit=limit)


@ours(
    about=f"{{questions[limit]}} questions, {{real_blocks:,}} real blocks. Candidates are "
    f"{search.CANDIDATES} blocks by codes and {search.WORD_CANDIDATES} by words, or "
    f"{search.CANDIDATES_ALONE:,} by codes for states alone."
)
def large_banks(scale: Scale) -> Iterator[Number]:
    """What candidates miss in large banks.

    Most blocks are made from real ones.
    """
    columns = []
    for how, title in (("both", "states and words"), ("states", "states")):
        columns += [
            (f"{title}: % with evidence among the exact best {BEST}", f"{how}.evidence"),
            (f"{title}: % of it among candidates", f"{how}.evidence_held"),
            (f"{title}: % of the best {BEST} among candidates", f"{how}.best_held"),
        ]
    for size in BANK_SIZES[scale.size]:
        yield from entries(f"{size:,} blocks", made_banks(scale), *columns, at=f"sizes.{size}")


@ours(
    about="{questions[limit]} questions, one after the other. Reading and scoring "
    f"{search.CANDIDATES + search.WORD_CANDIDATES} candidates takes "
    "{candidates[int8][cpu_ms]:,.0f} CPU ms at any N with keys stored as int8, and "
    "{candidates[memory][cpu_ms]:,.0f} without stored keys. The search by candidates has all "
    "three, with keys stored as int8. Load of the machine: {load_average:.1f}.",
)
def selecting(scale: Scale) -> Iterator[Number]:
    """What selecting costs by the number of blocks."""
    columns = (
        ("every block, CPU ms", "cpu_ms_per_question.exact", 0),
        ("codes, CPU ms", "cpu_ms_per_question.codes"),
        ("words, CPU ms", "cpu_ms_per_question.words"),
        ("candidates", "candidates", 0),
        ("search by candidates, ms", "search_ms", 0),
        ("codes, MB", "codes_mb"),
        ("memory of searching, MB", "memory_mb", 0),
    )
    for size in BANK_SIZES[scale.size]:
        yield from entries(f"N={size}", made_banks(scale), *columns, at=f"sizes.{size}")


@ours()
def confidence(scale: Scale) -> Iterator[Number]:
    """How well scores tell whether the evidence is in the documents."""
    columns = (
        ("AUROC", "auroc", 3),
        ("calibration error", "calibration_error", 3),
        ("% declined, evidence there", "declined_with_evidence"),
        ("% declined, evidence missing", "declined_without_evidence"),
    )
    limit = scale.limit if scale.stand_in else None
    questions = "squad-10" if "squad-10" in scale.sets else scale.ablation[0]
    cell = Cell("confidence", variant=guided_model(scale), questions=questions, limit=limit)
    for count in (1 + distractors for distractors in DISTRACTORS):
        yield from entries(f"{count} paragraphs", cell, *columns, at=f"by_paragraphs.{count}")

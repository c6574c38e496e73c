"""Selection: how many blocks, which ones, what a coarse search misses, and when to decline."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.speed import beside_comprexit
from experiments.system import paper
from experiments.system.cells import PEERS, Cell, paper_cell
from experiments.system.models import full_bank, guided_model, main_model
from experiments.system.scales import Scale
from experiments.system.search import BANK_SIZES, BEST, COUNTS, DISTRACTORS
from experiments.system.tables import Number, entries, mean_of, scores, study
from sedem.selecting import select as search


@study("Effect of the selection budget K (Table k_sweep)", drawn=("F1",))
def selection_budget(scale: Scale) -> Iterator[Number]:
    """EM, F1 and ROUGE-L by K, on HotpotQA and 2Wiki."""
    metrics = ("em", "f1", "rouge_l")
    for key in ("hotpotqa", "2wiki"):
        for k in scale.budgets:
            cell = Cell(variant=main_model(scale), questions=key, k=k)
            where = {"dataset": paper.DATASETS[key], "k": k}
            printed = {m: paper.number("tab:k_sweep", m, **where) for m in metrics}
            yield from scores(f"K={k}", scale.sets[key].title, cell, metrics, printed)


@study(
    "Operating points beside ComprExIT (Table comprexit_operating_points)",
    "If the full bank exceeds the decoder's positions, its best blocks are used as far as they "
    "fit. Times are as in Table comprexit_ttft.",
)
def operating_points(scale: Scale) -> Iterator[Number]:
    """F1, EM and time to the first token, with few blocks or all of them."""
    budgets: dict[str, int | str] = {"SeDeM learned-K=2": 2, "SeDeM full-bank": "all"}
    variant = main_model(scale)
    for key in ("hotpotqa", "2wiki"):
        for row in paper.rows("tab:comprexit_operating_points"):
            method = row["method"]
            if row["dataset"] != paper.DATASETS[key]:
                continue
            label = f"{scale.sets[key].title}: {method}"
            if method in budgets:
                k = budgets[method]
                limit = scale.costly_limit if k == "all" else None
                model = full_bank(scale, key) if k == "all" else variant
                cell: Cell | None = Cell(variant=model, questions=key, k=k, limit=limit)
            else:
                cell = paper_cell(scale, method, variant, key)
            yield from scores(label, "", cell, ("f1", "em"), row)
            yield beside_comprexit(scale, label, "TTFT, ms", method, row["ttft_ms"])


@study(
    "Decoder-side positions by selection budget (Table length_matched_controls)",
    "The paper's blocks are the paragraphs of the multi-hop sets. Its 64 of QASPER are 8,192 "
    "tokens in windows of 128; the mean paper has 41 such windows, and the longest 272.",
)
def decoder_length(scale: Scale) -> Iterator[Number]:
    """Positions at the paper's low and high K of each set, if the scale's decoder has room."""
    for key in ("hotpotqa", "2wiki", "musique", "qasper"):
        row = paper.row("tab:length_matched_controls", key)
        counted = Cell("lengths", variant=main_model(scale), questions=key)
        for kind in ("paragraphs", "windows"):
            printed = row["blocks"] if (kind == "windows") == (key == "qasper") else None
            title, place = scale.sets[key].title, f"blocks.{kind}"
            yield Number(title, f"blocks, {kind}", printed, counted, place, digits=1)
        for level in ("low", "high"):
            k, length = row[f"k_{level}"], float(row[f"len_{level}"])
            label = f"{scale.sets[key].title}, K={k}"
            fits = scale.name == "paper" or k <= max(scale.budgets)
            cell = Cell(variant=main_model(scale), questions=key, k=k) if fits else None
            yield Number(label, "positions", length, cell, "conditioning", digits=0)


@study("Normalized effective rank of memory slots (Table normalized_erank)")
def effective_rank(scale: Scale) -> Iterator[Number]:
    """Percentage of the number of slots, for ICAE and SeDeM."""
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


@study(
    "What candidates miss in large banks",
    "The paper gives no numbers. Most blocks are made from real ones.",
    about=f"{{questions[limit]}} questions, {{real_blocks:,}} real blocks. Candidates are "
    f"{search.CANDIDATES} blocks by codes and {search.WORD_CANDIDATES} by words, or "
    f"{search.CANDIDATES_ALONE:,} by codes for states alone.",
    drawn=("%",),
)
def large_banks(scale: Scale) -> Iterator[Number]:
    """What candidates hold of what an exact search finds, for each bank size."""
    for size in BANK_SIZES[scale.size]:
        columns = []
        for how, title in (("both", "states and words"), ("states", "states")):
            place = f"sizes.{size}.{how}"
            columns += [
                (f"{title}: % with evidence among the exact best {BEST}", f"{place}.evidence"),
                (f"{title}: % of it among candidates", f"{place}.evidence_held"),
                (f"{title}: % of the best {BEST} among candidates", f"{place}.best_held"),
            ]
        yield from entries(f"{size:,} blocks", made_banks(scale), *columns)


@study(
    "What codes alone find in large banks",
    "The paper gives no numbers. Most blocks are made from real ones.",
    drawn=("%",),
)
def codes_alone(scale: Scale) -> Iterator[Number]:
    """Percentage of the exact best blocks by states among the best C by codes."""
    for size in BANK_SIZES[scale.size]:
        columns = [(f"among {c:,}", f"sizes.{size}.best_by_codes.{c}") for c in COUNTS]
        yield from entries(f"{size:,} blocks", made_banks(scale), *columns)


@study(
    "What selecting costs by the number of blocks",
    "The paper gives no numbers of this kind.",
    about="{questions[limit]} questions, one after the other. Reading and scoring "
    f"{search.CANDIDATES + search.WORD_CANDIDATES} candidates takes "
    "{candidates[int8][cpu_ms]:,.0f} CPU ms at any N with keys stored as int8, and "
    "{candidates[memory][cpu_ms]:,.0f} without stored keys. The search by candidates has all "
    "three, with keys stored as int8. Load of the machine: {load_average:.1f}.",
    drawn=("every", "search"),
)
def selecting(scale: Scale) -> Iterator[Number]:
    """Time per question by the number of blocks N, and memory."""
    for size in BANK_SIZES[scale.size]:
        place = f"sizes.{size}"
        yield from entries(
            f"N={size}",
            made_banks(scale),
            ("every block, CPU ms", f"{place}.cpu_ms_per_question.exact", 0),
            ("codes, CPU ms", f"{place}.cpu_ms_per_question.codes"),
            ("words, CPU ms", f"{place}.cpu_ms_per_question.words"),
            ("candidates", f"{place}.candidates", 0),
            ("search by candidates, ms", f"{place}.search_ms", 0),
            ("codes, MB", f"{place}.codes_mb"),
            ("memory of searching, MB", f"{place}.memory_mb", 0),
        )


@study(
    "How well scores tell whether the evidence is in the documents",
    "The paper gives no numbers.",
    drawn=("AUROC",),
)
def confidence(scale: Scale) -> Iterator[Number]:
    """Metrics of the confidence by the number of paragraphs per question."""
    limit = scale.limit if scale.stand_in else None
    questions = "squad-10" if "squad-10" in scale.sets else scale.ablation[0]
    cell = Cell("confidence", variant=guided_model(scale), questions=questions, limit=limit)
    for paragraphs in (1 + distractors for distractors in DISTRACTORS):
        place = f"by_paragraphs.{paragraphs}"
        yield from entries(
            f"{paragraphs} paragraphs",
            cell,
            ("AUROC", f"{place}.auroc", 3),
            ("AUROC of the best score alone", f"{place}.auroc_of_one_feature.best", 3),
            ("AUROC of its lead alone", f"{place}.auroc_of_one_feature.lead", 3),
            ("calibration error", f"{place}.calibration_error", 3),
            ("% declined, evidence there", f"{place}.declined_with_evidence"),
            ("% declined, evidence missing", f"{place}.declined_without_evidence"),
        )

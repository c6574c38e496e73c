"""Costs that do not depend on a machine: parameters, FLOPs, bytes, and training budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system import paper
from experiments.system.bench import PEER_CONTEXTS
from experiments.system.cells import PEERS, SELECTING, Cell, answer_cell
from experiments.system.models import equal_budget, main_model
from experiments.system.scales import Scale
from experiments.system.tables import Number, entries, ratio_of, study
from sedem_lab.baselines.registry import METHODS, TRAINED


@study(
    "The sets (Tables datasets and dataset_appendix_details)",
    "Lengths of a question's documents in tokens of the backbone, over both splits.",
)
def data_sets(scale: Scale) -> Iterator[Number]:
    """Mean and maximum length of a context, and questions to train on and to evaluate on."""
    for key in ("hotpotqa", "2wiki", "musique", "qasper"):
        cell = Cell("lengths", variant=main_model(scale), questions=key)
        lengths = paper.row("tab:datasets", key)
        counts = paper.row("tab:dataset_appendix_details", key)
        for column, printed, metric in (
            ("mean length", lengths["avg_len_tokens"], "tokens.mean"),
            ("maximum length", lengths["max_len_tokens"], "tokens.max"),
            ("training questions", counts["train"], "questions.train"),
            ("validation questions", counts["val"], "questions.validation"),
        ):
            yield Number(scale.sets[key].title, column, printed, cell, metric, digits=0)


@study(
    "Parameters by part (Table ours_inference_params)",
    "The paper's compressor has 6d to 7d parameters more than its equation; sedem follows the "
    "equation.",
)
def parameters(scale: Scale) -> Iterator[Number]:
    """Millions, counted on the meta device; the same at every scale."""
    table = "tab:ours_inference_params"
    for backbone, short in (("llama-3.2-1b", "1b"), ("llama-3.2-3b", "3b")):
        cell, column = Cell("cost", backbone=backbone), f"{backbone}, M"
        for row in paper.rows(table):
            metric = f"parameters.{row['module'].lower()}"
            yield Number(row["module"], column, row[f"{short}_m"], cell, metric, 1e6, 2)
        total = paper.number(table, f"{short}_pct", module="Total")
        label = "Total, % of the backbone"
        yield Number(label, column, total, cell, "parameters.percent", 1.0, 2)


def _methods(table: str) -> Iterator[tuple[str, Cell, dict[str, Any]]]:
    """Label, cell and printed numbers of every row of a table of costs."""
    for row in paper.rows(table):
        backbone = paper.backbone_of(row)
        cell = Cell("cost", PEERS[row["method"]], backbone=backbone)
        yield f"{backbone}: {row['method']}", cell, row


@study("Parameters added at inference, without adapters (Table inference_parameter_overhead)")
def parameter_overhead(scale: Scale) -> Iterator[Number]:
    """Millions, and percentage of the frozen backbone; the same at every scale."""
    for label, cell, row in _methods("tab:inference_parameter_overhead"):
        digits = 3 if row["added_params_m"] < 0.1 else 2
        for column, printed, ours, per in (
            ("added, M", "added_params_m", "without_lora", 1e6),
            ("% of the backbone", "added_over_backbone_pct", "percent_without_lora", 1.0),
        ):
            metric = f"parameters.{ours}"
            yield Number(label, column, row[printed], cell, metric, per, digits)


@study(
    "FLOPs of one query: 2,048 context, 30 question and 16 answer tokens "
    "(Table inference_flops_query)",
    "Counted as in the paper, 1,536 tokens run through 14 layers and 128 states through every "
    "layer of the decoder. All pairs of tokens count, and no decompressor. The paper states 2,048 "
    "context tokens, but neither layers nor K.",
)
def flops(scale: Scale) -> Iterator[Number]:
    """GFLOPs to encode and to decode, by method and backbone; the same at every scale.

    SeDeM's stages are finer than the paper's; its cell also has the sums that match the paper's.
    """
    for label, cell, row in _methods("tab:inference_flops_query"):
        metrics = {label: "flops.{}"}
        if cell.method == "sedem":
            metrics = {
                label: "paper.flops.stages.{}.ours",
                f"{label}, counted as in the paper": "paper.flops.stages.{}.convention",
            }
        for name, metric in metrics.items():
            for stage in ("encode", "decode", "total"):
                printed, column = row[f"{stage}_gflops"], f"{stage}, GFLOPs"
                yield Number(name, column, printed, cell, metric.format(stage), 1e9)


RECALL = "recall@2"


@study(
    "What every method keeps, reads and takes",
    "The paper gives no numbers of all methods side by side.",
)
def method_costs(scale: Scale) -> Iterator[Number]:
    """The answers to HotpotQA, and the times of the bench."""
    key = "hotpotqa"
    variant = main_model(scale)
    times = Cell("peers", variant=variant) if scale.name == "nano" else None
    for method in METHODS:
        budget = {"k": scale.sets[key].k} if method == "sedem" else {}
        yield from _answers(method, answer_cell(scale, variant, key, method, **budget))
        for clock in ("online", "prebuilt") if times else ():
            column = f"{clock} TTFT, times sooner than full context"
            place = f"{PEER_CONTEXTS[scale.name][0]}.{clock}_ttft_ms.median"
            both = [
                Number("", "", cell=times, metric=f"results.{name}.{place}")
                for name in ("full-context", method)
            ]
            yield ratio_of(method, column, None, both, digits=1)
    if scale.name != "paper":
        equal = Cell(variant=equal_budget(scale), questions=key, limit=scale.costly_limit)
        yield from _answers("sedem, trained as little as the others", equal)


def _answers(label: str, cell: Cell | None) -> list[Number]:
    """What a method's answers cost: only some methods rank documents, and only some train."""
    columns = [
        ("recall@2", RECALL, 1),
        ("bytes a token", "bytes_per_token", 0),
        ("positions", "conditioning", 0),
        ("trained parameters, M", "training.trained_parameters", 2, 1e6),
        ("training tokens, thousands", "training.all_tokens_seen", 0, 1e3),
    ]
    if cell is not None:
        shipped = cell.method == "sedem" and cell.variant is not None and cell.variant.main
        untrained = cell.method not in (*TRAINED, "sedem")
        if cell.method not in (*SELECTING, "longllmlingua"):
            columns = [column for column in columns if column[1] != RECALL]
        if shipped or untrained:
            columns = [column for column in columns if not column[1].startswith("training")]
    return entries(label, cell, *columns)

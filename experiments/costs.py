"""Costs that do not depend on a machine: parameters, FLOPs, bytes, and training budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system import paper
from experiments.system.cells import PEERS, Cell
from experiments.system.models import main_model
from experiments.system.scales import Scale
from experiments.system.tables import Number, study


@study()
def data_sets(scale: Scale) -> Iterator[Number]:
    """The sets (Tables datasets and dataset_appendix_details).

    Lengths of a question's documents in tokens of the backbone, over both splits.
    """
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
            yield Number(scale.sets[key].title, column, printed, cell, metric, 0)


@study()
def parameters(scale: Scale) -> Iterator[Number]:
    """Parameters by part (Table ours_inference_params).

    The paper's compressor has 6d to 7d parameters more than its equation; sedem follows the
    equation.
    """
    # Counted on the meta device; the same at every scale.
    table = "tab:ours_inference_params"
    for backbone, short in (("llama-3.2-1b", "1b"), ("llama-3.2-3b", "3b")):
        cell, column = Cell("cost", backbone=backbone), f"{backbone}, M"
        for row in paper.rows(table):
            metric = f"parameters.{row['module'].lower()}"
            yield Number(row["module"], column, row[f"{short}_m"], cell, metric, 2, 1e6)
        total = paper.number(table, f"{short}_pct", module="Total")
        yield Number("Total, % of the backbone", column, total, cell, "parameters.percent", 2)


def _methods(table: str) -> Iterator[tuple[str, Cell, dict[str, Any]]]:
    """Label, cell and printed numbers of every row of a table of costs."""
    for row in paper.rows(table):
        backbone = paper.backbone_of(row)
        cell = Cell("cost", PEERS[row["method"]], backbone=backbone)
        yield f"{backbone}: {row['method']}", cell, row


@study()
def parameter_overhead(scale: Scale) -> Iterator[Number]:
    """Parameters added at inference, without adapters (Table inference_parameter_overhead)."""
    for label, cell, row in _methods("tab:inference_parameter_overhead"):
        added, digits = row["added_params_m"], 3 if row["added_params_m"] < 0.1 else 2
        yield Number(label, "added, M", added, cell, "parameters.without_lora", digits, 1e6)
        printed, metric = row["added_over_backbone_pct"], "parameters.percent_without_lora"
        yield Number(label, "% of the backbone", printed, cell, metric, digits)


@study()
def flops(scale: Scale) -> Iterator[Number]:
    """FLOPs of one query: 2,048 context, 30 question and 16 answer tokens
    (Table inference_flops_query).

    Counted as in the paper, 1,536 tokens run through 14 layers and 128 states through every layer
    of the decoder. All pairs of tokens count, and no decompressor. The paper states 2,048 context
    tokens, but neither layers nor K.
    """
    # SeDeM's stages are finer than the paper's; its cell also has the sums that match the paper's.
    for label, cell, row in _methods("tab:inference_flops_query"):
        metrics = {label: "flops.{}"}
        if cell.method == "sedem":
            as_paper, stages = f"{label}, counted as in the paper", "paper.flops.stages"
            metrics = {label: f"{stages}.{{}}.ours", as_paper: f"{stages}.{{}}.convention"}
        for name, metric in metrics.items():
            for stage in ("encode", "decode", "total"):
                printed, column = row[f"{stage}_gflops"], f"{stage}, GFLOPs"
                yield Number(name, column, printed, cell, metric.format(stage), 1, 1e9)

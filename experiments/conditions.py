"""Blocks read as memory, as text, or as both, from one bank. The paper has no such table."""

from __future__ import annotations

from pathlib import Path

from experiments.guided_training import SHORT
from experiments.system import figures
from experiments.system.cells import Cell
from experiments.system.condition_times import BUDGETS
from experiments.system.forms import FORMS, PAPER_FORM
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import Variant
from sedem.pictures import pyplot_module, save

MIXED, ALONE = "guided-conditions", "guided-text"
ROWS = {
    "memory": (MIXED, "memory"),
    "text": (MIXED, "text"),
    "the best as text, the others as memory": (MIXED, "both"),
    "text, trained on text alone": (ALONE, "text"),
}
"""The model and the form in which it reads blocks, by label."""
TIMED = 10


def model(scale: Scale, name: str) -> Variant:
    """The model trained on all three conditions, or on text alone with as many steps."""
    short = SHORT if scale.name == "nano" else ()
    if name == MIXED:
        return Variant(name, stage2=short, further=("stage2-conditions",))
    joint = tuple(FORMS[PAPER_FORM].items())
    return Variant(name, stage2=short, further=("stage2-text",), start=joint)


def answers(scale: Scale, name: str, condition: str, questions: str) -> Cell:
    """Answers of one of the two models in one condition, at every K."""
    nano = scale.name == "nano"
    return Cell(
        "budgets",
        variant=model(scale, name),
        questions=questions,
        condition=condition,
        limit=100 if nano else scale.limit,
        max_new_tokens=32 if nano else None,
        dtype="float32",
    )


def times(scale: Scale) -> Cell:
    """Times to the first token in all three conditions."""
    limit = TIMED if scale.name == "nano" else scale.limit
    key = scale.ablation[0]
    return Cell(
        "condition-times", variant=model(scale, MIXED), questions=key, limit=limit, dtype="float32"
    )


def numbers(scale: Scale) -> list[Number]:
    """Score, time to the first token and stored bytes, by condition and K."""
    result = []
    for label, (name, condition) in ROWS.items():
        for k in BUDGETS:
            row = f"{label}, K={k}"
            for key in scale.ablation:
                metric, title = ("em", "EM") if key == "exact-facts" else ("f1", "F1")
                column = f"{scale.sets[key].title} {title}"
                cell = answers(scale, name, condition, key)
                result.append(Number(row, column, None, cell, f"budgets.{k}.{metric}"))
            place = f"times.{condition}.{k}"
            result.append(Number(row, "TTFT, ms", None, times(scale), place))
            place = f"bytes.{condition}"
            result.append(Number(row, "stored bytes a token", None, times(scale), place, digits=0))
    return result


def draw(scale: Scale, path: Path) -> None:
    """Draw scores against times to the first token: one curve over K per condition."""
    pyplot = pyplot_module()
    shown = numbers(scale)
    figure, axes = pyplot.subplots(
        1, len(scale.ablation), figsize=(1 + 4.6 * len(scale.ablation), 4.2), squeeze=False
    )
    for axis, key in zip(axes.flat, scale.ablation, strict=True):
        (column,) = {n.column for n in shown if n.column.startswith(scale.sets[key].title)}
        for colour, label in zip(figures.SERIES, ROWS, strict=False):
            found = {(n.row, n.column): n.ours(scale) for n in shown}
            rows = [f"{label}, K={k}" for k in BUDGETS]
            points = [
                (k, time[0], *score)
                for k, row in zip(BUDGETS, rows, strict=True)
                if (time := found[row, "TTFT, ms"]) and (score := found[row, column])
            ]
            if not points:
                continue
            size = found[rows[0], "stored bytes a token"]
            legend = f"{label} ({size[0]:,.0f} bytes a token)" if size else label
            xs, ys = [x for _, x, _, _ in points], [y for _, _, y, _ in points]
            axis.plot(xs, ys, "o-", color=colour, alpha=0.8, label=legend)
            for _, x, _, interval in points:
                if interval:
                    axis.plot([x, x], interval, color=colour, alpha=0.25)
            # Label only the ends of a curve; more labels would overlap.
            for k, x, y, _ in points[:1] + points[1:][-1:]:
                axis.annotate(
                    f"K={k}", (x, y), (4, 4), textcoords="offset points", fontsize=7, color=colour
                )
        axis.set_title(column, fontsize=9)
        axis.set_xlabel("time to the first token, prebuilt bank, ms", fontsize=8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"{STUDY.title}, {scale.name} scale, 95 %", fontsize=10)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    save(figure, path)


STUDY = Study(
    "conditions",
    "The same blocks as memory, as text, or as both",
    numbers,
    "The paper gives no numbers. Answers have at most 32 new tokens.",
    draw=draw,
)

if __name__ == "__main__":
    command(STUDY)()

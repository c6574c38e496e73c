"""Training: guided attention, without labels, on equal budgets, and how the baselines learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments import quality
from experiments.system import figures
from experiments.system.answers import BUDGETS
from experiments.system.cells import Cell, answer_cell
from experiments.system.learning import rate_name
from experiments.system.models import (
    ADAPTED_STEPS,
    Variant,
    equal_budget,
    further_trained,
    guided_model,
    main_model,
)
from experiments.system.scales import Scale, recipe_exists
from experiments.system.tables import Number, entries, scores, study
from sedem_lab.baselines.registry import TRAINED


@study(
    "Stage 2 with guided attention: answer losses by K on held-out questions",
    "The paper gives no numbers. The blocks are the selector's K best.",
)
def guided_training(scale: Scale) -> Iterator[Number]:
    """Losses of the main model in guided form, and of ways to train it further."""
    labels, new = ("losses.select=0", "losses.conditioning=selected"), ("new_selector=shared",)
    rows = {
        "before training": main_model(scale),
        "stage 2, guided": further_trained(scale, "guided-base"),
        "a new selector, with evidence labels": further_trained(
            scale, "guided-new-selector", stage2=new
        ),
        "a new selector, from answers alone": further_trained(
            scale, "guided-unlabelled", stage2=(*labels, *new)
        ),
    }
    return _held_out(scale, rows)


@study(
    "Adapted to documents without labels: answer losses by K on held-out questions",
    "The paper gives no numbers. The main model has had many times the training of the others.",
)
def adapt(scale: Scale) -> Iterator[Number]:
    """The untrained backbone, adapted, trained as long with labels, and the main model.

    The study is about small backbones, so the paper's scale has none of it.
    """
    if scale.name not in ADAPTED_STEPS:
        return iter(())
    rows = {
        "untrained (sedem init)": Variant("adapt-untrained", adapted="untrained"),
        "adapted without labels": Variant("adapt-adapted", adapted="without labels"),
        "the same, stage 2 with labels": Variant("adapt-labelled", adapted="with labels"),
        "the main model, trained with labels": guided_model(scale),
    }
    return _held_out(scale, rows)


def _held_out(scale: Scale, rows: dict[str, Variant]) -> Iterator[Number]:
    """Losses of the reference answer by K, and recall of the evidence, on held-out questions."""
    for label, variant in rows.items():
        for key, questions in scale.held_out.items():
            title = questions.title
            columns = [
                (f"{title}, loss at K={k}", f"budgets.{k}", 3) for k in BUDGETS if k != "all"
            ]
            columns += [(f"{title}, recall@{k}", f"recall.{k}", 1) for k in (1, 2)]
            cell = Cell("losses", variant=variant, questions=key, form="guided", dtype="float32")
            yield from entries(label, cell, *columns)


@study(
    "Methods trained on equal windows and questions; SeDeM at several sizes of memory",
    "The paper gives no numbers. The guided model has had more training than the other rows.",
    drawn=("F1",),
)
def equal_training(scale: Scale) -> Iterator[Number]:
    """F1 on every set, and the stored bytes per token of the documents."""
    for key in quality.SETS:
        title = scale.sets[key].title
        for label, cell in _equally_trained(scale, key).items():
            if cell is not None:
                yield from scores(label, title, cell)
                yield from entries(label, cell, (f"{title}, bytes a token", "bytes_per_token"))


def _equally_trained(scale: Scale, questions: str) -> dict[str, Cell | None]:
    """The cells of a set by label; SeDeM's form a ladder of bytes."""
    guided = guided_model(scale)
    others = {
        "SeDeM, the guided model": answer_cell(scale, guided, questions),
        "frozen backbone": answer_cell(scale, guided, questions, "full-context"),
        **{name: answer_cell(scale, main_model(scale), questions, name) for name in TRAINED},
    }
    if scale.name == "paper":
        return others  # its recipes give every method the same supervision
    few = {"limit": scale.costly_limit}
    ladder = {
        f"SeDeM, C={c}{label}": answer_cell(
            scale, equal_budget(scale, c), questions, slots=slots, **few
        )
        for c in (4, 2, 1)
        for label, slots in {"": "", ", int8 slots": "int8"}.items()
    }
    return {**ladder, **others}


STAGES = {"text": ("training.before", "windows"), "questions": ("training", "questions")}
"""Training stages of baselines, with their key in a result and the unit of their examples."""


def _curves(scale: Scale) -> dict[str, Cell]:
    found = {method: answer_cell(scale, main_model(scale), "2wiki", method) for method in TRAINED}
    return {method: cell for method, cell in found.items() if cell is not None}


def losses(scale: Scale) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Examples seen and loss, by stage with unit and by method; what was not measured is left out.

    Each loss is the mean since the previous one.
    """
    text, questions = (f"{stage}, {unit}" for stage, (_, unit) in STAGES.items())
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {text: {}, questions: {}}
    for method, cell in _curves(scale).items():
        training: dict[str, Any] = (cell.read(scale) or {}).get("training") or {}
        for stage, run in ((text, training.get("before")), (questions, training)):
            if run:
                each = run["examples_seen"] / run["steps"]
                log = [entry for entry in run["log"] if "loss" in entry]
                points = [(round(each * entry["step"]), entry["loss"]) for entry in log]
                curves[stage][method] = points
    return curves


@study(
    "How the trained baselines learned",
    "The paper gives no numbers. The methods train on different losses, which do not compare. "
    "Only those on questions are alike: the loss of the same answers. RAG adds its selector's.",
    draw=lambda one, scale, path: figures.draw_training(losses(scale), [*TRAINED], path),
)
def training_curves(scale: Scale) -> Iterator[Number]:
    """Examples and minutes of each stage, by method."""
    for method, cell in _curves(scale).items():
        for stage, (place, unit) in STAGES.items():
            recipe = scale.baseline_recipe(method, "text", scale.backbones[0])
            if stage == "text" and not recipe_exists(recipe):
                continue
            seen = f"{unit} seen", f"{place}.examples_seen", 0
            minutes = f"minutes on {stage}", f"{place}.seconds", 1, 60
            yield from entries(method, cell, seen, minutes)


@study(
    "Learning rates of trained baselines",
    "The paper gives no numbers. A number is the method's own loss on held-out training data after "
    "a few steps, at one rate for all its parts. Only the numbers of a row compare. The recipe "
    "takes the rate of the lowest loss. If questions come after text, their rate is half of it by "
    "rule. Three rates are tried, and the next higher one while the highest is the best.",
)
def learning_rates(scale: Scale) -> Iterator[Number]:
    """Held-out loss after a few steps, by method and learning rate; the papers give theirs."""
    if not any(scale.search.values()):
        return
    for backbone in scale.backbones:
        for method in TRAINED:
            variant = main_model(scale, backbone)
            if answer_cell(scale, variant, "hotpotqa", method) is None:
                continue
            cell = Cell("search", method, variant)
            row = method if len(scale.backbones) == 1 else f"{backbone}: {method}"
            tried = (cell.read(scale) or {}).get("rates")
            rates = {f"{rate:g}": rate_name(rate) for rate in scale.rates}
            columns = [
                (column, f"rates.{name}.loss", 3)
                for column, name in rates.items()
                if tried is None or name in tried
            ]
            yield from entries(row, cell, *columns)

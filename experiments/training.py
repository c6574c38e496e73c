"""Training: with guided attention, on equal budgets, and how the baselines learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments import quality
from experiments.system import tables
from experiments.system.answers import BUDGETS
from experiments.system.cells import Cell, answer_cell
from experiments.system.learning import rate_name
from experiments.system.models import (
    equal_budget,
    further_trained,
    guided_model,
    main_model,
)
from experiments.system.scales import Scale, recipe_exists
from experiments.system.tables import Number, entries, ours, scores
from sedem_lab.baselines.registry import TRAINED


@ours()
def guided_training(scale: Scale) -> Iterator[Number]:
    """Stage 2 with guided attention: answer losses by K on held-out questions.

    The blocks are the selector's K best.
    """
    new = ("new_selector=shared",)
    unlabelled = ("losses.select=0", "losses.conditioning=selected", *new)
    labelled = further_trained(scale, "guided-new-selector", stage2=new)
    answers = further_trained(scale, "guided-unlabelled", stage2=unlabelled)
    rows = {
        "before training": main_model(scale),
        "stage 2, guided": further_trained(scale, "guided-base"),
        "a new selector, with evidence labels": labelled,
        "a new selector, from answers alone": answers,
    }
    for label, variant in rows.items():
        for key, questions in scale.held_out.items():
            title, budgets = questions.title, [k for k in BUDGETS if k != "all"]
            columns = [(f"{title}, loss at K={k}", f"budgets.{k}", 3) for k in budgets]
            columns += [(f"{title}, recall@{k}", f"recall.{k}", 1) for k in (1, 2)]
            cell = Cell("losses", variant=variant, questions=key, form="guided", dtype="float32")
            yield from entries(label, cell, *columns)


@ours()
def equal_training(scale: Scale) -> Iterator[Number]:
    """Methods trained on equal windows and questions; SeDeM at several sizes of memory.

    The guided model has had more training than the other rows.
    """
    main, guided = main_model(scale), guided_model(scale)
    for key in quality.SETS:
        rows: dict[str, Cell | None] = {}
        # A ladder of bytes; the paper's recipes give every method the same supervision.
        for c in (4, 2, 1) if scale.name != "paper" else ():
            for label, slots in {"": "", ", int8 slots": "int8"}.items():
                fields = {"slots": slots, "limit": scale.costly_limit}
                cell = answer_cell(scale, equal_budget(scale, c), key, **fields)
                rows[f"SeDeM, C={c}{label}"] = cell
        rows["SeDeM, the guided model"] = answer_cell(scale, guided, key)
        rows["frozen backbone"] = answer_cell(scale, guided, key, "full-context")
        rows |= {name: answer_cell(scale, main, key, name) for name in TRAINED}
        title = scale.sets[key].title
        for label, found in rows.items():
            if found is not None:
                yield from scores(label, title, found)
                yield from entries(label, found, (f"{title}, bytes a token", "bytes_per_token"))


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
                curves[stage][method] = [(round(each * one["step"]), one["loss"]) for one in log]
    return curves


@ours(draw=lambda scale, path: tables.draw_training(losses(scale), [*TRAINED], path))
def training_curves(scale: Scale) -> Iterator[Number]:
    """How the trained baselines learned.

    The methods train on different losses, which do not compare. Only those on questions are alike:
    the loss of the same answers. RAG adds its selector's.
    """
    for method, cell in _curves(scale).items():
        for stage, (place, unit) in STAGES.items():
            recipe = scale.baseline_recipe(method, "text", scale.backbones[0])
            if stage != "text" or recipe_exists(recipe):
                seen = f"{unit} seen", "examples_seen", 0
                minutes = f"minutes on {stage}", "seconds", 1, 60
                yield from entries(method, cell, seen, minutes, at=place)


@ours()
def learning_rates(scale: Scale) -> Iterator[Number]:
    """Learning rates of trained baselines.

    A number is the method's own loss on held-out training data after a few steps, at one rate for
    all its parts. Only the numbers of a row compare. The recipe takes the rate of the lowest loss.
    If questions come after text, their rate is half of it by rule. Three rates are tried, and the
    next higher one while the highest is the best.
    """
    # The papers give theirs.
    for backbone in scale.backbones if any(scale.search.values()) else ():
        for method in TRAINED:
            variant = main_model(scale, backbone)
            if answer_cell(scale, variant, "hotpotqa", method) is None:
                continue
            cell = Cell("search", method, variant)
            tried = (cell.read(scale) or {}).get("rates")
            rates = {f"{rate:g}": rate_name(rate) for rate in scale.rates}
            known = {name: at for name, at in rates.items() if tried is None or at in tried}
            columns = [(column, f"rates.{name}.loss", 3) for column, name in known.items()]
            row = method if len(scale.backbones) == 1 else f"{backbone}: {method}"
            yield from entries(row, cell, *columns)

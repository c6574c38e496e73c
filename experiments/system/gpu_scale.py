"""The gpu scale: backbone and sets of nano, and fifty times its budgets."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from experiments.system.scales import NANO, ROOT, RUNS, Questions, Scale
from experiments.system.variants import GUIDED, flow
from sedem.training.recipe import read_entries

NAME = "gpu"
RECIPES = ROOT / "recipes" / NANO.name
CANDIDATE = (*NANO.stages, *GUIDED)
"""The recipes that train a candidate for sedem-nano, each from the end of the one before."""

TIMES = {"text": 50.0, "questions": 50.0, "stage1": 20.0, "stage2": 8.0}
"""Examples of a run, as a multiple of those of its recipe: baselines, then the candidate's."""
BATCHES = {"text": 64, "questions": 32, "stage1": 128, "stage2": 64}
CHECKPOINTS = 25
"""Checkpoints of a run. One that is killed loses a twenty-fifth of its steps at most."""
WORKERS = 8
MOST_QUESTIONS = 1000
"""Questions of a set without a limit, of which a smaller budget takes its share."""


def gpu_scale(share: float = 1.0) -> Scale:
    """The scale.

    Args:
        share: of its steps and questions; a trial takes few.
    """
    mixture = read_entries(RECIPES / "stage2.yaml")["data"]["training"]
    budget = {stage: longer(RECIPES / f"icae-{stage}.yaml", stage, share) for stage in BASELINE}
    candidate = RUNS / NAME / CANDIDATE[-1] / "final"
    return replace(
        NANO,
        name=NAME,
        sets={key: _share_of(questions, share) for key, questions in NANO.sets.items()},
        shipped={NANO.backbones[0]: candidate},
        # A GPU asks every method the same questions.
        limit=None,
        costly_limit=None,
        slowest_limit=None,
        overrides=SETTINGS,
        stage1=_run_settings(budget["text"]),
        stage2=_run_settings(budget["questions"]),
        baselines={
            "text": (*SETTINGS, *budget["text"]),
            "questions": (*SETTINGS, *budget["questions"], f"data.training={flow(mixture)}"),
        },
    )


BASELINE = ("text", "questions")

SETTINGS = ("optimization.bf16=true", "optimization.backbone_dtype=bfloat16", "run.keep=1")
"""Overrides of every recipe on a GPU."""


def longer(recipe: Path, kind: str, share: float) -> tuple[str, ...]:
    """Overrides that give a recipe more examples, in larger batches.

    Args:
        recipe: the recipe; its share of warm-up steps stays.
        kind: a key of `TIMES`.
        share: of the larger budget.
    """
    own = {"accumulation": 1, "warmup": 0, **read_entries(recipe)["optimization"]}
    examples = own["steps"] * own["batch_size"] * own["accumulation"]
    steps = max(2, round(share * TIMES[kind] * examples / BATCHES[kind]))
    return (
        f"optimization.steps={steps}",
        f"optimization.batch_size={BATCHES[kind]}",
        "optimization.accumulation=1",
        "optimization.warmup=0",
        f"optimization.warmup_ratio={own['warmup'] / own['steps']}",
        f"run.save_every={max(1, steps // CHECKPOINTS)}",
        f"run.workers={min(WORKERS, os.cpu_count() or 1)}",
    )


def _run_settings(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(override for override in overrides if override.startswith("run."))


def _share_of(questions: Questions, share: float) -> Questions:
    if share >= 1:
        return questions
    return replace(questions, limit=max(2, round(share * (questions.limit or MOST_QUESTIONS))))


GPU = gpu_scale()

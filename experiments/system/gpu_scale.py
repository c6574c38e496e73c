"""The gpu scale: backbone and sets of nano, with fifty times its budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.system.scales import NANO, ROOT, RUNS, Questions, Scale
from experiments.system.step_processes import cores
from experiments.system.variants import GUIDED, flow
from sedem.training.recipe import read_entries

NAME = "gpu"
RECIPES = ROOT / "recipes" / NANO.name
CANDIDATE = (*NANO.stages, *GUIDED)
"""The recipes that train a candidate for sedem-nano, each starting from the previous one."""

TIMES = {"text": 50.0, "questions": 50.0, "stage1": 20.0, "stage2": 2.0}
"""Examples of a run, as a multiple of its recipe's: baselines, then the candidate.

The candidate has few questions: the CPU's budget was 2.6 passes over them, and with eight times as
many it would memorize them. So stage 2 has twice the examples, and twice the generated facts and
cloze questions (as far as the articles allow), while windows of text are many.
"""
BATCHES = {"text": 64, "questions": 64, "stage1": 256, "stage2": 64}
"""Larger than in the recipes, with the same learning rates: gradients are less noisy."""
CHECKPOINTS = 10
"""Number of checkpoints per run. A killed run loses at most a tenth of its steps."""
WORKERS = 4
MOST_QUESTIONS = 200
"""Maximum questions of a set, the same for every row of a study."""


def gpu_scale(share: float = 1.0, processes: int = 1) -> Scale:
    """Build the scale.

    Args:
        share: share of its steps and questions; a trial uses a small one.
        processes: runs that share the CPU.
    """
    mixture = read_entries(RECIPES / "stage2.yaml")["data"]["training"]
    budget = {
        stage: longer(RECIPES / f"icae-{stage}.yaml", stage, share, processes) for stage in BASELINE
    }
    candidate = RUNS / NAME / CANDIDATE[-1] / "final"
    return replace(
        NANO,
        name=NAME,
        sets={key: _share_of(questions, share) for key, questions in NANO.sets.items()},
        shipped={NANO.backbones[0]: candidate},
        # On a GPU, all methods get the same questions.
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


def longer(recipe: Path, kind: str, share: float, processes: int = 1) -> tuple[str, ...]:
    """Overrides that give a recipe more examples, in larger batches.

    Args:
        recipe: the recipe; its share of warm-up steps is kept.
        kind: a key of `TIMES`.
        share: share of the larger budget.
        processes: runs that share the CPU's cores, for the workers that load data.
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
        f"run.workers={min(WORKERS, max(1, cores() // processes))}",
    )


def candidate_overrides(name: str, share: float, processes: int = 1) -> tuple[str, ...]:
    """Overrides of a candidate recipe: longer, and in stage 2 with more generated questions.

    Args:
        name: one of `CANDIDATE`.
        share: share of the larger budget.
        processes: as in `longer`.
    """
    recipe, stage = RECIPES / f"{name}.yaml", name.split("-")[0]
    overrides = longer(recipe, stage, share, processes)
    if stage == "stage1":
        return overrides
    training = []
    for source in read_entries(recipe)["data"]["training"]:
        options = dict(source.get("options", {}))
        if "count" in options:
            options["count"] = max(1, round(share * TIMES[stage] * options["count"]))
        training.append({**source, "options": options} if options else source)
    # A GPU computes frozen states faster than a disk reads them.
    return (*overrides, f"data.training={flow(training)}", "data.cache_states=false")


def _run_settings(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(override for override in overrides if override.startswith("run."))


def _share_of(questions: Questions, share: float) -> Questions:
    most = min(MOST_QUESTIONS, questions.limit or MOST_QUESTIONS)
    return replace(questions, limit=max(2, round(min(1.0, share) * most)))


GPU = gpu_scale()

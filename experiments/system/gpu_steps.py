"""The steps of `experiments.gpu`: what each does, and the file that shows that it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.system.bench import bench_cells
from experiments.system.cells import Cell, results_of
from experiments.system.gpu_scale import CANDIDATE, NAME, RECIPES, gpu_scale, longer
from experiments.system.measures import measure
from experiments.system.scales import ROOT, SHIPPED, SMOKE, Scale, tiny_backbone
from experiments.system.study import find
from experiments.system.training import run_recipe
from experiments.system.variants import guided_model
from sedem.errors import ConfigError
from sedem.evaluation.results import write_json
from sedem.provenance import provenance

STUDY = "equal_training"


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        out: folder of runs, results and logs.
        data: folder that the data paths are relative to.
        budget: share of all steps and questions.
        smoke: a tiny random backbone instead of that of sedem-nano.
        device: "cuda" or "cpu".
    """

    out: Path
    data: Path
    budget: float
    smoke: bool
    device: str

    @property
    def scale(self) -> Scale:
        """The scale; the guided model is the candidate that it trains."""
        if not self.smoke:
            return gpu_scale(self.budget)
        candidate = SMOKE.runs / CANDIDATE[-1] / "final"
        return replace(SMOKE, shipped={SMOKE.backbones[0]: candidate})


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: for the list and the log.
        run: does it; a second call goes on where one that was killed stopped.
        made: the file that is there when it is done, relative to the folder of the work.
    """

    name: str
    run: Callable[[], None]
    made: Path


def steps(work: Work) -> list[Step]:
    """Every step in order: tests, parity and bench, the candidate, and the study."""
    scale = work.scale
    results = results_of(scale)
    tests, engines = results / "tests.json", results / "parity.json"
    checks = [
        Step("tests marked gpu", partial(_tests, work.smoke, tests), tests),
        Step("parity of engines", partial(_parity, work, engines), engines),
        *(_measured(cell, work, "performance") for cell in _bench(scale)),
    ]
    candidate = _candidate(work)
    study = [_measured(cell, work, STUDY) for cell in find(STUDY).cells(scale)]
    # A trial has no other model to check than the candidate.
    return [*candidate, *checks, *study] if work.smoke else [*checks, *candidate, *study]


def _candidate(work: Work) -> list[Step]:
    """The trainings of a candidate for sedem-nano."""
    scale, found = work.scale, []
    start: list[str] = []
    for name in CANDIDATE:
        folder, stage = scale.runs / name, name.split("-")[0]
        own = {"stage1": scale.stage1, "stage2": scale.stage2}[stage] if work.smoke else ()
        recipe = RECIPES / f"{name}.yaml"
        overrides = [*longer(recipe, stage, work.budget), *scale.overrides, *own, *start]
        overrides += [f"data_root={work.data}", f"run.output={folder}"]
        train = partial(_train, recipe, overrides, work.smoke)
        found.append(Step(f"train {name}", train, folder / "training.json"))
        start = [f"start_from={folder / 'final'}"]
    return found


def _train(recipe: Path, overrides: list[str], smoke: bool) -> None:
    if smoke:
        tiny_backbone()
    run_recipe(recipe, overrides)


def _tests(smoke: bool, result: Path) -> None:
    import pytest

    # In a trial, importing every test would take most of the time.
    folder = ROOT / "tests" / "parity" if smoke else ROOT / "tests"
    settings = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    code = pytest.main(["-m", "gpu", "-p", "no:cacheprovider", *settings, str(folder)])
    if code:
        raise ConfigError(f"the tests marked gpu ended with '{code.name}'")
    _write(result, provenance())


def _parity(work: Work, result: Path) -> None:
    import torch

    from experiments.system.parity import parity

    checkpoint = work.scale.shipped[SMOKE.backbones[0]] if work.smoke else SHIPPED
    _write(result, parity(checkpoint, torch.device(work.device)))


def _write(result: Path, entries: dict[str, Any]) -> None:
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, entries)


def _bench(scale: Scale) -> list[Cell]:
    """The bench at Llama shapes; that of the candidate where there is no time for them."""
    if scale.name == NAME:
        return [cell for kind in ("bench", "batches") for cell in bench_cells(scale, kind).values()]
    return [Cell("bench", variant=guided_model(scale))]


def _measured(cell: Cell, work: Work, study: str) -> Step:
    scale = work.scale
    made = results_of(scale) / study / f"{cell.name}.json"
    return Step(cell.name, partial(measure, cell, scale, work.data, study), made)

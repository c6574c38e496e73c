"""The steps of `experiments.gpu`: what each does, and the file that shows that it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments import more_memory
from experiments.system.bench import bench_cells
from experiments.system.cells import Cell
from experiments.system.gpu_scale import CANDIDATE, NAME, RECIPES, candidate_overrides, gpu_scale
from experiments.system.measures import measure, trained
from experiments.system.scales import NANO, ROOT, SHIPPED, SMOKE, Scale, tiny_backbone
from experiments.system.step_processes import Step, Work
from experiments.system.study import find
from experiments.system.training import budget, run_recipe
from experiments.system.variants import guided_model
from sedem.baselines.registry import TRAINED
from sedem.errors import ConfigError
from sedem.evaluation.results import write_json
from sedem.provenance import provenance

STUDY = "equal_training"
SWEEP = {"squad-10": 300, "exact-facts": 300, "hotpotqa": 300, "2wiki": 100, "musique": 40}
"""Number of questions for the candidate and the shipped model at every K, by set."""


def scale_of(work: Work) -> Scale:
    """The scale; its guided model is the candidate that it trains."""
    if not work.smoke:
        return gpu_scale(work.budget, work.processes)
    candidate = SMOKE.runs / CANDIDATE[-1] / "final"
    return replace(SMOKE, shipped={SMOKE.backbones[0]: candidate})


def steps(work: Work) -> list[Step]:
    """Every step, the most urgent first.

    Tests, parity and bench run alone on the GPU. Then come the candidate, the longest chain; its
    answers by K; and the study.
    """
    scale = scale_of(work)
    candidate = _candidate(work, scale)
    end = candidate[-1].made
    checks = _checks(work, scale, end)
    rest = [*_sweep(work, scale, end), *_study(work, scale, end)]
    # In a trial, the candidate is the only model to check.
    return [*candidate, *checks, *rest] if work.smoke else [*checks, *candidate, *rest]


# Checks


def _checks(work: Work, scale: Scale, candidate: Path) -> list[Step]:
    tests, engines = _results(scale) / "tests.json", _results(scale) / "parity.json"
    needs = (candidate,) if work.smoke else ()
    found = [
        Step("tests marked gpu", partial(_tests, work.smoke, tests), tests),
        Step("parity of engines", partial(_parity, work, engines), engines),
        *(_measured(cell, scale, work, "performance") for cell in _bench(scale)),
    ]
    return [replace(step, needs=needs, alone=True) for step in found]


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

    checkpoint = scale_of(work).shipped[SMOKE.backbones[0]] if work.smoke else SHIPPED
    _write(result, parity(checkpoint, torch.device(work.device)))


def _bench(scale: Scale) -> list[Cell]:
    """The bench at Llama shapes, or of the candidate if there is no time for them."""
    if scale.name == NAME:
        return [cell for kind in ("bench", "batches") for cell in bench_cells(scale, kind).values()]
    return [Cell("bench", variant=guided_model(scale))]


# The candidate


def _candidate(work: Work, scale: Scale) -> list[Step]:
    """The training runs of a candidate for sedem-nano; each starts from the previous one."""
    found: list[Step] = []
    start: list[str] = []
    for name in CANDIDATE:
        folder, stage = scale.runs / name, name.split("-")[0]
        own = {"stage1": scale.stage1, "stage2": scale.stage2}[stage] if work.smoke else ()
        overrides = [*candidate_overrides(name, work.budget, work.processes), *scale.overrides]
        overrides += [*own, *start, f"data_root={work.data}", f"run.output={folder}"]
        run = partial(_train, RECIPES / f"{name}.yaml", overrides, work.smoke)
        needs = tuple(step.made for step in found[-1:])
        found.append(Step(f"train {name}", run, folder / "training.json", needs))
        start = [f"start_from={folder / 'final'}"]
    return found


def _train(recipe: Path, overrides: list[str], smoke: bool) -> None:
    if smoke:
        tiny_backbone()
    run_recipe(recipe, overrides)


def _sweep(work: Work, scale: Scale, candidate: Path) -> list[Step]:
    """Answers by K of the candidate, and of the shipped model on this machine."""
    asked = SMOKE if work.smoke else NANO
    cells = [
        replace(more_memory.answers(asked, key), limit=max(2, round(work.budget * limit)))
        for key, limit in SWEEP.items()
        if key in scale.sets
    ]
    study = more_memory.STUDY.name
    found = [_measured(cell, scale, work, study, (candidate,)) for cell in cells]
    if work.smoke:
        return found
    for cell in cells:
        made = scale.runs / "shipped" / study / f"{cell.name}.json"
        run = partial(measure, cell, NANO, work.data, study, scale.runs / "shipped")
        found.append(Step(f"shipped {cell.name}", run, made))
    return found


# The study


def _study(work: Work, scale: Scale, candidate: Path) -> list[Step]:
    """Steps that train each model of the study once, and that measure its cells."""
    groups: dict[str, list[Cell]] = {}
    measured = []
    for cell in find(STUDY).cells(scale):
        assert cell.variant is not None
        own, needs = scale, ()
        if cell.method == "full-context" and scale.name == NAME:
            own = replace(scale, shipped=NANO.shipped)  # it has the same frozen backbone
        elif cell.method not in TRAINED and cell.variant.further:
            needs = (candidate,)
        else:
            name = f"{cell.method}{cell.setting}" if cell.method in TRAINED else cell.variant.name
            groups.setdefault(name, []).append(cell)
            needs = (_trained_mark(scale, name),)
        measured.append(_measured(cell, own, work, STUDY, needs))
    return [*(_training(name, group, scale, work) for name, group in groups.items()), *measured]


def _training(name: str, cells: Sequence[Cell], scale: Scale, work: Work) -> Step:
    mark = _trained_mark(scale, name)
    one_of_each = list({cell.variant: cell for cell in cells}.values())
    run = partial(_train_models, one_of_each, scale, work.data, mark)
    return Step(f"train {name}", run, mark)


def _train_models(cells: Sequence[Cell], scale: Scale, data: Path, mark: Path) -> None:
    folders = [trained(cell, scale, data) for cell in cells]
    _write(mark, {str(folder): budget(folder) for folder in folders})


def _trained_mark(scale: Scale, name: str) -> Path:
    return _results(scale) / "trained" / f"{name}.json"


def _measured(
    cell: Cell, scale: Scale, work: Work, study: str, needs: tuple[Path, ...] = ()
) -> Step:
    results = _results(scale)
    run = partial(measure, cell, scale, work.data, study, results)
    return Step(cell.name, run, results / study / f"{cell.name}.json", needs)


def _results(scale: Scale) -> Path:
    """The results folder, beside the runs."""
    return scale.runs / "results"


def _write(result: Path, entries: dict[str, Any]) -> None:
    result.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, entries)

"""An hour on one GPU, without network, in parts: `python -m experiments.gpu --data D --out O`.

It runs the tests marked gpu, compares the engines, times Llama's shapes on random weights, trains a
candidate for sedem-nano, and measures the study `equal_training` at fifty times the CPU's budget,
several steps at once. A call ends after some minutes; the same command resumes where it stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.quality import guided_answers, more_memory
from experiments.system import models
from experiments.system.bench import bench_cells
from experiments.system.cells import Cell, checkpoint_of
from experiments.system.measures import measure
from experiments.system.models import GUIDED, flow, guided_model, run_recipe
from experiments.system.scales import (
    NANO,
    ROOT,
    RUNS,
    SHIPPED,
    SMOKE,
    Questions,
    Scale,
    tiny_backbone,
)
from experiments.training import equal_training
from sedem import SeDeM
from sedem.baselines.registry import TRAINED
from sedem.data.documents import read_documents
from sedem.demo import DOCUMENTS, QUESTIONS
from sedem.engine.static import ENGINES
from sedem.errors import ConfigError
from sedem.evaluation.results import claim, write_json
from sedem.provenance import provenance
from sedem.training.recipe import read_entries

# The gpu scale: backbone and sets of nano, with fifty times its budgets

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
SETTINGS = ("optimization.bf16=true", "optimization.backbone_dtype=bfloat16", "run.keep=1")
"""Overrides of every recipe on a GPU."""
SWEEP = {"squad-10": 300, "exact-facts": 300, "hotpotqa": 300, "2wiki": 100, "musique": 40}
"""Number of questions for the candidate and the shipped model at every K, by set."""


def cores() -> int:
    """CPU cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


def gpu_scale(share: float = 1.0, processes: int = 1) -> Scale:
    """Build the scale, with a share of its steps and questions for so many runs at once."""

    def few(questions: Questions) -> Questions:
        most = min(MOST_QUESTIONS, questions.limit or MOST_QUESTIONS)
        return replace(questions, limit=max(2, round(min(1.0, share) * most)))

    mixture = read_entries(RECIPES / "stage2.yaml")["data"]["training"]
    longer_by = {
        stage: longer(RECIPES / f"icae-{stage}.yaml", stage, share, processes)
        for stage in ("text", "questions")
    }
    runs = {
        stage: tuple(override for override in overrides if override.startswith("run."))
        for stage, overrides in longer_by.items()
    }
    return replace(
        NANO,
        name=NAME,
        sets={key: few(questions) for key, questions in NANO.sets.items()},
        shipped={NANO.backbones[0]: RUNS / NAME / CANDIDATE[-1] / "final"},
        # On a GPU, all methods get the same questions.
        limit=None,
        costly_limit=None,
        slowest_limit=None,
        overrides=SETTINGS,
        stage1=runs["text"],
        stage2=runs["questions"],
        baselines={
            "text": (*SETTINGS, *longer_by["text"]),
            "questions": (*SETTINGS, *longer_by["questions"], f"data.training={flow(mixture)}"),
        },
    )


def longer(recipe: Path, kind: str, share: float, processes: int = 1) -> tuple[str, ...]:
    """Overrides that give a recipe more examples, in larger batches; warm-up keeps its share.

    Args:
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
    """Overrides of one of `CANDIDATE`: longer, and in stage 2 with more generated questions."""
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


GPU = gpu_scale()

# The steps


@dataclass(frozen=True)
class GpuWork:
    """The work to do.

    Attributes:
        out: folder of runs, results and logs.
        budget: share of all steps and questions.
        smoke: use a tiny random backbone instead of sedem-nano's.
        processes: number of steps that run at once.
    """

    out: Path
    data: Path
    budget: float
    smoke: bool
    device: str
    processes: int = 1

    @property
    def options(self) -> list[str]:
        """The same work as options of the command."""
        values = {**vars(self), "smoke": None}
        given = [(f"--{n}", str(value)) for n, value in values.items() if value is not None]
        return [*chain.from_iterable(given), *(["--smoke"] if self.smoke else [])]

    @property
    def scale(self) -> Scale:
        """The scale; its guided model is the candidate that it trains."""
        if not self.smoke:
            return gpu_scale(self.budget, self.processes)
        candidate = SMOKE.runs / CANDIDATE[-1] / "final"
        return replace(SMOKE, shipped={SMOKE.backbones[0]: candidate})


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        run: runs the step; a second call continues where a killed one stopped.
        made: the file that exists when the step is done, relative to the work folder.
        needs: files made by other steps that must exist before it starts.
        alone: nothing else may run at the same time, because it measures times.
    """

    name: str
    run: Callable[[], object]
    made: Path
    needs: tuple[Path, ...] = ()
    alone: bool = False

    def state(self, out: Path) -> str:
        """Whether it is "done", "missing", or "waiting" for a file that it needs."""
        if (out / self.made).is_file():
            return "done"
        return "missing" if all((out / need).is_file() for need in self.needs) else "waiting"


def steps(work: GpuWork) -> list[Step]:
    """Every step, the most urgent first, and each after those that it needs.

    Tests, parity and bench run alone on the GPU. Then come the candidate, the longest chain; its
    answers by K; and the study.
    """
    scale = work.scale
    candidate = _candidate(work, scale)
    end = candidate[-1].made
    checks = _checks(work, scale, end)
    rest = [*_sweep(work, scale, end), *_study(work, scale, end)]
    # In a trial, the candidate is the only model to check.
    return [*candidate, *checks, *rest] if work.smoke else [*checks, *candidate, *rest]


def _checks(work: GpuWork, scale: Scale, candidate: Path) -> list[Step]:
    """Tests, parity of engines, and the bench; they measure times, so each runs alone."""
    tests, engines = _results(scale) / "tests.json", _results(scale) / "parity.json"
    needs = (candidate,) if work.smoke else ()
    cells = [Cell("bench", variant=guided_model(scale))]  # there is no time for Llama's shapes
    if scale.name == NAME:
        cells = [c for kind in ("bench", "batches") for c in bench_cells(scale, kind).values()]
    found = [
        Step("tests marked gpu", partial(_tests, work.smoke, tests), tests),
        Step("parity of engines", partial(_parity, work, engines), engines),
        *(_measured(cell, scale, work, "performance") for cell in cells),
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


TOLERANCE = 1e-3
"""Maximum difference of two scores per token of the question, over which a score is summed.

Slots are stored in bfloat16. With another summation order, a value may round to a neighbour.
"""


def _parity(work: GpuWork, result: Path) -> None:
    """Compare scores and answers of the engines on a device with the reference on a CPU.

    Raises:
        ConfigError: an engine gives different answers or scores.
    """
    checkpoint = work.scale.shipped[SMOKE.backbones[0]] if work.smoke else SHIPPED
    device = torch.device(work.device)
    expected_scores, expected = _asked(checkpoint, torch.device("cpu"), "eager")
    left_out = ("auto",) if device.type == "cuda" else ("auto", "graphs")
    found: dict[str, dict[str, float]] = {}
    for engine in (engine for engine in ENGINES if engine not in left_out):
        scores, answers = _asked(checkpoint, device, engine)
        found[engine] = row = {
            "score_difference": (scores - expected_scores).abs().max().item(),
            "other_answers": sum(a != b for a, b in zip(answers, expected, strict=True)),
        }
        if row["other_answers"] or row["score_difference"] > TOLERANCE:
            raise ConfigError(
                f"engine '{engine}' on {device} differs from the reference on the CPU: {row}; it "
                "must not be used there until the cause is found"
            )
    _write(result, {"engines": found, "questions": len(QUESTIONS), **provenance(device)})


def _asked(checkpoint: Path, device: torch.device, engine: str) -> tuple[torch.Tensor, list[str]]:
    """Scores of every block for every question, per token of the question, and the answers."""
    model = SeDeM.from_pretrained(checkpoint, dtype=torch.float32, device=device, engine=engine)
    memory = model.read(read_documents(sorted(DOCUMENTS.glob("*.txt"))))
    tokens = [len(model.encoder.token_ids(question)) for question in QUESTIONS]
    scores = torch.stack(
        [model.scores(memory, q) / n for q, n in zip(QUESTIONS, tokens, strict=True)]
    )
    return scores, [answer.text for answer in model.answer(memory, QUESTIONS)]


def _candidate(work: GpuWork, scale: Scale) -> list[Step]:
    """The training runs of a candidate for sedem-nano; each starts from the previous one."""
    found: list[Step] = []
    start: list[str] = []
    for name in CANDIDATE:
        folder, stage = scale.runs / name, name.split("-")[0]
        own = {"stage1": scale.stage1, "stage2": scale.stage2}[stage] if work.smoke else ()
        overrides = [*candidate_overrides(name, work.budget, work.processes), *scale.overrides]
        overrides += [*own, *start, f"data_root={work.data}", f"run.output={folder}"]
        run = partial(run_recipe, RECIPES / f"{name}.yaml", overrides)
        needs = tuple(step.made for step in found[-1:])
        found.append(Step(f"train {name}", run, folder / "training.json", needs))
        start = [f"start_from={folder / 'final'}"]
    return found


def _sweep(work: GpuWork, scale: Scale, candidate: Path) -> list[Step]:
    """Answers by K of the candidate, and of the shipped model on this machine."""
    asked = SMOKE if work.smoke else NANO
    cells = [
        replace(guided_answers(asked, key), limit=max(2, round(work.budget * limit)))
        for key, limit in SWEEP.items()
        if key in scale.sets
    ]
    study = more_memory.name
    found = [_measured(cell, scale, work, study, (candidate,)) for cell in cells]
    if work.smoke:
        return found
    for cell in cells:
        made = scale.runs / "shipped" / study / f"{cell.name}.json"
        run = partial(measure, cell, NANO, work.data, study, scale.runs / "shipped")
        found.append(Step(f"shipped {cell.name}", run, made))
    return found


def _study(work: GpuWork, scale: Scale, candidate: Path) -> list[Step]:
    """Steps that train each model of the study once, and that measure its cells."""
    groups: dict[str, dict[Any, Cell]] = {}
    measured = []
    for cell in equal_training.cells(scale):
        assert cell.variant is not None
        own, need = scale, candidate
        if cell.method == "full-context" and scale.name == NAME:
            own = replace(scale, shipped=NANO.shipped)  # it has the same frozen backbone
        if cell.method in TRAINED or not cell.variant.further:
            name = f"{cell.method}{cell.setting}" if cell.method in TRAINED else cell.variant.name
            groups.setdefault(name, {})[cell.variant] = cell
            need = _results(scale) / "trained" / f"{name}.json"
        needs = () if own is not scale else (need,)
        measured.append(_measured(cell, own, work, equal_training.name, needs))
    trained = []
    for name, cells in groups.items():
        mark = _results(scale) / "trained" / f"{name}.json"
        run = partial(_train_models, [*cells.values()], scale, work.data, mark)
        trained.append(Step(f"train {name}", run, mark))
    return [*trained, *measured]


def _train_models(cells: Sequence[Cell], scale: Scale, data: Path, mark: Path) -> None:
    folders = [checkpoint_of(cell, scale, data) for cell in cells]
    _write(mark, {str(folder): models.budget(folder) for folder in folders})


def _measured(
    cell: Cell, scale: Scale, work: GpuWork, study: str, needs: tuple[Path, ...] = ()
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


# Running: each step in a process of its own, several at once

LOG = "steps.jsonl"
RESERVE = 0.05
"""Share of the time, at its end, in which no step starts."""


def run_missing(work: GpuWork, chosen: Sequence[Step], minutes: float) -> dict[str, str]:
    """Run steps until all are done or time is up; the first in the list start first.

    A step that is killed when time is up continues from its last checkpoint in the next call.

    Returns:
        The reasons of failed steps, by name.
    """
    end = time.monotonic() + 60 * minutes
    last_start = end - 60 * minutes * RESERVE
    pending = [*chosen]
    failed: dict[str, str] = {}
    running: dict[Future[str], Step] = {}
    with ThreadPoolExecutor(work.processes) as pool:
        while True:
            for step in [*pending]:
                exclusive = step.alone or any(other.alone for other in running.values())
                if len(running) == work.processes or (exclusive and running):
                    break
                if step.state(work.out) != "waiting":
                    pending.remove(step)
                    running[pool.submit(_run, work, step, end, last_start)] = step
            if not running:
                return failed  # what is left needs a step that is not done
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step, outcome = running.pop(future), future.result()
                if outcome not in ("done", "stopped"):
                    failed[step.name] = outcome


def _run(work: GpuWork, step: Step, end: float, last_start: float) -> str:
    """Run a step if it is not done; return "done", "stopped", or why it failed."""
    if step.state(work.out) == "done":
        return "done"
    started = time.monotonic()
    if started >= last_start:
        return "stopped"
    log = work.out / "logs" / f"{step.name.replace(' ', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.gpu", "--step", step.name, *work.options]
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, cores() // (1 if step.alone else work.processes))),
        **({"CUDA_VISIBLE_DEVICES": ""} if work.device == "cpu" else {}),
    }
    typer.echo(f"started: {step.name}", err=True)
    try:
        with log.open("a", encoding="utf-8") as file:
            # Runs of a scale are relative to the folder of the work.
            subprocess.run(
                command, cwd=work.out, env=environment, stdout=file, stderr=file, check=True,
                timeout=end - started,
            )  # fmt: skip
        outcome = "done"
    except subprocess.TimeoutExpired:
        outcome = "stopped"
    except subprocess.CalledProcessError:
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        outcome = f"{lines[-1] if lines else 'no output'} (see '{log}')"
    seconds = round(time.monotonic() - started, 1)
    kind = outcome if outcome in ("done", "stopped") else "failed"
    typer.echo(f"{kind} after {seconds} s: {step.name}", err=True)
    with (work.out / LOG).open("a", encoding="utf-8") as file:
        entry = {"step": step.name, "outcome": kind, "seconds": seconds}
        file.write(json.dumps(entry | {"reason": outcome if kind == "failed" else None}) + "\n")
    return outcome


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of runs, results and logs.")],
    data: Annotated[Path, typer.Option(help="Folder of the data files.")] = Path("data"),
    minutes: Annotated[float, typer.Option(help="Stop after so long.")] = 9.0,
    budget: Annotated[float, typer.Option(help="Share of all steps and questions.")] = 1.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial.")] = "cuda",
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny random backbone.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Steps at once. [default: half of the cores, up to 8]")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only steps whose names contain this; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="No steps whose names contain this; repeatable.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print the steps and their state.")] = False,
    step: Annotated[str | None, typer.Option(hidden=True, help="Run one step, here.")] = None,
) -> None:
    """Do what is missing, and print what is left.

    The exit status is 0 if every step is done, 1 if one failed and 75 if time was over before.
    """
    at_once = processes or min(8, max(1, cores() // 2))
    work = GpuWork(out.resolve(), data.resolve(), budget, smoke, device, at_once)
    every = steps(work)
    if step is not None:
        if smoke:
            tiny_backbone()
        next(one for one in every if one.name == step).run()
        return
    chosen = [
        one
        for one in every
        if (not only or any(part in one.name for part in only))
        and not any(part in one.name for part in skip or ())
    ]
    if show:
        for one in chosen:
            typer.echo(f"{one.state(work.out):8} {one.name}")
        return
    try:
        _check(work)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    failed = run_missing(work, chosen, minutes)
    states = {one.name: one.state(work.out) for one in chosen}
    left = [name for name, state in states.items() if state != "done"]
    typer.echo(f"{len(chosen) - len(left)} of {len(chosen)} steps are done")
    for name, reason in failed.items():
        typer.echo(f"failed: {name}: {reason}")
    stuck = bool(left) and all(states[name] == "waiting" for name in left)
    if stuck:
        typer.echo(f"waiting for a step that was not chosen: {', '.join(left)}")
    elif left and not failed:
        typer.echo("repeat the command to resume")
    raise typer.Exit(1 if failed or stuck else os.EX_TEMPFAIL if left else 0)


def _check(work: GpuWork) -> None:
    """Claim the folder, and reject a machine without a GPU.

    Raises:
        ConfigError: there is no GPU, or the folder contains other work.
    """
    if work.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no GPU that torch can use, and one is needed; give --device cpu "
            "(with --budget 0.01 or --smoke) to try the steps without one"
        )
    settings = {"budget": work.budget, "smoke": work.smoke, "device": work.device}
    claim(work.out, settings)


if __name__ == "__main__":
    app()

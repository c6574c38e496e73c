"""Steps in separate processes: several at once, each after those that it needs.

A run that is killed when time is up continues from its last checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import typer

LOG = "steps.jsonl"
RESERVE = 0.05
"""Share of the time, at its end, in which no step starts."""
IMPORTED = (
    "experiments.system.gpu_steps",
    "sedem.training.stages",
    "sedem.training.baseline",
    "sedem.evaluation.command",
)
"""Modules that take seconds to import; the processes of steps inherit them."""


def cores() -> int:
    """CPU cores that this process may use; the machine may have more."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Work:
    """The work to do.

    Attributes:
        out: folder of runs, results and logs.
        data: folder that the data paths are relative to.
        budget: share of all steps and questions.
        smoke: use a tiny random backbone instead of sedem-nano's.
        device: "cuda" or "cpu".
        processes: number of steps that run at once.
    """

    out: Path
    data: Path
    budget: float
    smoke: bool
    device: str
    processes: int = 1


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: name for the list and the log.
        run: runs the step; a second call continues where a killed one stopped.
        made: the file that exists when the step is done, relative to the work folder.
        needs: files made by other steps that must exist before it starts.
        alone: nothing else may run at the same time, because it measures times.
    """

    name: str
    run: Callable[[], None]
    made: Path
    needs: tuple[Path, ...] = ()
    alone: bool = False

    def is_done(self, out: Path) -> bool:
        """Whether the file that it makes exists."""
        return (out / self.made).is_file()

    def is_ready(self, out: Path) -> bool:
        """Whether the files that it needs exist."""
        return all((out / need).is_file() for need in self.needs)


@dataclass
class _Running:
    step: Step
    process: BaseProcess
    log: Path
    started: float


def run_missing(work: Work, chosen: Sequence[Step], minutes: float) -> dict[str, str]:
    """Run steps until all are done or time is up; the first in the list start first.

    Args:
        work: the folder, the device, and the number of steps at once.
        chosen: the steps.
        minutes: the available time.

    Returns:
        The reasons of failed steps, by name.
    """
    end = time.monotonic() + 60 * minutes
    last_start = end - 60 * minutes * RESERVE
    waiting = [step for step in chosen if not step.is_done(work.out)]
    running: list[_Running] = []
    failed: dict[str, str] = {}
    try:
        while True:
            while time.monotonic() < last_start and (step := _next(work, waiting, running)):
                waiting.remove(step)
                running.append(_start(work, step))
            if not running:
                return failed
            left = max(0.0, end - time.monotonic())
            wait([one.process.sentinel for one in running], left)
            for one in [one for one in running if one.process.exitcode is not None]:
                running.remove(one)
                _note(work, one, "failed" if one.process.exitcode else "done", failed)
            if time.monotonic() >= end:
                return failed
    finally:
        for one in running:
            _kill(one.process)
            _note(work, one, "stopped", failed)


def _next(work: Work, waiting: Sequence[Step], running: Sequence[_Running]) -> Step | None:
    """The first waiting step that can start; None if it must wait for running ones."""
    if len(running) >= work.processes or any(one.step.alone for one in running):
        return None
    step = next((step for step in waiting if step.is_ready(work.out)), None)
    return None if step is not None and step.alone and running else step


def _start(work: Work, step: Step) -> _Running:
    """Start a step in a separate process.

    A fork of this process could not use CUDA, so a server without CUDA starts the processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    log = work.out / "logs" / f"{step.name.replace(' ', '-')}.log"
    threads = cores() if step.alone else max(1, cores() // work.processes)
    process = context.Process(target=_run_step, args=(work, step, threads, log))
    process.start()
    typer.echo(f"started: {step.name}", err=True)
    return _Running(step, process, log, time.monotonic())


def _note(work: Work, one: _Running, outcome: str, failed: dict[str, str]) -> None:
    """Record how a step ended."""
    if outcome == "failed":
        failed[one.step.name] = f"{_last_line(one.log)} (see '{one.log}')"
    seconds = round(time.monotonic() - one.started, 1)
    typer.echo(f"{outcome} after {seconds} s: {one.step.name}", err=True)
    with (work.out / LOG).open("a", encoding="utf-8") as file:
        entry = {"step": one.step.name, "outcome": outcome, "seconds": seconds}
        file.write(json.dumps(entry | {"reason": failed.get(one.step.name)}) + "\n")


def _kill(process: BaseProcess) -> None:
    """Kill a process and those that it started, such as data loaders."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()
    process.join()


def _run_step(work: Work, step: Step, threads: int, log: Path) -> None:
    """Run a step; all of its output goes into its log."""
    os.setsid()
    # The library passes its server on to data loaders, which would wait for it forever.
    multiprocessing.set_start_method("fork", force=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if work.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(work.out)  # runs of a scale are relative to it
    try:
        _limit_threads(threads)
        step.run()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _limit_threads(threads: int) -> None:
    """Set the number of torch threads; torch is imported, so OMP_NUM_THREADS is too late."""
    import torch

    torch.set_num_threads(threads)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "its process ended without a word"

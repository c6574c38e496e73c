"""An hour on one GPU, without network, in pieces: `python -m experiments.gpu --data D --out O`.

It runs the tests marked gpu, compares the engines, times Llama's shapes on random weights, trains a
candidate for sedem-nano, and measures the study `equal_training` at fifty times the CPU's budget. A
call ends after some minutes; the same command goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated

import typer

from experiments.system.gpu_steps import Step, Work, steps
from sedem.errors import ConfigError
from sedem.evaluation.results import claim

LOG = "steps.jsonl"
RESERVE = 0.05
"""No step starts in the last part of the time."""
IMPORTED = ("sedem.training.stages", "sedem.training.baseline", "sedem.evaluation.command")
"""Modules that take seconds to import; the processes of steps inherit them."""

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of runs, results and logs.")],
    data: Annotated[Path, typer.Option(help="Folder of the data files.")] = Path("data"),
    minutes: Annotated[float, typer.Option(help="Stop after so long.")] = 9.0,
    budget: Annotated[float, typer.Option(help="Share of all steps and questions.")] = 1.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial.")] = "cuda",
    smoke: Annotated[bool, typer.Option("--smoke", help="A tiny random backbone.")] = False,
    only: Annotated[str, typer.Option(help="Only steps whose names hold this.")] = "",
    show: Annotated[bool, typer.Option("--list", help="Print the steps and their state.")] = False,
) -> None:
    """Do what is missing, and say what is left.

    The exit status is 0 if every step is done, 1 if one failed and 75 if time was over before.
    """
    work = Work(out.resolve(), data.resolve(), budget, smoke, device)
    chosen = [step for step in steps(work) if only in step.name]
    if show:
        for step in chosen:
            typer.echo(f"{_state(work, step):8} {step.name}")
        return
    try:
        _check(work)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    failed = _run_missing(work, chosen, time.monotonic() + 60 * minutes, 60 * minutes * RESERVE)
    left = [step.name for step in chosen if _state(work, step) != "done"]
    typer.echo(f"{len(chosen) - len(left)} of {len(chosen)} steps are done")
    for name, reason in failed.items():
        typer.echo(f"failed: {name}: {reason}")
    if left and not failed:
        typer.echo("give the same command again to go on")
    raise typer.Exit(1 if failed else os.EX_TEMPFAIL if left else 0)


def _check(work: Work) -> None:
    """Claim the folder, and refuse a machine that has no GPU.

    Raises:
        ConfigError: there is none, or the folder holds other work.
    """
    import torch

    if work.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no GPU that torch can use, and one is needed; give --device cpu "
            "(with --budget 0.01 or --smoke) to try the steps without one"
        )
    settings = {"budget": work.budget, "smoke": work.smoke, "device": work.device}
    claim(work.out, settings)


def _run_missing(work: Work, chosen: list[Step], end: float, reserve: float) -> dict[str, str]:
    """Run steps until the time is over; return the reasons of those that failed."""
    failed: dict[str, str] = {}
    for step in chosen:
        if _state(work, step) == "done":
            continue
        if end - time.monotonic() < reserve:
            break
        started = time.monotonic()
        log = work.out / "logs" / f"{step.name.replace(' ', '-')}.log"
        outcome = _in_process(work, step.name, log, end)
        if outcome == "failed":
            failed[step.name] = f"{_last_line(log)} (see '{log}')"
        seconds = round(time.monotonic() - started, 1)
        typer.echo(f"{outcome} after {seconds} s: {step.name}", err=True)
        with (work.out / LOG).open("a", encoding="utf-8") as file:
            entry = {"step": step.name, "outcome": outcome, "seconds": seconds}
            file.write(json.dumps(entry | {"reason": failed.get(step.name)}) + "\n")
    return failed


def _in_process(work: Work, name: str, log: Path, end: float) -> str:
    """Run a step in a process of its own, which is killed when time is over.

    A run that is killed continues from its last checkpoint. A fork of this process could not use
    CUDA, so a server without it makes the processes.

    Returns:
        "done", "failed" or "stopped".
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_run_step, args=(work, name, log))
    process.start()
    try:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            return "stopped"
        return "done" if process.exitcode == 0 else "failed"
    finally:
        if process.exitcode is None:
            _kill(process)


def _kill(process: BaseProcess) -> None:
    """Kill a process with those that it started, such as loaders of data."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()
    process.join()


def _run_step(work: Work, name: str, log: Path) -> None:
    """Run a step; all that it prints goes into its log."""
    os.setsid()
    # The library hands its server to loaders of data, which would wait for it for ever.
    multiprocessing.set_start_method("fork", force=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if work.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(work.out)  # runs of a scale are relative to it
    try:
        next(step for step in steps(work) if step.name == name).run()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _state(work: Work, step: Step) -> str:
    return "done" if (work.out / step.made).is_file() else "missing"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "its process ended without a word"


if __name__ == "__main__":
    app()

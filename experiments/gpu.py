"""An hour on one GPU, without network, in parts: `python -m experiments.gpu --data D --out O`.

It runs the tests marked gpu, compares the engines, times Llama's shapes on random weights, trains a
candidate for sedem-nano, and measures the study `equal_training` at fifty times the CPU's budget,
several steps at once. A call ends after some minutes; the same command resumes where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments.system.gpu_steps import scale_of, steps
from experiments.system.step_archive import archive
from experiments.system.step_processes import Step, Work, cores, run_missing
from sedem.errors import ConfigError
from sedem.evaluation.results import claim

app = typer.Typer(add_completion=False)


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
        list[str] | None, typer.Option(help="Only steps whose names hold this; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="No steps whose names hold this; repeatable.")
    ] = None,
    packed: Annotated[
        Path | None,
        typer.Option("--archive", help="Pack what is made into FILE.0, FILE.1 and so on."),
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Print the steps and their state.")] = False,
) -> None:
    """Do what is missing, and say what is left.

    The exit status is 0 if every step is done, 1 if one failed and 75 if time was over before.
    """
    at_once = processes or min(8, max(1, cores() // 2))
    work = Work(out.resolve(), data.resolve(), budget, smoke, device, at_once)
    every = steps(work)
    chosen = [step for step in every if _is_chosen(step.name, only, skip or ())]
    if show:
        for step in chosen:
            typer.echo(f"{_state(work, step):8} {step.name}")
        return
    try:
        _check(work)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    failed = run_missing(work, chosen, minutes)
    states = {step.name: _state(work, step) for step in chosen}
    left = [name for name, state in states.items() if state != "done"]
    typer.echo(f"{len(chosen) - len(left)} of {len(chosen)} steps are done")
    for name, reason in failed.items():
        typer.echo(f"failed: {name}: {reason}")
    stuck = bool(left) and all(states[name] == "waiting" for name in left)
    if stuck:
        typer.echo(f"waiting for a step that was not chosen: {', '.join(left)}")
    elif left and not failed:
        typer.echo("give the same command again to go on")
    if packed is not None:
        for part in archive(work.out, every, scale_of(work).runs, packed):
            typer.echo(f"{part}: {part.stat().st_size:,} bytes")
    raise typer.Exit(1 if failed or stuck else os.EX_TEMPFAIL if left else 0)


def _is_chosen(name: str, only: Sequence[str] | None, skip: Sequence[str]) -> bool:
    return (not only or any(part in name for part in only)) and not any(p in name for p in skip)


def _check(work: Work) -> None:
    """Claim the folder, and refuse a machine without a GPU.

    Raises:
        ConfigError: there is no GPU, or the folder contains other work.
    """
    import torch

    if work.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "this machine has no GPU that torch can use, and one is needed; give --device cpu "
            "(with --budget 0.01 or --smoke) to try the steps without one"
        )
    settings = {"budget": work.budget, "smoke": work.smoke, "device": work.device}
    claim(work.out, settings)


def _state(work: Work, step: Step) -> str:
    if step.is_done(work.out):
        return "done"
    return "missing" if step.is_ready(work.out) else "waiting"


if __name__ == "__main__":
    app()

"""How each kind of cell is measured; models that it needs are trained first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from accelerate import PartialState
from accelerate.utils import gather_object

from experiments.system import (
    agents,
    answers,
    bench,
    convention,
    finding,
    learning,
    search,
    timing,
)
from experiments.system.cells import Cell, results_of, shareable, train
from experiments.system.scales import Scale
from experiments.system.stand_in import records
from experiments.system.tables import Study
from sedem.durable_files import write_text
from sedem_lab.provenance import provenance

_OWN = (
    *(answers.answers, answers.constant, answers.budgets, answers.ways, answers.hops),
    *(answers.new_user, answers.lengths, convention.cost),
    *(learning.memory, learning.loss, learning.rank, learning.training),
    *(search.block_recall, search.large_banks, search.confidence, finding.finding),
    *(timing.condition_times, timing.bank_size),
    *(agents.tool_servers, agents.agent_savings),
)
BENCH = ("bench", "batches", "kept", "beside-llama-cpp")
MEASURES: Mapping[str, Callable[[Cell, Scale, Path], dict[str, Any]]] = {
    **{function.__name__.replace("_", "-"): function for function in _OWN},
    **dict.fromkeys(BENCH, bench.bench),
}
"""The function that measures each kind of cell; its docstring says what it measures."""

TIMED = (
    *(*BENCH, "condition-times", "tool-servers"),
    *("agent-savings", "bank-size", "large-banks", "finding"),
)
"""Kinds that measure times, so nothing else may run beside them."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

DIGITS = 6
"""Significant digits of a result, so that what is committed stays small."""


def measure(cell: Cell, scale: Scale, data: Path, study: str) -> None:
    """Measure a cell and keep the result in the folder of a study."""
    with records(scale):
        found = MEASURES[cell.measure](cell, scale, data)
    # The bench and evaluations sign what they measure, since they resume the work of others.
    signed = found if "machine" in found else {**found, **provenance()}
    if scale.changes:
        signed = {**signed, "set": scale.changes}
    result = json.dumps({**signed, "stand_in": True} if scale.stand_in else signed)
    few_digits = json.loads(result, parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))
    path = results_of(scale) / study / f"{cell.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # On one line: indentation would be a quarter of all committed results.
    write_text(path, json.dumps(few_digits, separators=(",", ":")) + "\n")


def measure_missing(
    studies: Iterable[Study],
    scale: Scale,
    data: Path,
    only: str | None = None,
    again: bool = False,
    part: tuple[int, int] = (0, 1),
    before_times: Callable[[], None] = lambda: None,
) -> tuple[int, list[str]]:
    """Measure the missing cells of the given studies.

    A cell shared by several studies is kept in the folder of the first of them. A cell that fails
    is reported and does not stop the others. The processes of a launcher train every model
    together; then each measures a part of the cells, and the first one alone those of times.

    Args:
        only: measure only cells whose name contains this.
        again: also measure cells that have a result, and replace it in its place.
        part: number of the part of the cells to measure, from 0 on, and of all parts, if other
            processes without a launcher measure the others. Times belong to the first part.
        before_times: called before times are measured.

    Returns:
        The number of cells, and the names of those that failed.
    """
    own = connected()
    owners: dict[Cell, str] = {}
    for study in studies:
        for cell in study.cells(scale):
            owners.setdefault(cell, study.name)
    chosen = {cell: owner for cell, owner in owners.items() if not only or only in cell.name}
    missing = [cell for cell in chosen if again or cell.path(scale) is None]
    failed: list[str] = []

    def attempt(task: str, cell: Cell, do: Callable[[], None]) -> None:
        number = missing.index(cell) + 1
        typer.echo(f"{number}/{len(missing)} {cell.name}: {task}", err=True)
        try:
            with records(scale):
                do()
        # Whatever goes wrong with one cell, the others are measured.
        except Exception:
            failed.append(cell.name)
            typer.echo(traceback.format_exc(), err=True)

    own.wait_for_everyone()  # a result that is missing now is missing for every process
    alone = set()
    if own.num_processes > 1:
        part = own.process_index, own.num_processes
        for cell in missing:
            if shareable(cell, scale, data, own.num_processes):
                attempt("training", cell, partial(train, cell, scale, data))
            else:
                alone.add(cell)
    # The parts do not depend on what is missing, which may differ between processes by now.
    quality = [cell for cell in chosen if cell.measure not in TIMED]
    times = [cell for cell in chosen if cell.measure in TIMED]
    for cells in (quality[part[0] :: part[1]], times if not part[0] else []):
        for cell in cells:
            if cell not in missing or cell.name in failed:
                continue
            path = cell.path(scale)
            owner = path.parent.name if path else chosen[cell]
            how = _in_own_process if cell in alone else measure
            attempt("measuring", cell, partial(how, cell, scale, data, owner))
        before_times()
        failed = sorted(set(gather_object(failed)))
    if not part[0]:
        failed += [c.name for c in chosen if c.path(scale) is None and c.name not in failed]
    return len(chosen), failed


def connected() -> PartialState:
    """The processes of a launcher, which may wait for each other for days."""
    return PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))


def _in_own_process(cell: Cell, scale: Scale, data: Path, owner: str) -> None:
    """Measure a cell in a process without the launcher, which trains on one device."""
    command = [sys.executable, "-m", "experiments", "run", owner, "--scale", scale.name]
    command += ["--data", str(data), "--only", cell.name, "--again"]
    command += ["--stand-in", "--at-once", "1"] if scale.stand_in else []
    command += [word for change in scale.changes for word in ("--set", change)]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = str(torch.cuda.current_device())
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)

"""Kills, power cuts and full disks: an operation is broken off at one of its changes to files."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from campaign import Result
from faults.disk import KINDS, Disk
from faults.operations import OPERATIONS, Operation, Scene, WrongError, check_whole
from faults.tracing import Change, Decide, Fate, Trace, go_on, trace

SCENE = 300
"""Points of one scene and all operations before another scene is built."""
RETURNED = 0.2
"""Share of the power cuts that come when the operation has returned."""
TAKES_SPACE = ("create", "mkdir", "write", "truncate", "link")


def kills(points: int, folder: Path, seed: int = 0) -> Result:
    """Kill an operation before each of its changes, and in the middle of its writes."""
    result = Result("points")
    for name, operation, scene, template, share, chance in _cases(points, folder, seed):
        work = folder / "work"
        changes = _all_changes(operation, scene, template, work)
        every = [(at, False) for at in range(len(changes))]
        every += [(at, True) for at, change in enumerate(changes) if len(change.data) > 1]
        for at, half in chance.sample(every, min(share, len(every))):
            done = _traced(operation, scene, template, work, kill(at, half))
            where = f"{name} of {scene}, killed {'within' if half else 'before'} change {at}"
            with result.case(name, where):
                if done.error:
                    raise WrongError(f"{where}: {done.error}")
                check_whole(operation, scene, work, promised=done.finished, where=where)
    return result


def power_cuts(points: int, folder: Path, seed: int = 0) -> Result:
    """Cut the power after any change: what was not synced is lost in part, or torn."""
    result = Result("cases")
    for name, operation, scene, template, share, chance in _cases(points, folder, seed):
        work, left = folder / "work", folder / "left"
        disk = Disk(template, work)
        changes = _all_changes(operation, scene, template, work)
        last = len(changes)
        cuts = sorted(
            last if chance.random() < RETURNED else chance.randrange(last) for _ in range(share)
        )
        applied = 0
        for cut in cuts:
            for change in changes[applied:cut]:
                disk.apply(change)
            applied = cut
            kind = chance.choice(KINDS)
            shutil.rmtree(left, ignore_errors=True)
            disk.after_power_cut(left, kind, chance)
            where = f"{name} of {scene}, power cut after change {cut}, {kind} kept"
            promised = cut == last
            with result.case(name, where):
                check_whole(operation, scene, left, promised=promised, where=where)
    return result


def full_disks(points: int, folder: Path, seed: int = 0) -> Result:
    """Let the disk be full from some change on, or for one change, with or without a part of it."""
    result = Result("points")
    for name, operation, scene, template, share, chance in _cases(points, folder, seed):
        work = folder / "work"
        changes = _all_changes(operation, scene, template, work)
        takes = [at for at, change in enumerate(changes) if change.kind in TAKES_SPACE]
        every = [(at, once, half) for at in takes for once in (False, True) for half in (0, 1)]
        for at, once, half in chance.sample(every, min(share, len(every))):
            done = _traced(operation, scene, template, work, full(at, once, bool(half)))
            when = "for one change" if once else "from then on"
            where = f"{name} of {scene}, disk full at change {at} {when}{', cut short' * half}"
            with result.case(name, where):
                _check_full(operation, scene, work, done, where)
                result.count("refused" if done.error else "done without it")
    return result


def kill(at: int, half: bool) -> Decide:
    """Kill a process before a change; with `half`, the first half of it is still written."""
    return lambda number, _: Fate(kill=True, half=half) if number == at else None


def full(at: int, once: bool, half: bool) -> Decide:
    """Let the disk be full from a change on.

    Args:
        at: the first change that fails.
        once: whether there is room again afterwards.
        half: whether a write has room for its first half; the next one fails.
    """
    failed: list[int] = []

    def decide(number: int, change: Change) -> Fate | None:
        if number < at or change.kind not in TAKES_SPACE or (once and failed):
            return None
        if half and number == at and change.kind == "write":
            return Fate(half=True)
        failed.append(number)
        return Fate(errno=errno.ENOSPC)

    return decide


def _check_full(operation: Operation, scene: Scene, work: Path, done: Trace, where: str) -> None:
    """Assert that an error is one sentence and changed nothing, and that a second try succeeds."""
    if done.error:
        kind, _, message = done.error.partition(": ")
        if kind not in operation.errors or "\n" in message.strip():
            raise WrongError(f"{where}: {done.error}")
        try:
            if (found := operation.look(work)) != operation.before(scene):
                raise WrongError(f"an error ({done.error}), and then found {found}")
            operation.act(work, scene)
        except Exception as error:
            raise WrongError(f"{where}: {type(error).__name__}: {error}") from error
    check_whole(operation, scene, work, promised=True, where=where)


def _cases(
    points: int, folder: Path, seed: int
) -> Iterator[tuple[str, Operation, Scene, Path, int, random.Random]]:
    """Operations in scenes, each with the number of points that fall to it."""
    scenes = max(1, points // SCENE)
    for number in range(scenes):
        scene = Scene.number(seed + number)
        template = folder / "template"
        shutil.rmtree(folder / "scene", ignore_errors=True)
        scene.build(folder / "scene")
        share = -(-points // (scenes * len(OPERATIONS)))
        for name, operation in OPERATIONS.items():
            chance = random.Random(f"{seed} {number} {name}")
            shutil.rmtree(template, ignore_errors=True)
            shutil.copytree(folder / "scene", template)
            operation.prepare(template, scene)
            yield name, operation, scene, template, share, chance


def _all_changes(operation: Operation, scene: Scene, template: Path, work: Path) -> list[Change]:
    """What an operation changes if nothing fails."""
    done = _traced(operation, scene, template, work)
    if not done.finished:
        raise WrongError(f"an operation does not work: {done.error}")
    return done.changes


def _traced(
    operation: Operation, scene: Scene, template: Path, work: Path, decide: Decide = go_on
) -> Trace:
    """Do an operation in a child, in a copy of the scene."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(template, work)
    return trace(lambda: operation.act(work, scene), work, decide)

"""The campaigns of faults and the page of their committed report.

A new campaign is a line here, a new operation a line in `operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaign import Report, Result
from faults.crashes import full_disks, kills, power_cuts
from faults.flips import flips
from faults.readers import readers
from faults.sequences import sequences
from faults.tracing import WORKS


@dataclass(frozen=True)
class Campaign:
    """A kind of fault.

    Attributes:
        run: makes a number of cases in a folder, from a seed.
        points: cases of the bounded form; the long form has twenty times as many.
        sample: cases among the default tests.
        traces: whether it traces processes, which works on Linux on x86-64 alone.
        meaning: what is shown, for the report.
    """

    run: Callable[[int, Path, int], Result]
    points: int
    sample: int
    meaning: str
    traces: bool = False

    @property
    def works(self) -> bool:
        """Whether this machine can run it."""
        return WORKS or not self.traces


CAMPAIGNS = {
    "kills": Campaign(
        kills,
        150,
        5,
        "SIGKILL before any change to files, or in the middle of a write: the operation happened "
        "wholly or not at all, and the next one works",
        traces=True,
    ),
    "power cuts": Campaign(
        power_cuts,
        250,
        10,
        "Any part of what was not synced is lost or torn, contents and names, those of new parent "
        "folders too: as above, and an operation that had returned is not lost",
        traces=True,
    ),
    "full disks": Campaign(
        full_disks,
        100,
        5,
        "No room from some write on, or for one write: one sentence, nothing changed, and the "
        "second try succeeds",
        traces=True,
    ),
    "flips": Campaign(
        flips,
        100,
        14,
        "A bit flipped or a file cut, in a bank or any file of a checkpoint: found before it is "
        "used; verify finds all of them in a bank, and a repair keeps only what was not changed",
    ),
    "readers": Campaign(
        readers,
        5000,
        64,
        "32 readers in four processes beside a writer, which also compacts: each sees exactly one "
        "commit",
    ),
    "sequences": Campaign(
        sequences, 25, 2, "Any sequence of operations, on disk and in RAM, equals a dict"
    ),
}
REPORT = Report(
    Path(__file__).with_name("report.json"),
    Path(__file__).parents[2] / "experiments" / "faults.md",
    "fault",
    CAMPAIGNS,
    (),
    long=20,
)

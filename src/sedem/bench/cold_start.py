"""Processor time of one `sedem ask` in a fresh process, on a small bank."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from sedem.errors import SedemError
from sedem.model import SeDeM
from sedem.types import Document

PARTS = ("imports", "opening", "first_answer", "all")

SMALL = Document("lease.txt", "The rent is 1,240 crowns a month, due on the third.")
QUESTION = "What is the rent?"

# What `sedem ask` runs, with the clock read between its parts.
PROCESS = """
import json, os, sys, time
clock = [0.0]
note = lambda: clock.append(sum(os.times()[:2]))
import sedem.cli.main
from sedem.bank.memory_bank import MemoryBank
from sedem.cli.options import open_model
from sedem.model import SeDeM
note()
bank, model = MemoryBank.open(sys.argv[1]), open_model(sys.argv[2], sys.argv[3])
bank.check_made_by(model.fingerprint())
note()
model.answer(bank, sys.argv[4])
note()
print(json.dumps([after - before for before, after in zip(clock, clock[1:])] + clock[-1:]))
"""


def measure_cold_start(checkpoint: str, engine: str, runs: int = 5) -> dict[str, float]:
    """Answer one question in each of several fresh processes.

    Args:
        checkpoint: folder, hub id or name of a shipped checkpoint.
        engine: the engine that runs it.
        runs: number of processes.

    Returns:
        Median processor seconds, summed over threads, by the names in `PARTS`. Process exit is not
        included.

    Raises:
        SedemError: a process fails; the message contains the last line it wrote.
    """
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        bank = Path(folder) / "small.bank"
        SeDeM.from_pretrained(checkpoint, light=True).read([SMALL]).save(bank)
        command = [sys.executable, "-c", PROCESS, str(bank), checkpoint, engine, QUESTION]
        for _ in range(runs):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
                raise SedemError(f"a process that asks '{checkpoint}' ended with: {reason}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return dict(zip(PARTS, (median(times) for times in zip(*found, strict=True)), strict=True))

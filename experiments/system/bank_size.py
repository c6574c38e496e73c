"""Costs of a bank on disk as it grows: a commit, opening it, the first and later questions.

The blocks have the slots of a 1B model at C=4 and a width of eight, so that a million of them fit
on a small disk. The measured costs do not depend on the width.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from sedem.bank.blocks import Blocks
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.rows import Meta
from sedem.provenance import provenance
from sedem.quantization import Quantized
from sedem.types import Document

SLOTS, WIDTH, TOKENS = 32, 8, 4
DOCUMENTS, BLOCKS = 80, 10
"""Documents per commit and blocks per document: a commit has as many blocks as in `build`."""
COMMITS = 9
"""Number of commits timed at each size."""
SELECTED, QUESTIONS = 8, 200
"""Blocks read per question, and number of questions."""
PRINT = "0" * 64


def measure_bank_size(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Grow a bank and measure it at each size.

    Args:
        sizes: numbers of blocks, in ascending order.

    Returns:
        For each size, by its number: seconds to open the bank, megabytes it then takes, seconds and
        megabytes of reading the spans of all blocks, which the first question needs, milliseconds
        of reading some blocks by number, of a commit and of loading one; all of processor time.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        store = BankFile(Path(place) / "large.bank")
        with store.creating(Meta(PRINT, {}, SLOTS, WIDTH)):
            pass
        commits = 0
        for size in sizes:
            times: list[float] = []
            while commits * DOCUMENTS * BLOCKS < size:
                times.append(_commit(store, commits))
                commits += 1
            found[str(size)] = {
                "commit_ms": 1e3 * median(times[-COMMITS:]),
                **_in_a_new_process(store.path),
                "reload_ms": _reload(store, commits),
            }
            commits += 1
    return {"sizes": found, "slots": SLOTS, "commit_blocks": DOCUMENTS * BLOCKS, **provenance()}


def _commit(store: BankFile, number: int) -> float:
    """Append documents of random memory; return the seconds of processor time."""
    generator = torch.Generator().manual_seed(number)
    count = DOCUMENTS * BLOCKS
    memory = torch.randn(count, SLOTS, WIDTH, generator=generator).bfloat16()
    documents = [
        Document(f"{number}/{index}", f"document {index} of commit {number}. " * 100)
        for index in range(DOCUMENTS)
    ]
    starts = np.tile(np.arange(BLOCKS) * 100, DOCUMENTS)
    blocks = Blocks(
        np.repeat(np.arange(DOCUMENTS), BLOCKS),
        starts,
        starts + 100,
        np.full((count, SLOTS), TOKENS, np.uint8),
    )
    start = time.process_time()
    store.append(PRINT, documents, blocks, Quantized(memory))
    return time.process_time() - start


def _reload(store: BankFile, commits: int) -> float:
    """Milliseconds until an open bank shows a commit of another process."""
    bank = MemoryBank.open_from(store)
    assert len(bank.blocks)
    _commit(store, commits)
    start = time.process_time()
    bank.reload()
    assert len(bank.blocks)
    return 1e3 * (time.process_time() - start)


def _in_a_new_process(path: Path) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_open, (path,))


def _open(path: Path) -> dict[str, float]:
    """Processor time and memory to open a bank, in a process that has imported everything."""
    before, start = _resident(), time.process_time()
    bank = MemoryBank.open(path)
    seconds = time.process_time() - start
    found = {"open_s": seconds, "open_mb": (_resident() - before) / 1e6}
    before, start = _resident(), time.process_time()
    count = len(bank.blocks)
    found["spans_s"] = time.process_time() - start
    found["spans_mb"] = (_resident() - before) / 1e6
    drawn = np.random.default_rng(0).integers(count, size=(QUESTIONS, SELECTED)).tolist()
    start = time.process_time()
    for blocks in drawn:
        bank.memory(blocks)
    found["select_ms"] = 1e3 * (time.process_time() - start) / QUESTIONS
    return found


def _resident() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * float(line.split()[1])

"""Measures of time and memory: forms of blocks, and growing banks."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.scales import Scale
from sedem import Decoding, SeDeM
from sedem.bank.blocks import Blocks, Meta
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import MemoryBank
from sedem.config import Condition
from sedem.tensors import Quantized
from sedem.types import Document

ROUNDS = 3


def condition_times(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Milliseconds to the first token by condition and K, and bytes per token by condition.

    Kept keys and values exist before the first question is timed. Ways alternate, so that a busy
    machine slows them all down equally. The shortest of `ROUNDS` answers counts.
    """
    dtype, one = getattr(torch, cell.dtype or scale.dtype), Decoding(max_new_tokens=1)
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data), dtype=dtype)
    conditions: tuple[Condition, ...] = get_args(Condition)
    ways = [(condition, k) for condition in conditions for k in (1, 2, 4, 8)]
    shortest: dict[tuple[Condition, int], list[float]] = {way: [] for way in ways}
    memory = text = tokens = 0
    examples = examples_of(cell, scale, data)
    for example in examples:
        bank = model.read(example.documents)
        if model.config.block_context == "independent":
            model.warm(bank)
        times: dict[tuple[Condition, int], list[float]] = {way: [] for way in ways}
        for _ in range(1 + ROUNDS):
            for (condition, k), found in times.items():
                how: Any = {"condition": condition, "k": k, "decoding": one}
                found.append(model.answer(bank, example.question, **how).timings["ttft_ms"])
        for way, found in times.items():
            shortest[way].append(min(found[1:]))
        memory, tokens = memory + bank.memory_bytes, tokens + bank.tokens
        text += sum(len(document.text.encode()) for document in example.documents)
    medians: dict[Condition, dict[str, float]] = {condition: {} for condition in conditions}
    for (condition, k), found in shortest.items():
        medians[condition][str(k)] = median(found)
    # The selector needs the memory of every block, whatever the decoder reads.
    sizes = {c: round((memory + text * (c != "memory")) / tokens, 1) for c in conditions}
    return {"times": medians, "bytes": sizes, "questions": len(examples)}


# A bank on disk as it grows. Its blocks have the slots of a 1B model at C=4 and a width of eight:
# a million of them fit on a small disk, and the measured costs do not depend on the width.

GROWN = dict.fromkeys(("nano", "gpu", "paper"), (10_000, 100_000, 1_000_000)) | {
    "stand-in": (800, 4_000)
}
"""Numbers of blocks by scale, in ascending order."""
SLOTS, WIDTH = 32, 8
DOCUMENTS, BLOCKS_OF_ONE = 80, 10
"""Documents per commit and blocks per document: a commit has as many blocks as in `build`."""
COMMITS = 9
"""Number of commits timed at each size."""
SELECTED, QUESTIONS = 8, 200
"""Blocks read per question, and number of questions."""
PRINT = "0" * 64


def bank_size(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Grow a bank and measure it at each size, in processor time.

    By number of blocks: seconds to open the bank, megabytes it then takes, seconds and megabytes of
    reading the spans of all blocks, which the first question needs, and milliseconds of reading
    some blocks by number, of a commit and of loading one.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        store = BankFile(Path(place) / "large.bank")
        with store.creating(Meta(PRINT, {}, SLOTS, WIDTH)):
            pass
        commits = 0
        for size in GROWN[scale.size]:
            times: list[float] = []
            while commits * DOCUMENTS * BLOCKS_OF_ONE < size:
                times.append(_commit(store, commits))
                commits += 1
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                opened = pool.apply(_open, (store.path,))
            # How long an open bank takes to show a commit of another process.
            bank = MemoryBank.open_from(store)
            assert len(bank.blocks)
            _commit(store, commits)
            commits, start = commits + 1, time.process_time()
            bank.reload()
            assert len(bank.blocks)
            spent = {"reload_ms": 1e3 * (time.process_time() - start)}
            found[str(size)] = {"commit_ms": 1e3 * median(times[-COMMITS:]), **opened, **spent}
    of_commit = DOCUMENTS * BLOCKS_OF_ONE
    return {"sizes": found, "slots": SLOTS, "commit_blocks": of_commit}


def _commit(store: BankFile, number: int) -> float:
    """Append documents of random memory; return the seconds of processor time."""
    generator = torch.Generator().manual_seed(number)
    count = DOCUMENTS * BLOCKS_OF_ONE
    memory = torch.randn(count, SLOTS, WIDTH, generator=generator).bfloat16()
    documents = [
        Document(f"{number}/{index}", f"document {index} of commit {number}. " * 100)
        for index in range(DOCUMENTS)
    ]
    starts = np.tile(np.arange(BLOCKS_OF_ONE) * 100, DOCUMENTS)
    blocks = Blocks(
        np.repeat(np.arange(DOCUMENTS), BLOCKS_OF_ONE),
        starts,
        starts + 100,
        np.full((count, SLOTS), 4, np.uint8),
    )
    start = time.process_time()
    store.append(PRINT, documents, blocks, Quantized(memory))
    return time.process_time() - start


def _open(path: Path) -> dict[str, float]:
    """Processor time and memory to open a bank, in a process that has imported everything."""
    found: dict[str, float] = {}

    def measured(name: str, work: Callable[[], Any]) -> Any:
        before, start = process_bytes("RssAnon"), time.process_time()
        result = work()
        found[f"{name}_s"] = time.process_time() - start
        found[f"{name}_mb"] = (process_bytes("RssAnon") - before) / 1e6
        return result

    bank = measured("open", lambda: MemoryBank.open(path))
    count = measured("spans", lambda: len(bank.blocks))
    drawn = np.random.default_rng(0).integers(count, size=(QUESTIONS, SELECTED)).tolist()
    start = time.process_time()
    for blocks in drawn:
        bank.memory(blocks)
    found["select_ms"] = 1e3 * (time.process_time() - start) / QUESTIONS
    return found


PROCESS = Path("/proc/self")


def process_bytes(name: str) -> int:
    """A size of this process, by its name in /proc; RssAnon is memory without mapped files."""
    lines = (PROCESS / "status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])

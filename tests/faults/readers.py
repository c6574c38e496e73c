"""One process writes a bank while 32 threads of four processes read it."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from campaign import Result
from faults.operations import (
    FINGERPRINT,
    MADE_BY,
    SLOTS,
    WIDTH,
    WrongError,
    memory_of,
    rows_of,
    text_of,
)

from sedem import Document, MemoryBank
from sedem.bank.blocks import Blocks, Meta
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.errors import BankError
from sedem.tensors import join

PROCESSES, THREADS = 4, 8
ROUND = 2000
"""Reads of one bank; then another one is made, so that it stays small."""
LIST = "list"
"""The document that says which documents the bank has, and which one leaves next."""
AGAIN = "open it again"
SECONDS = 3600


def readers(points: int, folder: Path, seed: int = 0) -> Result:
    """Read a bank while it is written; each reader must see exactly one commit."""
    result = Result("operations")
    context = multiprocessing.get_context("fork")
    for first in range(0, points, ROUND):
        bank = folder / f"{first}.bank"
        _commit_first(bank)
        each = -(-min(ROUND, points - first) // (PROCESSES * THREADS))
        done, queue = context.Event(), context.Queue()
        writer = context.Process(target=_write, args=(bank, done, queue))
        processes = [
            context.Process(target=_read, args=(bank, each, seed + first + number, queue))
            for number in range(PROCESSES)
        ]
        for process in (writer, *processes):
            process.start()
        for number in range(PROCESSES + 1):
            if number == PROCESSES:
                done.set()
            kind, count, again, wrong = queue.get(timeout=SECONDS)
            result.cases[kind] += count
            result.count("told to open again", again)
            result.wrong += wrong
        for process in (writer, *processes):
            process.join()
    return result


# The writer


def _commit_first(path: Path) -> None:
    with BankFile(path).creating(Meta(FINGERPRINT, MADE_BY, SLOTS, WIDTH)) as file:
        _commit(file, {}, None, {})


def _commit(
    file: BankFile, there: dict[str, int], leaving: str | None, added: dict[str, int]
) -> None:
    """Append documents in one commit, and the list of all that are there after it."""
    listed = json.dumps({"there": {**there, **added}, "leaving": leaving})
    documents = [Document(name, text_of(version)) for name, version in added.items()]
    rows = [row for i, version in enumerate(added.values()) for row in rows_of(version, i)]
    memory = [memory_of(version) for version in added.values()]
    documents.append(Document(LIST, listed))
    file.append(FINGERPRINT, documents, Blocks.of(rows), join([*memory, memory_of(0)[:0]]))


def _write(path: Path, done: Event, queue: Any) -> None:
    """Change the bank until everybody has read enough."""
    chance = random.Random(0)
    file, there, commits, wrong = BankFile(path), dict[str, int](), 0, []
    try:
        while not done.is_set():
            commits += 1
            name = f"doc-{chance.randrange(6)}"
            if name in there and chance.random() < 0.4:
                _commit(file, there, name, {})
                file.remove(name)
                del there[name]
                commits += 1
            elif chance.random() < 0.05:
                file.compact()
            else:
                _commit(file, there, None, {name: commits})
                there[name] = commits
    except Exception as error:
        wrong.append(f"the writer: {type(error).__name__}: {error}")
    queue.put(("commits", commits, 0, wrong))


# The readers


def _read(path: Path, each: int, seed: int, queue: Any) -> None:
    """Read the bank in several threads, which have one open bank together."""
    results = Result("")
    try:
        shared = MemoryBank.open(path)
    except BankError as error:
        queue.put(("reads", 0, 0, [f"a reader: {error}"]))
        return
    threads = [
        threading.Thread(target=_read_often, args=(path, shared, each, seed * THREADS + n, results))
        for n in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(("reads", each * THREADS, results.counts["again"], results.wrong))


def _read_often(path: Path, shared: MemoryBank, times: int, seed: int, results: Result) -> None:
    chance = random.Random(seed)
    for _ in range(times):
        try:
            if chance.random() < 0.5:
                bank = MemoryBank.open(path)
            else:
                bank = shared
                if chance.random() < 0.5:
                    bank.reload()
            _check_one_state(bank.snapshot())
        except BankError as error:
            if AGAIN in str(error):
                results.count("again")
            else:
                results.wrong.append(f"a reader: {error}")
        except Exception as error:
            results.wrong.append(f"a reader: {type(error).__name__}: {error}")


def _check_one_state(now: Snapshot) -> None:
    """Assert that a snapshot is a commit as it was made: its list, texts, spans and memory."""
    found = {document.name: document.text for document in now.documents}
    listed = json.loads(found.pop(LIST))
    there = listed["there"]
    if listed["leaving"] not in found:
        there.pop(listed["leaving"], None)
    if found != {name: text_of(version) for name, version in there.items()}:
        raise WrongError(f"found {sorted(found)}, listed {sorted(there)}")
    index = {name: number for number, name in enumerate(now.documents.names)}
    ordered = sorted(there, key=index.__getitem__)
    rows = [row for name in ordered for row in rows_of(there[name], index[name])]
    if list(now.blocks) != rows:
        raise WrongError("the spans are not those of the texts")
    if rows:
        wanted = join([memory_of(there[name]) for name in ordered]).dequantize()
        if not torch.equal(now.memory(range(len(now))), wanted):
            raise WrongError("the memory is not that of the texts")

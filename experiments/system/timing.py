"""Measures of time and memory: forms of blocks, the server of tools, and growing banks."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.scales import ROOT, Scale
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


# The server of tools for agents

PAPERS = ROOT / "tests" / "household"
RANKS = (1, 3, 5)
_START = "import sys; from sedem.cli.main import app; sys.argv = ['sedem', *sys.argv[1:]]; app()"


def tool_servers(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall and seconds of `sedem mcp` on the household papers."""
    lines = (PAPERS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines][: 3 if scale.stand_in else None]
    files = sorted(path for path in PAPERS.iterdir() if path.suffix in (".txt", ".md"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    characters = sum(len(part.strip()) for text in texts for part in text.split("\n\n"))
    checkpoint = checkpoint_of(cell, scale, data)
    with tempfile.TemporaryDirectory() as home:
        found, times = asyncio.run(_session(checkpoint, home, asked))
        _, again = asyncio.run(_session(checkpoint, home, asked[:1]))
    # An answer stands in one of the first k results.
    answers = [one["answers"] for one in asked]
    recall = {
        str(k): sum(
            any(answer in text for text in results[:k] for answer in accepted)
            for results, accepted in zip(found, answers, strict=True)
        )
        / len(asked)
        for k in RANKS
    }
    long = sum(len(text) for results in found for text in results[:5]) / len(found)
    own = {"recall": recall, "characters": long, **times, "again_s": again["first_s"]}
    counts = {"files": len(files), "characters": characters, "questions": len(asked)}
    return {"servers": {"sedem mcp": own}, **counts, "load_average": os.getloadavg()[0]}


async def _session(
    checkpoint: str | Path, home: str, asked: Sequence[Any]
) -> tuple[list[list[str]], dict[str, float]]:
    """Start the server on the papers, and ask it over stdio."""
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-c", _START, "mcp", str(PAPERS), "--home", home, "-m", str(checkpoint)]
    server = StdioServerParameters(command=sys.executable, args=words, env={**os.environ})
    began = time.perf_counter()
    found, times = list[list[str]](), list[float]()
    async with Client(stdio_client(server)) as client:
        await client.list_tools()
        started = time.perf_counter() - began
        while (await client.call_tool("documents", {})).structured_content["notes"]:
            await asyncio.sleep(0.1)  # until all is read
        for one in asked:
            since = time.perf_counter()
            wanted = {"question": one["question"], "k": 5}
            while (result := await client.call_tool("search", wanted)).is_error:
                pass  # the model of a busy machine is still being opened
            times.append(time.perf_counter() - since)
            if len(times) == 1:
                first = time.perf_counter() - began
            found.append([passage["text"] for passage in result.structured_content["results"]])
    return found, {"started_s": started, "first_s": first, "search_s": median(times)}


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

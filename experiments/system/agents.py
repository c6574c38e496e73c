"""Measures of tools for agents: a search's parts, and servers on the same folder and questions."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.system.cells import Cell, checkpoint_of
from experiments.system.scales import ROOT, Scale
from sedem import Document, MemoryBank, SeDeM
from sedem.selecting.select import encode_questions
from sedem_lab.bench.contexts import context, demo_text

PAPERS = ROOT / "tests" / "household"
TOKENS, COPIES = 8_000, 16
"""Length of the documents of a searched bank, and how often it has them: a thousand blocks."""
QUESTIONS = 30
RANKS = (1, 3, 5)
ATTEMORY, ATTEMORY_MODEL = "ATTEMORY", "ATTEMORY_MODEL"
"""Variables with the environment of attemory and attemory-runtime-linux-cpu, and a GGUF file."""
_START = "import sys; from sedem.cli.main import app; sys.argv = ['sedem', *sys.argv[1:]]; app()"
_ATTEMORY = """
import json, socket, subprocess, sys, time
from attemory import AttemoryClient, MemoryInput
server, model, cache = sys.argv[1:]
asked = json.load(sys.stdin)
began = time.perf_counter()
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
words = [server, "--tiny", "--model", model, "--backend", "cpu", "--port", str(port)]
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
process = subprocess.Popen([*words, "--cache-dir", cache], **quiet)
try:
    session = f"papers-{time.time_ns()}"  # sessions stay
    client = AttemoryClient(port=port, timeout=3600, session_id=session)
    while process.poll() is None:
        try:
            if client.health():
                break
        except Exception:
            time.sleep(0.02)
    else:
        sys.exit(f"{server} ended with exit code {process.returncode} instead of starting.")
    started = time.perf_counter() - began
    client.create_session()
    client.add_system("Read the memory carefully and retrieve the evidence that answers the query.")
    for text in asked["texts"]:
        client.add_memory(MemoryInput(text=text))
    client.index_session()
    found, times = [], []
    for question in asked["questions"]:
        since = time.perf_counter()
        found.append([one.text for one in client.search(question, top_k=5)])
        times.append(time.perf_counter() - since)
        if len(times) == 1:
            first = time.perf_counter() - began
    print(json.dumps({"found": found, "times": times, "started": started, "first": first}))
finally:
    process.terminate()
"""


def passages(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Milliseconds of a search for passages, and of the pass over its question."""
    model = SeDeM.from_pretrained(checkpoint_of(cell, scale, data))
    part = model.read(context(demo_text(), model.encoder, TOKENS))
    bank = part.cast(part.dtype)
    [(documents, blocks, memory)] = part.snapshot().groups()
    for number in range(1, 2 if scale.stand_in else COPIES):  # the same under other names
        renamed = [Document(f"{number}-{one.name}", one.text) for one in documents]
        bank.append(MemoryBank(part.fingerprint, part.made_by, renamed, [*blocks], memory))
    words = bank.documents[0].text.split()
    starts = range(0, 9 * QUESTIONS, 9)
    questions = [f"What is said about {' '.join(words[at : at + 4])}?" for at in starts]
    model.search(bank, questions[0])  # makes the keys
    passing, searching = list[float](), list[float]()
    for question in questions:
        for times, run in (
            (passing, lambda question: encode_questions(model, model.engine, [question])),
            (searching, lambda question: model.search(bank, question)),
        ):
            since = time.perf_counter()
            run(question)
            times.append(1e3 * (time.perf_counter() - since))
    beyond = median(whole - part for whole, part in zip(searching, passing, strict=True))
    times = {"pass_ms": median(passing), "search_ms": median(searching), "beyond_ms": beyond}
    counts = {"blocks": len(bank), "questions": QUESTIONS}
    return {**counts, **times, "load_average": os.getloadavg()[0]}


def tool_servers(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Recall and seconds of `sedem mcp` and of attemory on the household papers.

    attemory is left out if its environment is not named. Its memories are the paragraphs.
    """
    lines = (PAPERS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line) for line in lines][: 3 if scale.stand_in else None]
    files = sorted(path for path in PAPERS.iterdir() if path.suffix in (".txt", ".md"))
    texts = [
        part.strip()
        for path in files
        for part in path.read_text(encoding="utf-8").split("\n\n")
        if part.strip()
    ]
    checkpoint = checkpoint_of(cell, scale, data)
    with tempfile.TemporaryDirectory() as home:
        found, first = asyncio.run(_session(checkpoint, home, asked))
        _, again = asyncio.run(_session(checkpoint, home, asked[:1]))
    servers = {"sedem mcp": _figures(asked, found, **first, again_s=again["first_s"])}
    if not scale.stand_in and ATTEMORY in os.environ:
        environment, model = Path(os.environ[ATTEMORY], "bin"), os.environ[ATTEMORY_MODEL]
        given = json.dumps({"texts": texts, "questions": [one["question"] for one in asked]})
        with tempfile.TemporaryDirectory() as cache:
            words = ["-c", _ATTEMORY, environment / "attemory-server", model, cache]
            out = subprocess.check_output([environment / "python", *words], input=given, text=True)
        own = json.loads(out)
        times = {"started_s": own["started"], "first_s": own["first"]}
        times |= {"search_s": median(own["times"]), "model": Path(model).name}
        servers["attemory"] = _figures(asked, own["found"], **times)
    counts = {"files": len(files), "characters": sum(map(len, texts)), "questions": len(asked)}
    return {"servers": servers, **counts, "load_average": os.getloadavg()[0]}


def _figures(asked: Sequence[Any], found: Sequence[Sequence[str]], **times: Any) -> dict[str, Any]:
    """Share of questions with an answer in the first results, and how long these are."""

    def has(texts: Sequence[str], answers: Sequence[str]) -> bool:
        return any(answer in text for text in texts for answer in answers)

    pairs = [(texts, one["answers"]) for texts, one in zip(found, asked, strict=True)]
    recall = {str(k): sum(has(t[:k], a) for t, a in pairs) / len(pairs) for k in RANKS}
    characters = sum(len(text) for texts in found for text in texts[:5]) / len(found)
    return {"recall": recall, "characters": characters, **times}


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

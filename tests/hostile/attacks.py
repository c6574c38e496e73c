"""Attacks at full size, and what they cost: seconds, and the most memory that was used."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psutil
from campaign import Cases, Report, Result
from hostile.test_bank_claims import BAD_NUMBERS, BESIDE, use
from hostile.test_checkpoints import (
    HOSTILE_TEMPLATES,
    backtracks,
    beyond,
    changed,
    decodes_doubled,
    device,
    doubles,
    panics,
    pipe,
    sparse,
)
from hostile.test_documents import attributes, endless_pdf, tall_table, wide_cell
from hostile.test_server import HEAD, MANY, half_sent, headers
from hostile.wire import exchange, watching
from load.target import Target, serving
from stored_banks import META, append, change
from unit.server.test_tools import VERSIONS, message

from sedem.bank.file import BankFile
from sedem.checkpoint.folder import MANIFEST, seal
from sedem.errors import SedemError
from sedem_serve.server.guard import WRONG_KEYS, WRONG_KEYS_RATE
from sedem_serve.server.tools import SESSIONS

HEALTH_SECONDS = 0.2
"""Median time in which /health is to answer during an attack."""
SERVER_BYTES = 400 * 2**20
"""Memory that an attack may add to a server."""
CASE_SECONDS, CASE_BYTES = 150, 3 * 2**30
"""What one file may cost: the limits of its process, its start and what the library needs."""
NANO = Path(__file__).parents[2] / "checkpoints" / "sedem-nano"


# Against a server


def peak_bytes(process: int) -> int:
    """The most memory that a process has used."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) * 1024


@contextmanager
def attacked(target: Target, result: Result) -> Iterator[None]:
    """Note what the block costs a server and those who ask it for /health."""
    before, began = peak_bytes(target.process.pid), time.monotonic()
    with watching(target.url) as seen:
        yield
    added = peak_bytes(target.process.pid) - before
    result.figures |= {
        "seconds": f"{time.monotonic() - began:.1f}",
        "/health, median": f"{1e3 * seen.median:.0f} ms",
        "/health, slowest": f"{1e3 * max(seen):.0f} ms",
        "memory added at most": f"{added / 2**20:.0f} MB",
    }
    result.require(seen.median < HEALTH_SECONDS, f"/health took {seen.median:.2f} s")
    result.require(added < SERVER_BYTES, f"the server took {added / 2**20:.0f} MB")


HEADS = {
    "header of 500 MB": (HEAD, b"X-Long: ", *[b"a" * 2**20] * 500),
    "path of 500 MB": (b"GET /", *[b"a" * 2**20] * 500),
    "100,000 headers": (HEAD, headers(100_000)),
}


def heads(points: int, folder: Path, seed: int) -> Result:
    """Send heads without a key, several at once."""
    result = Result("requests")

    def send(kind: str) -> None:
        with result.case(kind, kind):
            answer = exchange(target.url, *HEADS[kind])
            assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]

    with serving(folder) as target, attacked(target, result), ThreadPoolExecutor(4) as attackers:
        list(attackers.map(send, islice(cycle(HEADS), points)))
    return result


def half_requests(points: int, folder: Path, seed: int) -> Result:
    """Hold connections whose requests never arrive."""
    result = Result("connections")
    with serving(folder) as target, half_sent(target.url, points), attacked(target, result):
        result.cases["half a request"] += points
        time.sleep(5)
    return result


def bodies(points: int, folder: Path, seed: int) -> Result:
    """Send bodies of 8 MiB with a key, several at once, also to the tools."""
    result = Result("requests")
    long = {"name": "search", "arguments": {"question": "a" * (8 * 2**20 - 500)}}
    calls = {
        "a long question to a tool": {"method": "tools/call", "params": long},
        "a method that is long": {"method": "a" * (8 * 2**20 - 500)},
    }
    wire = {kind: json.dumps({"jsonrpc": "2.0", "id": 1, **one}) for kind, one in calls.items()}
    kinds = [*((kind, "/v1/chat/completions") for kind in MANY)]
    kinds += [(kind, "/mcp") for kind in (*MANY, *wire)]

    def send(case: tuple[str, str]) -> None:
        kind, path = case
        with result.case(path, kind):
            known = {**target.headers, "Content-Type": "application/json"}
            known["Accept"] = "application/json, text/event-stream"
            body = wire.get(kind) or MANY[kind]
            told = httpx.post(target.url + path, content=body, headers=known, timeout=60)
            assert told.status_code < 500 and "Traceback" not in told.text, told
            assert told.status_code != 200 or '"isError":true' in told.text, told

    with serving(folder) as target, attacked(target, result), ThreadPoolExecutor(4) as attackers:
        list(attackers.map(send, islice(cycle(kinds), points)))
    return result


def _sessions(target: Target, result: Result, number: int) -> None:
    """Begin a session of an agent, which is not ended."""
    about = {"clientInfo": {"name": "raw", "version": "1"}, "capabilities": {}}
    begin = message(VERSIONS[0], "initialize", protocolVersion=VERSIONS[0], **about)
    with result.case("session", "session"):
        told = httpx.post(f"{target.url}/mcp", json=begin, headers=_agent(target), timeout=60)
        assert told.status_code == (200 if number < SESSIONS else 503), told


def _scopes(target: Target, result: Result, number: int) -> None:
    """Limit a search to very many patterns."""
    scope = ";".join(f"*{n}*a*" for n in range(100_000))
    arguments = {"name": "search", "arguments": {"question": "Who?", "scope": scope}}
    call = message(VERSIONS[-1], "tools/call", **arguments)
    headers = {**_agent(target), "Mcp-Method": "tools/call", "Mcp-Name": "search"}
    headers["MCP-Protocol-Version"] = VERSIONS[-1]
    with result.case("scope", "scope"):
        told = httpx.post(f"{target.url}/mcp", json=call, headers=headers, timeout=60)
        assert "at most 100 are compared" in told.text, told.text[:300]


def _wrong_keys(target: Target, result: Result, number: int) -> None:
    """Try a key."""
    wrong = {"Authorization": f"Bearer wrong-key-of-a-stranger-{number}"}
    with result.case("wrong key", "wrong key"):
        told = httpx.get(f"{target.url}/v1/banks", headers=wrong, timeout=60)
        assert told.status_code in (401, 429), told
        result.count(f"{told.status_code}")


def _agent(target: Target) -> dict[str, str]:
    return {**target.headers, "Accept": "application/json, text/event-stream"}


def agents(points: int, folder: Path, seed: int) -> Result:
    """Begin sessions, give scopes of many patterns, and then try keys, several at once."""
    result, began = Result("requests"), time.monotonic()
    with serving(folder) as target, attacked(target, result):
        for kind in (_sessions, _scopes, _wrong_keys):
            # Sessions are counted, so they begin one after the other.
            with ThreadPoolExecutor(1 if kind is _sessions else 4) as attackers:
                list(attackers.map(partial(kind, target, result), range(points // 3)))
            began = time.monotonic() if kind is not _wrong_keys else began
    most = WRONG_KEYS + (time.monotonic() - began) * WRONG_KEYS_RATE + 4
    result.require(result.counts["401"] <= most, f"{result.counts['401']} wrong keys were compared")
    return result


# Files, each opened in a process of its own


def opened(
    result: Result,
    kind: str,
    work: Callable[[Path], object],
    path: Path,
    usual: Path,
    words: str = "",
) -> None:
    """Note what opening a file costs beyond a usual one, and whether it is rejected as it should.

    Args:
        words: a pattern that the one sentence of the error must have; empty means it is opened.
    """
    with result.case("opened", kind), multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_told, (work, usual)) is None
        process = psutil.Process(pool.apply(os.getpid))
        before, peak, began = resident(process), 0, time.monotonic()
        pending = pool.apply_async(_told, (work, path))
        while not pending.ready():
            peak = max(peak, resident(process) - before)
            pending.wait(0.02)
        told, seconds = pending.get(), time.monotonic() - began
        result.figures[kind] = f"{seconds:.1f} s, {peak / 2**20:.0f} MB"
        if words:
            assert told and "\n" not in told and re.search(words, told), told
        else:
            assert told is None, told
        assert seconds < CASE_SECONDS and peak < CASE_BYTES, result.figures[kind]


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process and those that it started."""
    found = 0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found += one.memory_info().rss
    return found


def _told(work: Callable[[Path], object], path: Path) -> str | None:
    """Open a file; the error, if there is one."""
    try:
        work(path)
    except SedemError as error:
        return str(error)
    return None


def _read(path: Path) -> None:
    from sedem.reading.documents import read_document

    read_document(path)


DOCUMENTS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a cell that spans 10^9 columns": ("a.docx", wide_cell, ""),
    "a table of 90,000 cells": ("a.docx", lambda: tall_table(900, 100), ""),
    "a page of 4,000,000 commands": ("a.pdf", endless_pdf, "maximum number of tokens"),
    "500,000 attributes": ("a.html", lambda: attributes(500_000), "needs more than"),
    "1,000,000 open elements": ("a.html", lambda: b"<b>a" * 10**6, "Excessive depth"),
}


def documents(points: int, folder: Path, seed: int) -> Result:
    """Read documents, with the usual limits."""
    result, usual = Result("files"), folder / "usual.txt"
    usual.write_text("The rent is 900 euros.")
    for kind, (name, content, words) in islice(DOCUMENTS.items(), points):
        path = folder / name
        path.write_bytes(content())
        opened(result, kind, _read, path, usual, words)
    return result


def _open(folder: Path) -> None:
    from sedem import SeDeM

    decoder = SeDeM.from_pretrained(folder).decoder
    if decoder.chat_tokenizer.chat_template:
        assert decoder.chat


TOKENIZERS = {
    doubles: "makes a text more than 64 times as long",
    decodes_doubled: "makes a text more than 64 times as long",
    backtracks: "cannot be read",
    panics: "cannot be read",
    beyond: "has the id 70000",
}
PUT = (pipe, device, sparse)


def _with_template(text: str, words: str, copy: Path) -> str:
    (copy / "backbone" / "chat_template.jinja").write_text(text)
    seal(copy)
    return words


def _with_tokenizer(change: Callable[[dict[str, Any]], None], copy: Path) -> str:
    changed(copy / "backbone", change)
    seal(copy)
    return TOKENIZERS[change]


def _with_manifest(put: Callable[[Path], str], copy: Path) -> str:
    (copy / MANIFEST).unlink()
    return put(copy / MANIFEST)


CHECKPOINTS: dict[str, Callable[[Path], str]] = {
    **{
        f"template that {kind}": partial(_with_template, text, words.replace("4 s", "30 s"))
        for kind, (text, words) in HOSTILE_TEMPLATES.items()
    },
    **{f"tokenizer: {change.__name__}": partial(_with_tokenizer, change) for change in TOKENIZERS},
    **{f"manifest: {put.__name__}": partial(_with_manifest, put) for put in PUT},
}
"""What makes a checkpoint hostile; it returns the words of the error."""


def checkpoints(points: int, folder: Path, seed: int) -> Result:
    """Open checkpoints with a hostile template, tokenizer or file."""
    result = Result("checkpoints")
    # Nothing that was tried before is known.
    os.environ["SEDEM_CACHE"] = str(folder / "cache")
    for number, (kind, alter) in enumerate(islice(CHECKPOINTS.items(), points)):
        copy = Path(shutil.copytree(NANO, folder / str(number)))
        words = alter(copy)
        opened(result, kind, _open, copy, NANO, words)
    return result


def _sql(statement: str, words: str, path: Path) -> str:
    change(path, statement)
    return words


def _beside(put: Callable[[Path], None], path: Path) -> str:
    put(path)
    return "does not belong to the bank beside it"


MANY_ROWS = (
    "WITH RECURSIVE n(i) AS (SELECT 100 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000) "
    "INSERT INTO words (rowid, name, text) SELECT i, 'says', 'says' FROM n"
)
BANKS: dict[str, Callable[[Path], str]] = {
    f"bank: {kind}": partial(_sql, statement, words)
    for kind, (statement, words) in {
        "10^9 blocks": ("UPDATE bank SET blocks = 1000000000", "is empty or malformed"),
        "NaN": (BAD_NUMBERS.format("C07F"), "infinities or NaN"),
        "a name of 50 MB": (
            "UPDATE documents SET name = replace(hex(zeroblob(25000000)), '0', 'n')",
            "name of a document are longer",
        ),
        "a span of 2^62 characters": (
            f'UPDATE documents SET characters = {2**62}; UPDATE blocks SET "end" = {2**62 - 1}',
            "too long for its tokens|lies outside its text",
        ),
        "an index of 1,000,000 rows": (MANY_ROWS, "more rows than it has blocks"),
    }.items()
} | {f"bank: {put.__name__.replace('_', ' ')}": partial(_beside, put) for put in BESIDE}
"""What makes a bank hostile; it returns the words of the error."""


def banks(points: int, folder: Path, seed: int) -> Result:
    """Open, list, search and cite banks of strangers."""
    result = Result("banks")
    for number, (kind, alter) in enumerate(islice(BANKS.items(), points)):
        usual, path = folder / f"{number}-usual.bank", folder / str(number) / "a.bank"
        path.parent.mkdir()
        for one in (usual, path):
            with BankFile(one).creating(META) as file:
                append(file, 0, 1)
        words = alter(path)
        before = path.read_bytes()
        opened(result, kind, use, path, usual, words)
        result.require(path.read_bytes() == before, f"{kind}: the bank was changed")
    return result


CAMPAIGNS = {
    "heads": Cases(
        heads,
        48,
        "Heads of 500 MB and of 100,000 headers without a key, four at once: each is answered with "
        "431, and /health within 0.2 s (median)",
    ),
    "half-sent requests": Cases(
        half_requests,
        2000,
        "Connections that send half a request: /health answers within 0.2 s (median)",
    ),
    "bodies": Cases(
        bodies,
        54,
        "Bodies of 8 MiB with as many values as they hold, four at once, also to /mcp: each is "
        "rejected, and /health answers within 0.2 s (median)",
    ),
    "agents": Cases(
        agents,
        1200,
        "Sessions of agents without end, scopes of 100,000 patterns, and wrong keys: sessions and "
        "keys are bounded, scopes are rejected, and /health answers within 0.2 s (median)",
    ),
    "banks": Cases(
        banks,
        len(BANKS),
        "Banks with false counts, NaN, a name of 50 MB, an index without blocks, and a log or "
        "journal of another database beside them: rejected in one sentence, and unchanged",
    ),
    "documents": Cases(
        documents,
        len(DOCUMENTS),
        "Files whose parsers need much: read, or rejected in one sentence, within the limits",
    ),
    "checkpoints": Cases(
        checkpoints,
        len(CHECKPOINTS),
        "Templates and tokenizers that loop, grow or fail, pipes, devices and files of a terabyte: "
        "opened, or rejected in one sentence, within the limits",
    ),
}
REPORT = Report(
    Path(__file__).with_name("report.json"),
    Path(__file__).parents[2] / "experiments" / "faults.md",
    "attack",
    CAMPAIGNS,
    ("h11", "pypdf", "python-docx", "lxml", "tokenizers", "jinja2"),
    long=5,
)

"""The server of tools for agents: what it finds, its times, and what an agent reads with it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bm25s.stopwords import STOPWORDS_EN_PLUS

from experiments.system.cells import Cell, checkpoint_of
from experiments.system.scales import ROOT, SQUAD, Scale
from sedem import SeDeM
from sedem_lab.evaluation.metrics import summarize

if TYPE_CHECKING:
    from mcp.client import Client

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
    found, times = list[list[str]](), list[float]()
    began = time.perf_counter()
    async with _server(checkpoint, PAPERS, home) as (client, started):
        for one in asked:
            since = time.perf_counter()
            result = await _search(client, one["question"], 5)
            times.append(time.perf_counter() - since)
            if len(times) == 1:
                first = time.perf_counter() - began
            found.append([passage["text"] for passage in result.structured_content["results"]])
    return found, {"started_s": started, "first_s": first, "search_s": median(times)}


@asynccontextmanager
async def _server(
    checkpoint: str | Path, folder: Path, home: str
) -> AsyncIterator[tuple[Client, float]]:
    """The server once it has read a folder, and the seconds until it listed its tools."""
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    words = ["-c", _START, "mcp", str(folder), "--home", home, "-m", str(checkpoint)]
    server = StdioServerParameters(command=sys.executable, args=words, env={**os.environ})
    began = time.perf_counter()
    async with Client(stdio_client(server)) as client:
        await client.list_tools()
        started = time.perf_counter() - began
        while (await client.call_tool("documents", {})).structured_content["notes"]:
            await asyncio.sleep(0.1)  # until all is read
        yield client, started


async def _search(client: Client, question: str, k: int, skip: int = 0) -> Any:
    wanted = {"question": question, "k": k, "skip": skip}
    while (result := await client.call_tool("search", wanted)).is_error:
        pass  # the model of a busy machine is still being opened
    return result


# What an agent reads

PARTS = 3
"""Files of an article of SQuAD."""
CALLS, WORDS, MATCHES, PASSAGES = 12, 3, 50, 3
"""Most calls for a question, words that are searched for before anything is read, most lines that a
search for a word shows, and passages of a search of sedem."""
PAGE = 2_000
"""Characters that are read around a place."""
LONG_LINE = re.compile(r"(?=[^\n]{101})([^\n]{60,99}) ")
Calls = AsyncIterator[tuple[str, list[tuple[str, int, int]]]]
"""What each call returns: a text, and what it shows of files, by file, start and end."""


class Line(NamedTuple):
    """A line of a file, from a character on."""

    file: str
    number: int
    start: int
    text: str


def folder(scale: Scale, data: Path) -> tuple[dict[str, str], dict[str, tuple[str, int, int]]]:
    """Texts of files by name, and about each a question with the span of its answer.

    The articles of SQuAD that no training reads are cut into parts; such papers of COVID-QA are
    whole. Lines have about 100 characters.
    """
    texts = dict[str, str]()
    asked = defaultdict[str, list[tuple[str, int, int]]](list)
    for article in json.loads((data / SQUAD["source"]).read_text(encoding="utf-8"))["data"]:
        paragraphs = article["paragraphs"]
        for part in range(PARTS):
            first, end = (len(paragraphs) * number // PARTS for number in (part, part + 1))
            file, text = f"{article['title']}-{part + 1}.txt", ""
            for paragraph in paragraphs[first:end]:
                for one in paragraph["qas"]:
                    start = len(text) + one["answers"][0]["answer_start"]
                    span = start, start + len(one["answers"][0]["text"])
                    asked[file].append((one["question"], *span))
                text += f"{paragraph['context']}\n\n"
            texts[file] = text
    for example in scale.sets["qasper"].examples(data):
        [document], answer = example.documents, example.evidence[0]
        file = f"{document.name.replace(' ', '-')}.txt"
        texts[file] = document.text
        asked[file].append((example.question, answer.start, answer.end))
    drawn = random.Random(0)
    # Spaces become ends of lines, so that no place moves.
    lines = {file: LONG_LINE.sub(r"\1\n", texts[file]) for file in sorted(asked)}
    return lines, {file: drawn.choice(asked[file]) for file in lines}


async def with_files(lines: Sequence[Line], question: str, counted: bool) -> Calls:
    """Search for words of a question and read around them, as one does with grep.

    The words are those of the question that are not common. If they are `counted`, the first call
    counts the lines with each word and each pair of neighbours, and the rarest go first; if not,
    names and numbers go first, then the longest. Three calls show the lines with one of them each.
    Then pages are read: each around the shown line that has most of the words on its page. When
    none is left, the next word is searched for.
    """

    def matching(term: str) -> list[Line]:
        return [line for line in lines if term.lower() in line.text.lower()]

    def around(place: Line, given: Iterable[Line]) -> list[Line]:
        same = (line for line in given if line.file == place.file)
        return [line for line in same if abs(line.start - place.start) < PAGE / 2]

    every = [word.removesuffix("'s") for word in re.findall(r"\w+(?:[-.,']\w+)*", question)]
    terms = list(dict.fromkeys(word for word in every if word.lower() not in STOPWORDS_EN_PLUS))
    if counted:
        terms += [f"{one} {two}" for one, two in pairwise(every) if {one, two} <= {*terms}]
        counts = {term: len(matching(term)) for term in terms}
        yield "\n".join(f"{term}: {count}" for term, count in counts.items()), []
        terms = sorted(filter(counts.get, counts), key=lambda term: counts[term])
    else:
        plain = {word for word in terms if word[0].islower() or word == every[0]}
        terms.sort(key=lambda word: (word in plain, -len(word)))
    found, read, left, searched = defaultdict[Line, set[str]](set), set[Line](), list[Line](), 0

    def words(line: Line) -> int:
        return len(set().union(*(found[one] for one in around(line, found))))

    while terms or left:
        if terms and (searched < WORDS or not left):
            term, searched = terms.pop(0), searched + 1
            every_hit = matching(term)
            hits = every_hit[:MATCHES]
            for line in hits:
                found[line].add(term)
            left += [line for line in hits if line not in read]
            shown = [f"{line.file}:{line.number}:{line.text}" for line in hits]
            places = [(line.file, line.start, line.start + len(line.text)) for line in hits]
            yield "\n".join([f"{len(every_hit)} lines", *shown]), places
        else:
            best = max(left, key=words)
            page = around(best, lines)
            read.update(page)
            left = [line for line in left if line not in read]
            text, start = "\n".join(line.text for line in page), page[0].start
            yield text, [(best.file, start, start + len(text))]


async def with_sedem(client: Client, question: str) -> Calls:
    """Search for three passages and for the next three, read around each, and search on."""
    passages = list[Any]()
    for number in range(CALLS):
        result: Any = await _search(client, question, PASSAGES, number * PASSAGES)
        found = result.structured_content["results"]
        passages += found
        yield result.content[0].text, [_place(one["id"]) for one in found]
        for passage in passages if number == 1 else ():
            around = {"document": passage["id"], "length": PAGE}
            result = await client.call_tool("read", around)
            part = result.structured_content
            place = f"{part['document']}:{part['start']}-{part['end']}"
            yield result.content[0].text, [_place(place)]


def _place(name: str) -> tuple[str, int, int]:
    document, _, span = name.partition("/")[2].rpartition(":")
    start, end = map(int, span.split("-"))
    return document, start, end


def agent_savings(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """What a scripted agent reads with tools for files, and with those of `sedem mcp`.

    An agent answers a question about each file of a folder. It stops when it has read the answer
    where it stands, or after 12 calls. By way, `with_files` or `with_sedem`: tokens, calls and
    seconds of a question, and the share of questions whose answer was read.
    """
    texts, asked = folder(scale, data)
    checkpoint = checkpoint_of(cell, scale, data)
    token_ids = SeDeM.from_pretrained(checkpoint).encoder.token_ids
    answers = defaultdict[str, list[tuple[list[str], bool, float]]](list)
    lines = list[Line]()
    for file, text in texts.items():
        start = 0
        for number, line in enumerate(text.split("\n"), 1):
            lines.append(Line(file, number, start, line))
            start += len(line) + 1

    async def answer(files: Path, home: str) -> dict[str, float]:
        """Answer in every way; the tokens of what tells of sedem's tools, and seconds to read."""
        began = time.perf_counter()
        async with _server(checkpoint, files, home) as (client, _):
            seconds = time.perf_counter() - began
            tools = (await client.list_tools()).tools
            parts = [(one.name, one.description, one.input_schema) for one in tools]
            told = f"{client.instructions}\n{json.dumps(parts)}"
            await _search(client, "Is the model open?", 1)
            ways: dict[str, Callable[[str], Calls]] = {
                "counted": partial(with_files, lines, counted=True),
                "longest": partial(with_files, lines, counted=False),
                "sedem": partial(with_sedem, client),
            }
            for file, (question, start, end) in asked.items():
                evidence = {at for at in range(start, end) if not texts[file][at].isspace()}
                for way, calls in ways.items():
                    read, unread, began = list[str](), evidence, time.perf_counter()
                    async for text, places in calls(question):
                        read.append(text)
                        for shown, first, last in places:
                            unread = unread.difference(range(first, last) if shown == file else ())
                        if not unread or len(read) == CALLS:
                            break
                    answers[way].append((read, not unread, time.perf_counter() - began))
        return {"told": len(token_ids(told)), "read_s": seconds}

    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as place:
        files = Path(place) / "files"
        files.mkdir()
        for file, text in texts.items():
            (files / file).write_text(text, encoding="utf-8", newline="")
        spent = asyncio.run(answer(files, f"{place}/home"))
    ways = dict[str, Any]()
    by_all = [all(found for _, found, _ in each) for each in zip(*answers.values(), strict=True)]
    for way, own in answers.items():
        tokens = [sum(len(token_ids(text)) for text in read) for read, _, _ in own]
        same = [count for count, every in zip(tokens, by_all, strict=True) if every]
        ways[way] = {
            "tokens": summarize(tokens),
            "median": median(tokens),
            "same": summarize(same) if same else None,
            "calls": summarize([len(read) for read, _, _ in own]),
            "found": summarize([100 * found for _, found, _ in own]),
            "seconds": median(seconds for _, _, seconds in own),
        }
    return {
        **{"ways": ways, "files": len(texts), "characters": sum(map(len, texts.values()))},
        **{"questions": len(asked), "by_all": sum(by_all), "seed": 0, **spent},
        "load_average": [*load, os.getloadavg()[0]],
    }

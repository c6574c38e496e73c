"""Answers that somebody's own model writes, from numbered quotations that sedem finds.

The model reads text alone; what was found, and where it stands, is sedem's. A question about
everything is answered from whole documents: what exceeds one prompt is read part by part, noted,
and answered from the notes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from sedem.answering.decoding import UNANSWERABLE, Decoding
from sedem.answering.passages import find_passages
from sedem.answering.running import Estimate, Event, Selected, answer_events
from sedem.answering.spans import ABOUT_ALL
from sedem.backbone.prompts import Turn
from sedem.bank.memory_bank import Snapshot
from sedem.engine.interface import Engine
from sedem.errors import ReaderError
from sedem.folding import written
from sedem.guidance.spans import is_exact, unsupported
from sedem.method.segments import sentences_of
from sedem.method.selector import ALL
from sedem.modules import SedemModules
from sedem.selecting.plan import Request
from sedem.selecting.select import document_indexes
from sedem.types import Answer, Citation, page_of

PASSAGES = 8
"""Passages that a question is answered from."""
MANY = 5
"""Words side by side that an answer takes from a passage, though none is a name or a number."""
MOST = 240_000
"""Characters that are read for a question about everything, about 60,000 tokens."""

RULES = (
    "Answer the question from the numbered quotations alone. After each statement, name the "
    "quotations it comes from in brackets, such as [2]. Copy names, numbers and dates exactly. If "
    "the quotations do not answer the question, say so, and do not guess. Be brief, and answer in "
    "the language of the question."
)
NOTES = (
    "You are given one part of the documents. Write down, in a few short lines, only what it says "
    "that the request needs. Copy names, numbers and dates exactly. If it says nothing that the "
    "request needs, write: nothing."
)
NOTHING = re.compile(r"\W*nothing\W*", re.IGNORECASE)
_NUMBERS = re.compile(r"\s?\[(\d{1,4}(?:\s?[,;]\s?\d{1,4})*)\]")
"""The quotations that an answer names, such as [2] or [1, 3]."""


def events_with_readers(
    model: SedemModules,
    engine: Engine,
    name: str,
    requests: Sequence[Request],
    decoding: Decoding,
    estimated: Callable[[Estimate], None] | None = None,
) -> Generator[tuple[int, Event], None, None]:
    """Answer requests as `answer_events`, and those with a reader after the others."""

    def alone(request: Request) -> list[Answer]:
        own = answer_events(model, engine, name, [replace(request, reader=None)], decoding)
        return [event for _, event in own if isinstance(event, Answer)]

    places = [place for place, one in enumerate(requests) if one.reader is None]
    together = [requests[place] for place in places]
    for number, event in answer_events(model, engine, name, together, decoding, estimated):
        yield places[number], event
    for place, request in enumerate(requests):
        if request.reader is None:
            continue
        for event in reader_events(model, engine, request, decoding, partial(alone, request)):
            if isinstance(event, Estimate) and estimated is not None:
                estimated(event)
            yield place, event


def reader_events(
    model: SedemModules,
    engine: Engine,
    request: Request,
    decoding: Decoding,
    own: Callable[[], Sequence[Answer]],
) -> Iterator[Event]:
    """Answer a question by its reader.

    Args:
        own: gives the model's own answer, which is offered where the reader gives none.

    Yields:
        The passages, how long it takes if that is long, the answer in pieces, and as a whole.

    Raises:
        ReaderError: the reader failed within its reply.
        SedemError: as `find_passages`.
    """
    reader, began, timings = request.reader, time.perf_counter(), dict[str, float]()
    assert reader is not None

    def mark(stage: str) -> None:
        timings.setdefault(stage, (time.perf_counter() - began) * 1e3)

    fields: dict[str, Any] = {"temperature": decoding.temperature}
    if decoding.max_new_tokens != Decoding.max_new_tokens:  # which is for answers of a few words
        fields["max_tokens"] = decoding.max_new_tokens
    if decoding.temperature:
        fields |= {"top_p": decoding.top_p, "seed": decoding.seed}
    if decoding.stop:
        fields["stop"] = list(decoding.stop)

    # What the question needs: its best passages, or everything.
    count = request.k if isinstance(request.k, int) else PASSAGES
    quoted, selection = find_passages(model, engine, replace(request, k=None), count)
    bank, cut = request.bank.snapshot(), list[str]()
    if request.k == ALL or ABOUT_ALL.search(request.question):
        quoted, cut = parts_of(bank, request.documents, quoted, reader.room // 2)
    else:
        fitting = max(1, len(next(packed([one.text for one in quoted], reader.room), ())))
        if fitting < len(quoted):
            cut.append(
                f"{len(quoted) - fitting:,} of {len(quoted):,} passages were left out: the reader "
                f"takes {reader.context:,} tokens"
            )
        quoted = quoted[:fitting]
    mark("select_ms")
    indexes = tuple(document_indexes(bank, [one.document])[0] for one in quoted)
    declined = selection.declined and request.min_confidence is not None
    yield Selected(tuple(quoted), indexes, selection.confidence, declined)

    # The reply, unless the reader fails before it says anything.
    said, thought = list[str](), list[str]()
    try:
        sections = [quotation(number, one) for number, one in enumerate(quoted, start=1)]
        # What exceeds one prompt is read part by part first, and noted.
        while not declined and sum(map(len, sections)) > reader.room:
            since, notes, parts = time.perf_counter(), list[str](), [*packed(sections, reader.room)]
            for number, part in enumerate(parts, start=1):
                asked = prompt_of(NOTES, (), "\n\n".join(part), f"Request: {request.question}")
                note = "".join(t for inner, t in reader.reply(asked, fields) if not inner)
                if not NOTHING.fullmatch(note):
                    notes.append(note.strip())
                if number == 1 and len(parts) > 1:
                    seconds = time.perf_counter() - since
                    yield Estimate(seconds * (len(parts) - 1), len(parts))
                yield ""  # whoever waits may have left
            shorter = sum(map(len, notes)) < sum(map(len, sections)) / 2
            sections = notes if shorter else next(packed(notes, reader.room))
        systems = [words for role, words in request.turns if role == "system"]
        before = [(role, words) for role, words in request.turns if role != "system"]
        question = f"Question: {request.question}"
        # A conversation without documents has neither rules nor quotations.
        if not len(bank):
            rules, question = systems, request.question
        else:
            rules = [RULES, *systems]
        asked = prompt_of("\n\n".join(rules), before, "\n\n".join(sections), question)
        reply = iter([(False, UNANSWERABLE)])
        if not declined:
            reply = reader.reply(asked, fields | {**request.passed})
        for inner, text in reply:
            mark("ttft_ms")
            (thought if inner else said).append(text)
            if not inner:
                yield text
    except ReaderError as error:
        if said:
            raise
        (answer,) = own()
        yield answer.text
        yield replace(answer, cut=(*answer.cut, f"this is sedem's own answer: {error}"))
        return
    mark("ttft_ms")
    mark("total_ms")
    text = "".join(said).strip()
    sources = [request.question, *(s for one in quoted for s in (one.document, one.text))]
    yield Answer(
        text=text,
        citations=tuple(cited(text, quoted)),
        k=len(quoted),
        blocks=len(bank),
        timings=timings,
        finish_reason="unanswerable" if declined else "end",
        model=reader.name,
        cut=tuple(cut),
        stored_bytes=bank.memory_bytes,
        context_tokens=bank.tokens,
        confidence=selection.confidence,
        unsupported=() if declined else invented(text, sources),
        reasoning="".join(thought).strip(),
    )


def parts_of(
    bank: Snapshot, documents: Sequence[int | str] | None, best: Sequence[Citation], size: int
) -> tuple[list[Citation], list[str]]:
    """Return whole documents in reading order, in parts of sentences, up to `MOST` characters.

    Args:
        documents: those to read; None means those with the best passages first, then the others.
        best: the best passages.
        size: most characters of a part.

    Returns:
        The parts, and a sentence for what was left out.
    """
    if documents is not None:
        wanted = document_indexes(bank, documents)
    else:
        first = document_indexes(bank, [one.document for one in best]) if best else []
        wanted = [*dict.fromkeys([*first, *range(len(bank.documents))])]
    read, room, cut = dict[int, int](), MOST, list[str]()
    for index in wanted:
        if not room:
            break
        read[index] = min(bank.documents.characters(index), room)
        room -= read[index]
    left = sum(bank.documents.characters(index) for index in wanted) - sum(read.values())
    if left:
        cut.append(
            f"the question is about everything, and the last {left:,} characters were not read: "
            f"the limit is {MOST:,}; name the documents to read"
        )
    parts = list[Citation]()
    for index in sorted(read):
        name, pages = bank.documents.name(index), bank.documents.pages(index)
        text = bank.documents.text(index, 0, read[index])
        for start, end in windows(sentences_of(text), size):
            page = page_of(pages, start)
            parts.append(Citation(len(parts) + 1, name, start, end, None, text[start:end], page))
    return parts, cut


def windows(borders: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive spans of at most `size` characters, cut at borders if possible."""
    start, last = borders[0], borders[0]
    for border in borders[1:]:
        if border - start > size and last > start:
            yield start, last
            start = last
        while border - start > size:
            yield start, start + size
            start += size
        last = border
    if last > start:
        yield start, last


def packed(texts: Sequence[str], room: int) -> Iterator[list[str]]:
    """Yield texts in groups of at most `room` characters; a longer text is cut."""
    group = list[str]()
    for text in texts:
        if group and sum(map(len, group)) + len(text) > room:
            yield group
            group = []
        group.append(text[:room])
    if group:
        yield group


def quotation(number: int, citation: Citation) -> str:
    """Return a passage as the reader sees it, under its number and place."""
    page = "" if citation.page is None else f", page {citation.page}"
    return f"[{number}] {citation.document}{page}\n{citation.text}"


def prompt_of(rules: str, turns: Sequence[Turn], sections: str, asked: str) -> list[dict[str, str]]:
    """Return the messages to a reader: rules, what was said before, quotations and a question."""
    asked = "\n\n".join(filter(None, [sections, asked]))
    messages = [("system", rules), *turns, ("user", asked)]
    return [{"role": role, "content": words} for role, words in messages if words]


def invented(text: str, sources: Sequence[str]) -> tuple[str, ...]:
    """Return the names and numbers of a reader's answer that stand in no source.

    Its other words are its own.
    """
    return tuple(filter(is_exact, unsupported(said_in(text), sources)))


def said_in(text: str) -> str:
    """Return an answer without the numbers of quotations, and without capitals of sentences."""
    plain = _NUMBERS.sub("", text)
    for at in sentences_of(plain)[:-1]:
        at += len(plain[at:]) - len(plain[at:].lstrip())
        plain = plain[:at] + plain[at : at + 1].lower() + plain[at + 1 :]
    return plain


def cited(text: str, quoted: Sequence[Citation]) -> Iterator[Citation]:
    """Mark in passages what an answer takes from them, to the character.

    A passage that is named gets the answer's words that stand in it side by side, if a name or a
    number is among them or if they are many; its whole text if there are none. If none is named,
    all may be the source.
    """
    named = {int(n) for found in _NUMBERS.finditer(text) for n in re.findall(r"\d+", found[1])}
    plain = said_in(text)
    answer = [plain[one.start : one.end] for one in written(plain)]
    for number, one in enumerate(quoted, start=1):
        if named and number not in named:
            yield one
            continue
        words = [*written(one.text)]
        texts = [one.text[word.start : word.end] for word in words]
        there, said = ([word.casefold() for word in every] for every in (texts, answer))
        same = SequenceMatcher(None, there, said, autojunk=False).get_matching_blocks()
        spans = tuple(
            (one.start + words[a].start, one.start + words[a + size - 1].end)
            for a, b, size in same
            if any(map(is_exact, answer[b : b + size])) or size >= MANY
        )
        yield replace(one, answer_spans=spans or (((one.start, one.end),) if named else ()))

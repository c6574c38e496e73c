"""Answers that somebody's own model writes, from numbered quotations that sedem finds.

The model reads text alone; what was found, and where it stands, is sedem's. A question about
everything is answered from whole documents: what exceeds one prompt is read part by part, noted,
and answered from the notes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from sedem.answering.decoding import UNANSWERABLE, Decoding
from sedem.answering.passages import find_passages
from sedem.answering.running import CallPiece, Estimate, Event, Selected
from sedem.answering.spans import ABOUT_ALL
from sedem.bank.memory_bank import Snapshot
from sedem.endpoint import CALLED, CLOSE, ENDED, SAID, THOUGHT, Piece, whole_calls
from sedem.engine.interface import Engine
from sedem.errors import ReaderError
from sedem.folding import written
from sedem.guidance import is_exact, unsupported
from sedem.method.segments import sentences_of
from sedem.method.selector import ALL
from sedem.modules import SedemModules
from sedem.selecting.plan import Request, Selection
from sedem.selecting.select import document_indexes
from sedem.types import Answer, Citation

PASSAGES = 8
"""Passages that a question is answered from."""
MANY = 5
"""Words side by side that an answer takes from a passage, though none is a name or a number."""
MOST = 240_000
"""Characters that are read for a question about everything, about 60,000 tokens."""

FEW = 4
"""Prompts that are filled with whole documents, if only the words of a question ask for it."""

RULES = (
    "Answer the question from the numbered quotations alone. After each statement, name the "
    "quotations it comes from in brackets, such as [2]. Copy names, numbers and dates exactly. If "
    "the quotations do not answer the question, say so, and do not guess. Be brief, and answer in "
    "the language of the question."
)
TOOLS = (
    "If the quotations are not enough, call the tools that help. What they return may be used like "
    "a quotation."
)
NOTES = (
    "You are given one part of the documents. Write down, in a few short lines, only what it says "
    "that the request needs. Copy names, numbers and dates exactly. If it says nothing that the "
    "request needs, write: nothing."
)
CUT = {
    "length": "the answer was cut off at the reader's limit",
    "content_filter": "the answer was cut off by the reader's filter",
    None: "the reader does not say how its reply ended; it may be cut off",
}
"""What is told of a reply by why it ended."""
NOTHING = re.compile(r"\W*nothing\W*", re.IGNORECASE)
_NUMBERS = re.compile(r"\s?\[(\d{1,4}(?:\s?[,;]\s?\d{1,4})*)\]")
"""The quotations that an answer names, such as [2] or [1, 3]."""
_ITEM = re.compile(r"^[ \t]*\d{1,3}[.)][ \t]+", re.MULTILINE)
"""The number of an item of a list, which is none of the answer's."""


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
        The passages, how long it takes if that is long, the answer or calls of tools in pieces,
        and all as a whole.

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

    # What the question needs
    bank = request.bank.snapshot()
    quoted, selection, cut = quoted_for(model, engine, request, reader.room)
    mark("select_ms")
    indexes = tuple(document_indexes(bank, [one.document])[0] for one in quoted)
    declined = selection.declined and request.min_confidence is not None
    yield Selected(tuple(quoted), indexes, selection.confidence, declined)

    # The reply, unless the reader fails before it says anything.
    parts: dict[str, list[Any]] = {SAID: [], THOUGHT: [], CALLED: [], ENDED: []}
    try:
        sections = [quotation(number, one) for number, one in enumerate(quoted, start=1)]
        # What exceeds one prompt is read part by part first, and noted.
        while not declined and sum(map(len, sections)) > reader.room:
            since, notes, packs = time.perf_counter(), list[str](), [*packed(sections, reader.room)]
            for number, pack in enumerate(packs, start=1):
                asked = prompt_of(NOTES, (), "\n\n".join(pack), f"Request: {request.question}")
                note = "".join(text for kind, text in reader.reply(asked, fields) if kind == SAID)
                note = note.rpartition(CLOSE)[2]
                if not NOTHING.fullmatch(note):
                    notes.append(note.strip())
                if number == 1 and len(packs) > 1:
                    seconds = time.perf_counter() - since
                    yield Estimate(seconds * (len(packs) - 1), len(packs))
                yield ""  # whoever waits may have left
            if sum(map(len, notes)) > sum(map(len, sections)) / 2:
                cut.append("the notes on the parts were too long, and only the first were used")
                notes = next(packed(notes, reader.room))[:-1]
            sections = notes
        systems = [one["content"] for one in request.turns if one["role"] == "system"]
        before = [one for one in request.turns if one["role"] != "system"]
        # The newest of what was said, as far as there is room beside the quotations. Results of
        # tools need the calls before them.
        sizes = [f"{one['content'] or ''}{one.get('tool_calls', '')}" for one in reversed(before)]
        count = len(next(packed(sizes, reader.room // 4), ()))
        while count and before[len(before) - count]["role"] == "tool":
            count -= 1
        if count < len(before):
            left = len(before) - count
            cut.append(
                f"the conversation is too long; its oldest messages ({left:,}) were left out"
            )
        before = before[len(before) - count :]
        question = f"Question: {request.question}"
        # A conversation without documents has neither rules nor quotations.
        if not len(bank):
            rules, question = systems, request.question
        else:
            rules = [RULES, *([TOOLS] if "tools" in request.passed else []), *systems]
        asked = prompt_of("\n\n".join(rules), before, "\n\n".join(sections), question)
        reply: Iterator[Piece] = iter([(SAID, UNANSWERABLE), (ENDED, "stop")])
        if not declined:
            reply = reader.reply([*asked, *request.rounds], fields | {**request.passed})
        for kind, piece in reply:
            mark("ttft_ms")
            parts[kind].append(piece)
            if kind == SAID:
                yield piece
            elif kind == CALLED:
                yield CallPiece(piece)
    except ReaderError as error:
        if parts[SAID] or parts[CALLED]:
            raise
        (answer,) = own()
        yield answer.text
        yield replace(answer, cut=(*answer.cut, f"this is sedem's own answer: {error}"))
        return
    mark("ttft_ms")
    mark("total_ms")
    # The tag that opens reasoning may stand in the prompt, and only the one that closes it be sent.
    thought, _, text = "".join(parts[SAID]).rpartition(CLOSE)
    text = text.strip()
    calls, ended = tuple(whole_calls(parts[CALLED])), next(iter(parts[ENDED]), None)
    if ended in CUT:
        cut.append(CUT[ended])
    finish = "length" if ended == "length" else "tool_calls" if calls else "end"
    sources = [request.question, *(s for one in quoted for s in (one.document, one.text))]
    sources += [one["content"] for one in (*before, *request.rounds) if one["role"] == "tool"]
    yield Answer(
        text=text,
        citations=tuple(cited(text, quoted)),
        k=len(quoted),
        blocks=len(bank),
        timings=timings,
        finish_reason="unanswerable" if declined else finish,
        model=reader.model or reader.host if declined else reader.name,
        cut=tuple(cut),
        stored_bytes=bank.memory_bytes,
        context_tokens=bank.tokens,
        confidence=selection.confidence,
        unsupported=() if declined else invented(text, sources),
        reasoning="".join([*parts[THOUGHT], thought]).strip(),
        calls=calls,
    )


def quoted_for(
    model: SedemModules, engine: Engine, request: Request, room: int
) -> tuple[list[Citation], Selection, list[str]]:
    """Return what a question needs: its best passages, or whole documents.

    Args:
        room: characters of a prompt.

    Returns:
        The quotations, the selection of the best passages, and what was left out, in sentences.
    """
    count = request.k if isinstance(request.k, int) else PASSAGES
    quoted, selection = find_passages(model, engine, replace(request, k=None), count)
    cut, whole, left = list[str](), list[Citation](), 0
    # Everything, if it is asked for, or if the question's words do and it is short.
    if request.k == ALL or ABOUT_ALL.search(request.question):
        bank, most = request.bank.snapshot(), MOST if request.k == ALL else FEW * room
        whole, left = parts_of(bank, request.documents, quoted, room // 2, most)
    if whole and (request.k == ALL or not left):
        if left:
            cut.append(f"{left:,} characters were not read: the limit is {MOST:,}; name documents")
        return whole, selection, cut
    if left:
        cut.append(
            "the question is about everything, and only its best passages were read; -k all reads "
            "whole documents, and --document NAME one of them"
        )
    fitting = max(1, len(next(packed([one.text for one in quoted], room), ())))
    if fitting < len(quoted):
        cut.append(f"{len(quoted) - fitting:,} passages were left out: they exceed a prompt")
    return quoted[:fitting], selection, cut


def parts_of(
    bank: Snapshot,
    documents: Sequence[int | str] | None,
    best: Sequence[Citation],
    size: int,
    room: int,
) -> tuple[list[Citation], int]:
    """Return whole documents in reading order, in parts of sentences.

    Args:
        documents: those to read; None means those with the best passages first, then the others.
        best: the best passages.
        size: most characters of a part.
        room: most characters of all.

    Returns:
        The parts, and how many characters are left out.
    """
    if documents is not None:
        wanted = document_indexes(bank, documents)
    else:
        first = document_indexes(bank, [one.document for one in best]) if best else []
        wanted = [*dict.fromkeys([*first, *range(len(bank.documents))])]
    read, left = dict[int, int](), 0
    for index in wanted:
        characters = bank.documents.characters(index)
        if taken := min(characters, room):
            read[index] = taken
        room, left = room - taken, left + characters - taken
    parts = list[Citation]()
    for index in sorted(read):
        name = bank.documents.name(index)
        text = bank.documents.text(index, 0, read[index])
        for start, end in windows(sentences_of(text), size):
            page = bank.documents.page(index, start)
            parts.append(Citation(len(parts) + 1, name, start, end, None, text[start:end], page))
    return parts, left


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
    """Yield texts in groups of at most `room` characters; a longer text is a group of its own."""
    group = list[str]()
    for text in texts:
        if group and sum(map(len, group)) + len(text) > room:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def quotation(number: int, citation: Citation) -> str:
    """Return a passage as the reader sees it, under its number and place."""
    page = "" if citation.page is None else f", page {citation.page}"
    return f"[{number}] {citation.document}{page}\n{citation.text}"


def prompt_of(
    rules: str, turns: Sequence[Mapping[str, Any]], sections: str, asked: str
) -> list[Mapping[str, Any]]:
    """Return the messages to a reader: rules, what was said before, quotations and a question."""
    asked = "\n\n".join(filter(None, [sections, asked]))
    first = [{"role": "system", "content": rules}] if rules else []
    return [*first, *turns, {"role": "user", "content": asked}]


def invented(text: str, sources: Sequence[str]) -> tuple[str, ...]:
    """Return the names and numbers of a reader's answer that stand in no source.

    Its other words are its own.
    """
    return tuple(filter(is_exact, unsupported(said_in(text), sources)))


def said_in(text: str) -> str:
    """Return an answer without numbers of quotations and of items, and capitals of sentences."""
    plain = _ITEM.sub("", _NUMBERS.sub("", text))
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
        spans = list[tuple[int, int]]()
        for a, b, size in same:
            common = answer[b : b + size]
            # A digit alone stands everywhere.
            if size >= MANY or (any(map(is_exact, common)) and len(" ".join(common)) > 2):
                spans.append((one.start + words[a].start, one.start + words[a + size - 1].end))
        whole = ((one.start, one.end),) if named else ()
        yield replace(one, answer_spans=tuple(spans) or whole)

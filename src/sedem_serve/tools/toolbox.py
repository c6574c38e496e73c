"""What an agent can do with banks, as plain functions: list, search, read, ask, note, forget.

Their arguments and docstrings are those of the tools. A document is called BANK/NAME. All texts are
exact.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from sedem.config import PASSAGES, PER_DOCUMENT
from sedem.errors import BankError, ConfigError, DataError, UnknownDocumentError
from sedem.reading.documents import NOTE
from sedem.reading.followed import OpenBank
from sedem.types import Citation, Document
from sedem.untrusted import json_text
from sedem_serve.tools import USUAL, Limits
from sedem_serve.tools.names import SCHEME, Names
from sedem_serve.tools.results import (
    BUDGET,
    LEAST,
    MOST,
    Answered,
    Excerpt,
    Fetched,
    Listed,
    Listing,
    Noted,
    Passages,
    QuotedPassage,
    call,
    fitting,
    status_of,
)

if TYPE_CHECKING:
    from sedem.answering.decoding import Decoding
    from sedem.bank.memory_bank import Snapshot
    from sedem.endpoint import Reader
    from sedem.model import SeDeM
    from sedem.selecting.plan import Request
    from sedem.types import Answer

READ = 4_000
"""Characters that `read` returns, unless another number is wanted."""
CONTEXT = 800
"""Characters of what was said before a question that count."""
TOKENS = 64
"""Most tokens of an answer, unless another number is wanted."""
MOST_PASSAGES = 100
MOST_PATTERNS = 100
NOTE_CHARACTERS = 200_000
NAME_CHARACTERS = 200
LISTED = 10
"""Names in an error."""


class Chosen(NamedTuple):
    """A bank as it is now, and indices of documents in it; None means all."""

    bank: OpenBank
    snapshot: Snapshot
    documents: list[int] | None


class Toolbox:
    """The tools over some banks; threads may share it.

    Args:
        banks: the banks, with distinct names.
        model: returns the open model; it may wait.
        writable: whether notes may be written.
        reader: writes answers in place of the model.
    """

    def __init__(
        self,
        banks: Sequence[OpenBank],
        model: Callable[[], SeDeM],
        *,
        writable: bool = False,
        limits: Limits = USUAL,
        reader: Reader | None = None,
    ) -> None:
        self.banks, self.model, self.writable, self.limits = banks, model, writable, limits
        self.reader = reader
        self._told: set[str] = set()

    # Reading

    def documents(self, scope: str = "", start: int = 0, budget: int = BUDGET) -> Listing:
        """List the documents with their lengths and pages, and what is still being read."""
        banks, notes = self._chosen(scope)
        notes += [why for bank in self.banks for why in self._unreadable(bank, again=True)]
        every = [
            (bank, snapshot, index)
            for bank, snapshot, chosen in banks
            for index in (range(len(snapshot.documents)) if chosen is None else chosen)
        ]
        start = max(start, 0)
        shown = fitting((_listed(*one) for one in every[start:]), budget)
        omitted = max(len(every) - start - len(shown), 0)
        remarks = [told for chosen in banks for told in chosen.bank.remarks()][:LISTED]
        return Listing(
            status=status_of(every, notes),
            documents=shown,
            total=len(every),
            omitted=omitted,
            next=call("documents", scope=scope, start=start + len(shown)) if omitted else "",
            notes=[*notes, *remarks],
        )

    def search(
        self,
        question: str,
        scope: str = "",
        k: int = PASSAGES,
        per_document: int = PER_DOCUMENT,
        skip: int = 0,
        budget: int = BUDGET,
    ) -> Passages:
        """Find the passages of the documents that answer a question, as exact quotations.

        Returns at most k passages of about 500 characters, best first, at most `per_document` of
        one document. `scope` limits the search to documents, folders or patterns, separated by ";".
        Nothing is generated: answer from the passages yourself, and cite them.
        """
        k, skip = min(max(k, 1), MOST_PASSAGES), min(max(skip, 0), MOST_PASSAGES)
        banks, notes = self._chosen(scope)
        notes += [why for bank in self.banks for why in self._unreadable(bank)]
        found, confidence, doubtful = self._find(banks, question, k + skip, max(per_document, 1))
        results = fitting((_passage(*one) for one in found[skip:]), budget)
        omitted = max(len(found) - skip - len(results), 0)
        rest = {"question": question, "scope": scope, "k": k, "skip": skip + len(results)}
        return Passages(
            status=status_of(results, notes),
            results=results,
            confidence=confidence,
            omitted=omitted,
            next=call("search", **rest) if omitted else "",
            notes=[*notes, *_doubts(results, doubtful)],
        )

    def read(self, document: str, start: int = 0, length: int = READ, page: int = 0) -> Excerpt:
        """Read a part of a document, exactly.

        Give the name of a document with `start`, or with a `page` from 1; or the id of a passage,
        to see what is around it. It goes on from `end`, unless that is `characters`.
        """
        # Which document, by its name, its address, or the id of a passage
        chosen, notes = self._chosen("")
        known, names = _known(chosen)
        found, span = names.named(document)
        full = [own[0] for own in names.names]
        if len(found) > 1:
            same = _some([full[index] for index in found])
            raise UnknownDocumentError(f"'{document}' is the name of {same}; give one")
        if not found:
            near = difflib.get_close_matches(document[:NAME_CHARACTERS], full, 5, 0.3) or full
            told = "; ".join([f"there is no document '{document}'", *notes])
            raise UnknownDocumentError(f"{told}; there are {_some(near)}")
        (bank, snapshot, _), index = known[found[0]]
        # Which part of it
        documents = snapshot.documents
        pages, characters = documents.pages(index), documents.characters(index)
        length = min(max(length, 1), MOST - LEAST)
        if page:
            if not 0 < page <= len(pages):
                has = f"it has {len(pages):,}" if pages else "it has no pages; give start instead"
                raise DataError(f"there is no page {page} in '{document}'; {has}")
            start, stop = [*pages, characters][page - 1 : page + 1]
            length = min(length, stop - start)
        elif span is not None:
            start = span[0] - max(0, length - (span[1] - span[0])) // 2
        start = min(max(start, 0), characters)
        text = documents.text(index, start, min(start + length, characters))
        while len(json_text(text)) > MOST - LEAST:  # it has many escapes
            text = text[: len(text) // 2]
        name, end = f"{bank.name}/{documents.name(index)}", start + len(text)
        return Excerpt(
            document=name,
            start=start,
            end=end,
            characters=characters,
            page=documents.page(index, start),
            pages=len(pages),
            text=text,
            changed=bank.changed(documents.name(index)),
            notes=[*filter(None, [bank.reading()])],
        )

    def fetch(self, id: str) -> Fetched:
        """Return the text of a document, or around a passage, by the id that search returned."""
        found = self.read(id, length=BUDGET - LEAST).model_dump()
        text, name = found.pop("text"), found.pop("document")
        metadata = {key: str(value) for key, value in found.items()}
        title = name.rpartition("/")[2]
        return Fetched(id=id, title=title, text=text, url=SCHEME + quote(name), metadata=metadata)

    # Asking

    def request(
        self,
        question: str,
        scope: str = "",
        k: int = 0,
        max_tokens: int = TOKENS,
        context: str = "",
    ) -> tuple[OpenBank, Request, Decoding] | None:
        """Return a question to the bank that knows most about it; None if there is nothing to ask.

        Args:
            k: number of blocks; 0 means the model's own.
            context: what was said before; only its beginning counts.
        """
        from sedem.answering.decoding import Decoding
        from sedem.selecting.plan import Options, Request

        given = (("k", k, 0, self.limits.k), ("max_tokens", max_tokens, 1, self.limits.tokens))
        for name, value, least, most in given:
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be from {least} to {most:,}")
        banks = [one for one in self._chosen(scope)[0] if len(one.snapshot)]
        best = self._find(banks, question, 1, 1)[0] if len(banks) > 1 else []
        banks = [one for one in banks if not best or one.bank is best[0][0]]
        self._check_question(question)
        if not banks:
            return None
        bank, snapshot, documents = banks[0]
        asked: Options = {"k": k or None, "documents": documents, "context": context[:CONTEXT]}
        asked["reader"] = self.reader
        request = Request(snapshot, question, **asked)
        return bank, request, Decoding(max_tokens)

    def answered(self, bank: OpenBank, answer: Answer) -> Answered:
        """Return an answer with its sources."""
        passages = [_passage(bank, citation) for citation in answer.citations]
        results = fitting(passages, BUDGET - len(answer.text))
        omitted = passages[len(results) :]
        quoted = [
            f"{bank.name}/{one.document}:{start}-{end}"
            for one in answer.citations
            for start, end in one.answer_spans
        ]
        reading = [one.reading() for one in self.banks]
        declined = answer.finish_reason == "unanswerable"
        doubts = _doubts(results, declined)
        return Answered(
            status="nothing found" if declined else "found",
            results=results,
            confidence=answer.confidence,
            omitted=len(omitted),
            next=call("read", document=omitted[0].id) if omitted else "",
            notes=[*answer.cut, *filter(None, reading), *self._unreadable(bank), *doubts],
            answer=answer.text,
            quoted=quoted,
            answer_confidence=answer.answer_confidence,
            certainty=answer.certainty,
            alternative=answer.alternative,
            unsupported=list(answer.unsupported),
        )

    def unanswered(self, question: str, scope: str = "", late: str = "") -> Answered:
        """Return passages in place of an answer; `late` says that time ran out."""
        found = self.search(question, scope)
        answered = Answered(**found.model_dump())
        if late:
            answered.status, answered.notes = "out of time", [late, *found.notes]
        return answered

    # Notes

    def remember(self, text: str, name: str = "") -> Noted:
        """Keep a note, which later searches find; a note of the same name is replaced.

        The note is stored beside the documents; no file of the user is changed.
        """
        if len(text) > NOTE_CHARACTERS:
            raise DataError(
                f"the note has {len(text):,} characters, at most {NOTE_CHARACTERS:,} are kept; "
                "write several notes"
            )
        bank, note = self._note(name or f"{datetime.now():%Y-%m-%d %H.%M.%S.%f}")
        before = _names(bank)
        bank.add(self.model().reads_into(), Document(note, text))
        done: Any = "replaced" if note in before else "remembered"
        return Noted(document=f"{bank.name}/{note}", done=done)

    def forget(self, name: str) -> Noted:
        """Remove a note; documents that were read from files stay."""
        bank, note = self._note(name)
        names = _names(bank)
        if note in names:
            bank.remove(note)
            return Noted(document=f"{bank.name}/{note}", done="forgotten")
        if note.removesuffix(NOTE) in names:
            raise DataError(f"'{name}' was read from a file; forget removes only notes")
        notes = [one.removesuffix(NOTE) for one in names if one.endswith(NOTE)]
        raise UnknownDocumentError(f"there is no note '{name}'; there are {_some(notes)}")

    def _note(self, name: str) -> tuple[OpenBank, str]:
        """Return the bank of a note, the first one unless one is named, and its name there."""
        banks = [bank for bank in self.banks if self.writable and bank.writable]
        if not banks:
            raise ConfigError("there is no bank for notes; give one that may be written")
        bank = next((one for one in banks if name.startswith(f"{one.name}/")), banks[0])
        note = f"{name.removeprefix(f'{bank.name}/').strip().removesuffix(NOTE)}{NOTE}"
        if not len(NOTE) < len(note) <= NAME_CHARACTERS or not note.isprintable():
            raise DataError(
                f"the name of a note must have 1 to {NAME_CHARACTERS - len(NOTE)} printable "
                f"characters; this one has {len(note) - len(NOTE)}"
            )
        return bank, note

    # Finding documents

    def names(self, most: int) -> list[str]:
        """Return the names of at most so many documents; SCHEME before one makes its address."""
        names = [f"{one.bank.name}/{n}" for one in self._chosen("")[0] for n in _names(one.bank)]
        return names[:most]

    def _unreadable(self, bank: OpenBank, *, again: bool = False) -> list[str]:
        """Return why files could not be read: each once, or again in a list of all documents."""
        told = [why for why in bank.unreadable() if again or why not in self._told]
        self._told.update(told)
        return told

    def _find(
        self, banks: Sequence[Chosen], question: str, k: int, per_document: int
    ) -> tuple[list[tuple[OpenBank, Citation]], float | None, bool]:
        """Return the best passages, the greatest confidence, and whether none would be answered."""
        from sedem.answering.passages import find_passages
        from sedem.selecting.plan import Request

        self._check_question(question)
        found: list[tuple[OpenBank, Citation]] = []
        selections = []
        model = self.model()
        for bank, snapshot, documents in banks:
            request = Request(snapshot, question, documents=documents)
            passages, selection = find_passages(model, model.engine, request, k, per_document)
            found += ((bank, passage) for passage in passages)
            selections.append(selection)
        found.sort(key=lambda one: -(one[1].score or 0.0))
        sure = (one.confidence for one in selections if one.confidence is not None)
        return found[:k], max(sure, default=None), all(one.declined for one in selections)

    def _chosen(self, scope: str) -> tuple[list[Chosen], list[str]]:
        """Return what is in a scope, and notes on banks that are incomplete."""
        parts = [part.strip() for part in scope.split(";") if part.strip()]
        if len(parts) > MOST_PATTERNS:
            raise DataError(
                f"the scope has {len(parts):,} patterns, at most {MOST_PATTERNS} are compared; "
                "name a folder, or search in several calls"
            )
        chosen: list[Chosen] = []
        notes: list[str] = []
        damage: list[BankError] = []
        for bank in self.banks:
            try:
                snapshot, reading = bank.snapshot(), bank.reading()
            except BankError as error:
                damage.append(error)
                notes.append(str(error))
                continue
            notes += [reading] if reading else []
            if snapshot is not None:
                chosen.append(Chosen(bank, snapshot, None))
        if damage and len(damage) == len(self.banks):
            raise damage[0]
        if parts:
            known, names = _known(chosen)
            inside = [known[index] for index in sorted(set().union(*map(names.within, parts)))]
            chosen = [
                one._replace(documents=documents)
                for one in chosen
                if (documents := [index for owner, index in inside if owner is one])
            ]
        if parts and not chosen and status_of(chosen, notes) == "nothing found":
            told = "; ".join([f"no document is in the scope '{scope}'", *notes])
            raise DataError(f"{told}; documents() lists their names")
        return chosen, notes

    def _check_question(self, question: str) -> None:
        if len(question) > self.limits.question:
            raise DataError(
                f"the question has {len(question):,} characters, at most "
                f"{self.limits.question:,} are allowed; shorten it"
            )


def _names(bank: OpenBank) -> list[str]:
    snapshot = bank.snapshot()
    return [] if snapshot is None else snapshot.documents.names


def _known(banks: Sequence[Chosen]) -> tuple[list[tuple[Chosen, int]], Names]:
    """Return all documents of some banks, with their indices, and their names."""
    known = [(one, index) for one in banks for index in range(len(one.snapshot.documents))]
    every = [(one.bank, name) for one in banks for name in one.snapshot.documents.names]
    return known, Names((bank.name, name, bank.roots) for bank, name in every)


def _listed(bank: OpenBank, snapshot: Snapshot, index: int) -> Listed:
    name = snapshot.documents.name(index)
    return Listed(
        document=f"{bank.name}/{name}",
        characters=snapshot.documents.characters(index),
        pages=len(snapshot.documents.pages(index)),
        note=name.endswith(NOTE),
        changed=bank.changed(name),
    )


def _passage(bank: OpenBank, citation: Citation) -> QuotedPassage:
    name, title = f"{bank.name}/{citation.document}", citation.document.rpartition("/")[2]
    return QuotedPassage(
        id=f"{name}:{citation.start}-{citation.end}",
        title=title if citation.page is None else f"{title}, page {citation.page}",
        url=SCHEME + quote(name),
        text=citation.text,
        also=list(citation.also),
        changed=bank.changed(citation.document),
    )


def _doubts(results: Sequence[QuotedPassage], declined: bool) -> list[str]:
    """Say what is doubtful about some passages; `declined` if the model would not answer."""
    told = []
    if results and declined:
        told.append("the documents probably do not say; these are the closest passages")
    if any(one.changed for one in results):
        told.append("some files have changed since they were read; their passages may be outdated")
    return told


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:LISTED]) or "none"
    return f"{listed} and {len(names) - LISTED:,} more" if len(names) > LISTED else listed

"""Building a bank on disk from documents, commit by commit, and describing a bank.

Letters: S segments, M slots per segment, N blocks, J slots per block, D decoder width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from sedem.bank.blocks import Blocks, partition, to_blocks
from sedem.bank.database import WAIT
from sedem.bank.file import BankFile
from sedem.bank.keys import save_keys, stored_bytes
from sedem.bank.memory_bank import MemoryBank, append_to
from sedem.bank.parts import Place, Store, local_file, store_at
from sedem.bank.rows import Meta, text_digest
from sedem.config import SedemConfig
from sedem.engine.interface import Engine
from sedem.errors import BankError, DataError
from sedem.method.segments import Segments
from sedem.modules import SedemModules
from sedem.quantization import BFLOAT16, Quantized, check_dtype
from sedem.reading.encoding import Progress, compress, read, segments_of
from sedem.selecting import candidates
from sedem.types import Document, distinct

COMMIT = 400_000
"""Characters read between two commits: about 100 MB of memory for a 1B model at C = 4. A longer
document is read in parts."""
PART = 100_000
"""Tokens per part, if its segments are full."""


@dataclass(frozen=True)
class Report:
    """What a build did, and the size of the bank after it."""

    added: int
    replaced: int
    unchanged: int
    documents: int
    blocks: int


def build_bank(
    model: SedemModules,
    engine: Engine,
    path: Place,
    documents: Iterable[Document],
    progress: Callable[[int], None] | None = None,
    *,
    size: Callable[[Document], int] | None = None,
    source: str | None = None,
    dtype: str | None = None,
    keys: str | None = None,
    no_text: bool = False,
    words: bool = True,
    wait: float = WAIT,
    commit: int | None = None,
    committed: Callable[[list[str]], None] = lambda names: None,
    failed: Callable[[str, DataError], None] | None = None,
) -> Report:
    """Create or extend a bank.

    Documents already in the bank are skipped; changed ones are replaced. The memory of a text that
    the bank holds under another name is copied, so a file that moved is not read again. Each commit
    is durable, so the same call continues an interrupted build, even within a long document.
    Documents are taken one after the other, and at most one commit of them is in memory. If taking
    one fails, those before it are committed before the error is raised. A bank in parts gets them
    at the end of the call, as one part; until then they are in a file on this machine.

    Args:
        path: file of the bank, or its place if it is in parts.
        progress: called with the size of what is done: whole documents and parts of others.
        size: size of a document for `progress`; None means its characters.
        source: where the model was opened from, to be recorded in the bank.
        dtype: type of the stored slots; None means that of the bank, or bfloat16 in a new one.
        keys: type in which to store the selector's keys of the whole bank; None stores none.
        no_text: make a bank that keeps the SHA-256 of each text instead of the text. An existing
            bank is not changed.
        wait: seconds to wait for another writer before each commit.
        commit: characters read between two commits; None means `COMMIT`.
        committed: called with the names of documents that are in the bank now.
        failed: called with the name of a document that the model rejects, which then does not stop
            the others.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank stores its slots as another type, or stores texts despite `no_text`.
        ConfigError: there is no such type.
        DataError: there are no documents, two have the same name, or one is rejected.
    """
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    if keys is not None:
        local_file(path, "'sedem build --keys'")
    meta = new_meta(model, source, dtype, no_text, words)
    stored = stored_digests(model, path, dtype, no_text)
    store = store_at(path, wait)
    held = {*stored.values()}
    with _file_of(store, meta) as file:
        if file.exists():
            stored |= file.digests()
        taken = Taken(stored, size or (lambda document: len(document.text)))
        for group in commits(taken.changed(documents, committed), commit):
            group_size = sum(map(taken.size, group))
            before = taken.total - group_size

            def report(done: int, of: int, before: int = before, part: int = group_size) -> None:
                if progress is not None:
                    progress(before + part * done // of)

            twins = [one for one in group if text_digest(one.text) in held]
            copies = _copies(store, twins) if twins else []
            copied = {document.name for document, *_ in copies}
            lacking = [one for one in group if one.name not in copied]
            try:
                if lacking:
                    add_documents(model, engine, file, meta, lacking, report)
                    committed([document.name for document in lacking])
            except DataError:
                if failed is None:
                    raise
                for document in lacking:
                    try:
                        add_documents(model, engine, file, meta, [document], report)
                        committed([document.name])
                    except DataError as error:
                        failed(document.name, error)
            for document, blocks, memory_NJD in copies:
                file.append(model.fingerprint(), [document], blocks, memory_NJD)
                committed([document.name])
    if not store.exists():  # the model has rejected all
        return Report(0, 0, 0, 0, 0)
    bank = MemoryBank.open(path)
    if keys is not None:
        save_keys(bank, model.selector, keys)
    if bank.path is not None and len(bank) > candidates.COARSE_FROM:
        candidates.bank_codes(bank, model.selector)
    return Report(taken.added, taken.replaced, taken.unchanged, len(bank.documents), len(bank))


def describe(path: Place) -> dict[str, Any]:
    """Return facts about a stored bank: which model made it, what it holds and how large it is.

    `unfinished` lists documents whose build was interrupted; the same build continues them.
    """
    store = store_at(path)
    bank = MemoryBank.open_from(store)
    tokens = bank.tokens
    return {
        "documents": len(bank.documents),
        "unfinished": store.unfinished() if isinstance(store, BankFile) else [],
        "blocks": len(bank),
        "tokens": tokens,
        "dtype": bank.dtype,
        "texts": "in the bank" if bank.meta.texts else "not in the bank",
        "memory_bytes": bank.memory_bytes,
        "bytes_per_token": round(bank.memory_bytes / tokens, 1) if tokens else 0.0,
        "key_bytes": stored_bytes(store) if isinstance(store, BankFile) else 0,
        "fingerprint": bank.fingerprint,
        **bank.made_by,
    }


def _copies(
    store: Store, documents: Sequence[Document]
) -> list[tuple[Document, Blocks, Quantized]]:
    """Return those documents whose text a bank holds, under other names, with its memory."""
    known, digests, found = MemoryBank.open_from(store).snapshot(), store.digests(), []
    twins = {digests[name]: index for index, name in enumerate(known.names) if name in digests}
    for document in documents:
        if (index := twins.get(text_digest(document.text))) is not None:
            rows = np.flatnonzero(known.blocks.documents == index)
            blocks = known.blocks.take(rows)
            blocks = blocks.of_documents(np.zeros_like(blocks.documents))
            found.append((document, blocks, known.stored(rows.tolist())))
    return found


def _file_of(store: Store, meta: Meta) -> AbstractContextManager[BankFile]:
    """Return the file that a build writes, which is another one for a bank in parts."""
    return nullcontext(store) if isinstance(store, BankFile) else store.building(meta)


def add_documents(
    model: SedemModules,
    engine: Engine,
    file: BankFile,
    meta: Meta,
    group: list[Document],
    progress: Progress | None = None,
) -> None:
    """Read a group of `commits` into a bank: in one commit, or a long document in several.

    The bank is not opened, so the cost of a commit depends only on what it adds.

    Args:
        file: of the bank, or of a new one.
        meta: metadata of the bank, if it does not exist yet.

    Raises:
        BankError: as `BankFile.append` and `append_part`.
    """
    new = nullcontext() if file.exists() else file.creating(meta)
    if is_long(group[0]):
        segments = segments_of(model, group[0])
        with new:
            pass
        _add_parts(model, engine, file, group[0], segments, progress)
    else:
        snapshot = read(model, engine, group, progress=progress).snapshot()
        with new:
            append_to(file, snapshot)


def _add_parts(
    model: SedemModules,
    engine: Engine,
    file: BankFile,
    document: Document,
    segments: Segments,
    progress: Progress | None,
) -> None:
    """Read a long document into a bank; it is complete after the commit of its last part.

    A part depends only on the document and the model, so an interrupted build gives the same memory
    as an uninterrupted one.
    """
    step = part_segments(model.config)
    parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
    cut = model.config.compression, model.config.slots_per_block
    blocks = [partition(part, 0, *cut)[0] for part in parts]
    before = [0, *accumulate(map(len, blocks))]
    stored = file.stored_part(document)
    first = before.index(stored) if stored in before[:-1] else 0
    done = sum(map(len, parts[:first]))
    for number in range(first, len(parts)):

        def report(count: int, done: int = done) -> None:
            if progress is not None:
                progress(done + count, len(segments))

        memory_SMD = compress(model, engine, [parts[number]], report)
        _, memory_NJD = to_blocks(parts[number], memory_SMD, 0, *cut)
        file.append_part(
            model.fingerprint(),
            document,
            blocks[number],
            Quantized(memory_NJD),
            before=before[number],
            last=number + 1 == len(parts),
        )
        done += len(parts[number])


def part_segments(config: SedemConfig) -> int:
    """Number of segments per part: whole blocks, about `PART` tokens."""
    whole = math.lcm(config.slots, config.slots_per_block) // config.slots
    return -(-PART // (config.segment_length * whole)) * whole


def new_meta(
    model: SedemModules,
    source: str | None = None,
    dtype: str | None = None,
    no_text: bool = False,
    words: bool = True,
) -> Meta:
    """Return the metadata of a bank that a build creates; arguments as in `build_bank`."""
    made_by = {**model.made_by(), "model": source}
    size = model.config.slots_per_block, model.decoder.width
    return Meta(model.fingerprint(), made_by, *size, dtype or BFLOAT16, not no_text, words)


@dataclass
class Taken:
    """What was taken from a stream of documents.

    Attributes:
        stored: SHA-256 of the texts in the bank, by name.
    """

    stored: dict[str, str]
    size: Callable[[Document], int]
    total: int = field(default=0, init=False)
    added: int = field(default=0, init=False)
    replaced: int = field(default=0, init=False)
    unchanged: int = field(default=0, init=False)

    def changed(
        self,
        documents: Iterable[Document],
        unchanged: Callable[[list[str]], None] = lambda names: None,
    ) -> Iterator[Document]:
        """Take documents, and yield those that the bank lacks; tell the names of the others."""
        for document in distinct(documents):
            self.total += self.size(document)
            found = self.stored.get(document.name)
            if found == text_digest(document.text):
                self.unchanged += 1
                unchanged([document.name])
                continue
            self.added += found is None
            self.replaced += found is not None
            yield document


def stored_digests(
    model: SedemModules, path: Place, dtype: str | None, no_text: bool
) -> dict[str, str]:
    """Return the SHA-256 of the texts in a bank by name; empty if there is no bank.

    Arguments and errors are those of `build_bank`.
    """
    store = store_at(path)
    if not store.exists():
        return {}
    bank = MemoryBank.open_from(store)
    bank.check_made_by(model.fingerprint())
    if dtype not in (None, bank.dtype):
        raise BankError(
            f"bank '{path}' stores its slots as {bank.dtype}, not as {dtype}; "
            "leave the type out, or build another bank"
        )
    if no_text and bank.meta.texts:
        raise BankError(
            f"bank '{path}' holds the texts of its documents; build another bank without texts, or "
            "leave --no-text out"
        )
    return store.digests()


def commits(documents: Iterable[Document], least: int | None = None) -> Iterator[list[Document]]:
    """Group documents into commits of at least so many characters; None means `COMMIT`.

    The last group may be smaller, and so may one before a longer document, which stands alone.
    """
    group: list[Document] = []
    size = 0
    try:
        for document in documents:
            if group and is_long(document):
                yield group
                group, size = [], 0
            group.append(document)
            size += len(document.text)
            if size >= min(least or COMMIT, COMMIT):
                yield group
                group, size = [], 0
    except Exception:
        # The documents before the one that failed are not lost.
        if group:
            yield group
        raise
    if group:
        yield group


def is_long(document: Document) -> bool:
    """Whether a document takes more than one commit."""
    return len(document.text) > COMMIT

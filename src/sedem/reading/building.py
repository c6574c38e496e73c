"""Reading documents into a bank in RAM, in a file or in parts, commit by commit.

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
from sedem.bank.file import BankFile, check_fingerprint
from sedem.bank.keys import save_keys, stored_bytes
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.parts import Place, Store, local_file, store_at
from sedem.bank.rows import Meta, text_digest
from sedem.config import SedemConfig
from sedem.engine.interface import Engine
from sedem.errors import BankError, DataError
from sedem.modules import SedemModules
from sedem.quantization import BFLOAT16, Quantized, check_dtype
from sedem.reading.encoding import Progress, compress, encode, segments_of
from sedem.selecting import select
from sedem.types import Document, check_documents, distinct

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


def read(
    model: SedemModules,
    engine: Engine,
    documents: Sequence[Document],
    *,
    source: str | None = None,
    progress: Progress | None = None,
) -> MemoryBank:
    """Read documents into a new bank in RAM.

    Args:
        source: where the model was opened from, to be recorded in the bank.
        progress: called with the number of characters read and of all characters.

    Raises:
        DataError: there are no documents, two have the same name, or one has no tokens.
    """
    check_documents(documents)
    file = BankFile()
    add_documents(model, engine, file, new_meta(model, source), documents, progress)
    return MemoryBank.open_from(file)


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
        wait: seconds to wait for another writer before each commit.
        commit: characters read between two commits; None means `COMMIT`.
        committed: called with the names of documents that are in the bank now.
        failed: called with the name of a document that the model rejects, which then does not stop
            the others.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank stores its slots as another type.
        ConfigError: there is no such type.
        DataError: there are no documents, two have the same name, or one is rejected.
    """
    store = store_at(path, wait)
    meta, stored = begin(model, store, source, dtype, keys, words)
    held = {*stored.values()}
    # A build of a bank in parts writes another file.
    with nullcontext(store) if isinstance(store, BankFile) else store.building(meta) as file:
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

            def add(some: list[Document], report: Progress = report) -> None:
                try:
                    add_documents(model, engine, file, meta, some, report)
                    committed([document.name for document in some])
                except DataError as error:
                    if failed is None:
                        raise
                    if len(some) == 1:
                        failed(some[0].name, error)
                        return
                    # One by one, so that those fail alone that the model rejects.
                    for document in some:
                        add([document])

            if lacking:
                add(lacking)
            for document, blocks, memory_NJD in copies:
                file.append(model.fingerprint(), [document], blocks, memory_NJD)
                committed([document.name])
    return finish(model, store, keys, taken)


def begin(
    model: SedemModules,
    store: Store,
    source: str | None,
    dtype: str | None,
    keys: str | None,
    words: bool,
) -> tuple[Meta, dict[str, str]]:
    """Check what a build is to do; arguments and errors are those of `build_bank`.

    Returns:
        The metadata of its bank or of a new one, and the SHA-256 of the texts that it
        holds, by name.
    """
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    if keys is not None:
        local_file(str(store), "'sedem build --keys'")
    if not store.exists():
        return new_meta(model, source, dtype, words), {}
    meta = store.meta()
    check_fingerprint(str(store), meta.fingerprint, model.fingerprint())
    if dtype not in (None, meta.dtype):
        raise BankError(
            f"bank '{store}' stores its slots as {meta.dtype}, not as {dtype}; leave the type out, "
            "or build another bank"
        )
    return meta, store.digests()


def finish(model: SedemModules, store: Store, keys: str | None, taken: Taken) -> Report:
    """Make what is derived from a bank that was built, and report what was done."""
    if not store.exists():  # the model has rejected all
        return Report(0, 0, 0, 0, 0)
    documents, blocks = held_by(store)
    if keys is not None:
        save_keys(MemoryBank.open_from(store), model.selector, keys)
    if isinstance(store, BankFile) and blocks > select.COARSE_FROM:
        select.bank_codes(MemoryBank.open_from(store), model.selector)
    return Report(taken.added, taken.replaced, taken.unchanged, documents, blocks)


def held_by(store: Store) -> tuple[int, int]:
    """Return how many documents and blocks a stored bank holds."""
    heads = [file.head() for file in store.files()]
    return sum(head.documents for head in heads), sum(head.blocks for head in heads)


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


def add_documents(
    model: SedemModules,
    engine: Engine,
    file: BankFile,
    meta: Meta,
    documents: Sequence[Document],
    progress: Progress | None = None,
) -> None:
    """Read documents into a bank: some in each commit, or a long one in several.

    The bank is not opened, so the cost of a commit depends only on what it adds.

    Args:
        file: of the bank, or of a new one.
        meta: metadata of the bank, if it does not exist yet.
        progress: called with the number of characters read and of all characters.

    Raises:
        DataError: a document has no tokens.
        BankError: as `BankFile.append` and `append_part`.
    """
    total, before = sum(len(one.text) for one in documents), 0
    for group in commits(documents):
        size = sum(len(one.text) for one in group)

        def report(done: int, of: int, before: int = before, size: int = size) -> None:
            if progress is not None:
                progress(before + size * done // of, total)

        if is_long(group[0]):
            _add_parts(model, engine, file, meta, group[0], report)
        else:
            blocks, memory_NJD = encode(model, engine, group, report)
            with _at(file, meta):
                file.append(model.fingerprint(), group, blocks, memory_NJD)
        before += size


def _at(file: BankFile, meta: Meta) -> AbstractContextManager[BankFile]:
    """Create a bank with what is added to it, unless there is one."""
    return nullcontext(file) if file.exists() else file.creating(meta)


def _add_parts(
    model: SedemModules,
    engine: Engine,
    file: BankFile,
    meta: Meta,
    document: Document,
    progress: Progress,
) -> None:
    """Read a long document into a bank; it is complete after the commit of its last part.

    A part depends only on the document and the model, so an interrupted build gives the same memory
    as an uninterrupted one.
    """
    step, segments = part_segments(model.config), segments_of(model, document)
    with _at(file, meta):
        pass
    parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
    cut = model.config.compression, model.config.slots_per_block
    blocks = [partition(part, 0, *cut)[0] for part in parts]
    before = [0, *accumulate(map(len, blocks))]
    stored = file.stored_part(document)
    first = before.index(stored) if stored in before[:-1] else 0
    done = sum(map(len, parts[:first]))
    for number in range(first, len(parts)):

        def report(count: int, done: int = done) -> None:
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
    words: bool = True,
) -> Meta:
    """Return the metadata of a bank that a build creates; arguments as in `build_bank`."""
    made_by = {**model.made_by(), "model": source}
    size = model.config.slots_per_block, model.decoder.width
    return Meta(model.fingerprint(), made_by, *size, dtype or BFLOAT16, words=words)


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

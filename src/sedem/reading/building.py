"""Reading documents into a bank in RAM, in a file or in parts, commit by commit.

Documents become segments, hidden states, memory, and blocks of a bank. This needs no question.
Adapters are off and no gradients are computed.

Letters: S segments, T tokens, M slots per segment, N blocks, J slots per block, D decoder width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sedem.bank.blocks import Blocks, Meta, partition, to_blocks
from sedem.bank.file import BankFile, Place, check_fingerprint, text_digest
from sedem.bank.index import bank_codes, save_keys, stored_bytes
from sedem.bank.memory_bank import MemoryBank, store_at
from sedem.config import SedemConfig
from sedem.engine.interface import Engine
from sedem.errors import BankError, DataError
from sedem.method.compressor import slot_tokens
from sedem.method.segments import Segments, segment_text
from sedem.modules import SedemModules
from sedem.selecting import select
from sedem.tensors import BFLOAT16, Quantized, check_dtype
from sedem.types import Document, check_documents, distinct

if TYPE_CHECKING:
    from sedem.bank.care import Again, DamagedDocument
    from sedem.bank.parts import Store

COMMIT = 400_000
"""Characters read between two commits: about 100 MB of memory for a 1B model at C = 4. A longer
document is read in parts."""
PART = 100_000
"""Tokens per part, if its segments are full."""
BATCHES = {"cpu": 8, "cuda": 32}
"""Segments encoded together, by device; the states of more would exceed a CPU's caches."""

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is, in segments or in characters."""

Row = tuple[int, Tensor, int]
"""The number, the ids `[T]` and the length of a segment."""


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
    store = store_at(path)
    meta, stored = begin(model, store, source, dtype, keys, words)
    held = {*stored.values()}
    # A build of a bank in parts writes another file.
    with nullcontext(store) if isinstance(store, BankFile) else store.building(meta) as file:
        if file.exists():
            stored |= file.digests()
        # Documents are taken one after the other, as many as a commit needs.
        taken = Taken(stored, size or (lambda document: len(document.text)))
        for group in commits(taken.changed(documents, committed), commit):
            group_size = sum(map(taken.size, group))
            before = taken.total - group_size

            def report(done: int, of: int, before: int = before, part: int = group_size) -> None:
                if progress is not None:
                    progress(before + part * done // of)

            # The memory of texts that the bank holds under other names is copied.
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

            # All others are read; each group is one commit.
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
    if keys is not None and not isinstance(store, BankFile):
        raise BankError(
            "'sedem build --keys' needs a bank in one file; copy it with 'sedem bank copy "
            f"{store} FILE.bank', and give that file"
        )
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
        bank_codes(MemoryBank.open_from(store), model.selector)
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
    cut = model.config.compression, model.config.slots_per_block
    for group in commits(documents):
        size = sum(len(one.text) for one in group)

        def report(done: int, of: int, before: int = before, size: int = size) -> None:
            if progress is not None:
                progress(before + size * done // of, total)

        before += size
        if not is_long(group[0]):
            blocks, memory_NJD = encode(model, engine, group, report)
            with nullcontext() if file.exists() else file.creating(meta):
                file.append(model.fingerprint(), group, blocks, memory_NJD)
            continue
        # A long document is complete after the commit of its last part. A part depends only on the
        # document and the model, so an interrupted build gives the memory of an uninterrupted one.
        [document] = group
        step, segments = part_segments(model.config), segments_of(model, document)
        if not file.exists():
            with file.creating(meta):
                pass
        parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
        rows = [partition(part, 0, *cut)[0] for part in parts]
        starts = [0, *accumulate(map(len, rows))]
        stored = file.stored_part(document)
        first = starts.index(stored) if stored in starts[:-1] else 0
        for number, part in enumerate(parts[first:], first):

            def report_part(count: int, done: int = number * step, of: int = len(segments)) -> None:
                report(done + count, of)

            memory_SMD = compress(model, engine, [part], report_part)
            _, slots_NJD = to_blocks(part, memory_SMD, 0, *cut)
            file.append_part(
                model.fingerprint(),
                document,
                rows[number],
                Quantized(slots_NJD),
                before=starts[number],
                last=number + 1 == len(parts),
            )


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


def reading_again(
    open_model: Callable[[BankFile], tuple[SedemModules, Engine]],
    sources: Sequence[Document],
    progress: Progress | None = None,
) -> Again:
    """Return a function for `care.repair` that reads lost documents again.

    Args:
        open_model: opens the model that made a bank; called if there is anything to read.
        sources: documents; one is used only if its name and SHA-256 match the bank's.
        progress: called with the number of characters read and of all characters.

    Returns:
        The function. It raises `BankMismatchError` if another model made the bank.
    """
    given = {(one.name, text_digest(one.text)): one for one in sources}

    def again(bank: BankFile, lost: Sequence[DamagedDocument]) -> list[str]:
        documents = []
        for one in lost:
            if one.text is not None:
                documents.append(Document(one.name, one.text, one.pages))
            elif (found := given.get((one.name, one.sha256))) is not None:
                documents.append(replace(found, pages=found.pages or one.pages))
        if documents:
            model, engine = open_model(bank)
            check_fingerprint(str(bank), bank.meta().fingerprint, model.fingerprint())
            add_documents(model, engine, bank, bank.meta(), documents, progress)
        return [one.name for one in documents]

    return again


# Encoding


@torch.no_grad()
def encode(
    model: SedemModules,
    engine: Engine,
    documents: Sequence[Document],
    progress: Progress | None = None,
) -> tuple[Blocks, Quantized]:
    """Read documents together, whose short segments share batches.

    Args:
        progress: called after every batch, once all documents are cut, with numbers of segments.

    Returns:
        The blocks of all documents, whose `documents` are indices of the given ones, and their
        memory `[N, J, D]`.
    """
    config = model.config
    cutter = ThreadPoolExecutor(1, "sedem-cutter")
    try:
        # Documents are cut one after the other in the background, while others are encoded.
        cut = [cutter.submit(segments_of, model, document) for document in documents]

        def report(done: int) -> None:
            if progress is not None and cut[-1].done():
                progress(done, sum(len(part.result()) for part in cut))

        memory_SMD = compress(model, engine, (part.result() for part in cut), report)
    finally:
        cutter.shutdown(cancel_futures=True)
    segments = [part.result() for part in cut]
    blocks, memories = [], []
    for index, (part, memory) in enumerate(
        zip(segments, memory_SMD.split([len(s) for s in segments]), strict=True)
    ):
        rows, memory_NJD = to_blocks(
            part, memory, index, config.compression, config.slots_per_block
        )
        blocks.append(rows)
        memories.append(memory_NJD)
    return Blocks.join(blocks), Quantized(torch.cat(memories))


def compress(
    model: SedemModules,
    engine: Engine,
    parts: Iterable[Segments],
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Encode and compress segments of similar length together, so that padding costs little.

    Full segments are encoded as soon as they fill a batch; all others wait for the last part. The
    batches therefore depend only on the segments.

    Args:
        parts: segments, grouped by document or by part of a document.

    Returns:
        Memory `[S, M, D]` in bfloat16 on the CPU, as a bank stores it. It is copied in one go,
        because a copy per batch would wait for that batch.
    """
    compression, encoded = model.config.compression, list[tuple[Tensor, Tensor]]()
    done = 0
    for rows in _batches(parts, model.config.segment_length, model.device):
        numbers, ids, lengths = zip(*rows, strict=True)
        longest = -(-max(lengths) // compression) * compression
        mask_BT = torch.arange(longest) < torch.tensor(lengths)[:, None]
        states = engine.encode(torch.stack(ids)[:, :longest].to(model.encoder.device))
        mask_BT = mask_BT.to(states.device)
        memory_BMD = model.compressor(model.mixture(states.float()), mask_BT)
        # Zero, so that a bank's bytes do not depend on which segments were encoded together.
        padding_BM1 = (slot_tokens(mask_BT, compression) == 0)[..., None]
        memory_BMD = memory_BMD.masked_fill(padding_BM1, 0.0).to(torch.bfloat16)
        encoded.append((torch.tensor(numbers), memory_BMD))
        done += len(rows)
        if progress is not None:
            progress(done)
    shape = done, model.config.slots, model.decoder.width
    memory_SMD = torch.zeros(shape, dtype=torch.bfloat16, device=model.device)
    for rows_B, memory_BMD in encoded:
        memory_SMD[rows_B.to(model.device), : memory_BMD.shape[1]] = memory_BMD
    return memory_SMD.cpu()


def _batches(parts: Iterable[Segments], length: int, device: torch.device) -> Iterator[list[Row]]:
    """Yield the batches that `batches` gives, each as soon as its segments have come."""
    full, others, count = list[Row](), list[Row](), 0
    for part in parts:
        for ids_T, tokens in zip(part.ids, part.lengths.tolist(), strict=True):
            (full if tokens == length else others).append((count, ids_T, tokens))
            count += 1
            if len(full) == BATCHES[device.type]:
                yield full
                full = []
    if last := full + others:
        for batch_B in batches(torch.tensor([tokens for *_, tokens in last]), device):
            yield [last[number] for number in batch_B.tolist()]


def batches(lengths_S: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of the segments in each batch, the longest segments first."""
    return lengths_S.argsort(descending=True, stable=True).split(BATCHES[device.type])


def segments_of(model: SedemModules, document: Document) -> Segments:
    """Cut a document as a model reads it. Where it quotes, the text of a block has whole words."""
    config = model.config
    cut = config.segment_length, config.segmentation, config.segment_shift, config.spans
    return segment_text(document.text, model.encoder, *cut)

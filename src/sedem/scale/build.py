"""Build a bank on many machines: workers read, this machine commits.

The pieces are those of `sedem.inference.build`: the same documents are read together as on one
machine, so their memory is the same, and they are committed in the same order. What a killed build
has committed is skipped when the build is restarted.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sedem.bank.blocks import Blocks
from sedem.bank.key_index import save_keys
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.store.interface import Meta, Store
from sedem.bank.store.opening import Place, PlacedStore, local_folder, store_at
from sedem.inference.build import Report, Taken, commits, is_long, new_meta, stored_digests
from sedem.inference.cutter import segments_of
from sedem.inference.read_parts import MissingPart, commit_part, missing_parts
from sedem.method.modules import SedemModules
from sedem.method.segments import Segments
from sedem.quantization import Quantized, check_dtype
from sedem.scale.cluster import connected
from sedem.scale.encoders import Encoders, Work
from sedem.scale.sources import Sources
from sedem.types import Document

Progress = Callable[[int, int, float], None]
"""Called with the bytes done, the total bytes, and the tokens read per second so far."""


@dataclass(frozen=True)
class Workers:
    """The workers that read.

    Attributes:
        address: address of the Ray cluster; see `connected`.
        checkpoint: folder or hub id of the model, which every host can open.
        most: maximum workers; None means one for each GPU, or for each `cpus` CPUs.
        cpus: CPUs of a worker.
    """

    address: str
    checkpoint: str
    most: int | None = None
    cpus: int = 1


def build_on_ray(
    model: SedemModules,
    workers: Workers,
    path: Place,
    sources: Sources,
    progress: Progress | None = None,
    *,
    source: str | None = None,
    dtype: str | None = None,
    keys: str | None = None,
    no_text: bool = False,
    wait: float = 0,
) -> Report:
    """Create or extend a bank with the workers of a Ray cluster.

    The bank is the same as `sedem.inference.build.build_bank` makes from the same documents.

    Args:
        model: the model on this machine; the workers open theirs, which must be the same.
        workers: the workers that read.
        path: folder of the bank, or its place in an object store.
        sources: the documents.
        progress: called after every commit.
        source: where the model was opened from, to be recorded in the bank.
        dtype: type of the stored slots; None means the bank's, or bfloat16 in a new one.
        keys: type in which to store the selector's keys of the whole bank; None stores none.
        no_text: make a bank that keeps the SHA-256 of each text instead of the text.
        wait: seconds to wait for another writer before each commit.

    Raises:
        ConfigError: there is no such cluster, or a host lacks the model.
        UnavailableError: the cluster has lost all workers, or a piece kills every worker.
        SedemError: as in `build_bank`.
    """
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    if keys is not None:
        local_folder(path, "'sedem build --keys'")
    stored = stored_digests(model, path, dtype, no_text)
    target = _Target(store_at(path, wait=wait), new_meta(model, source, dtype, no_text))
    taken = Taken(stored, lambda document: sources.sizes[document.name])
    kind = target.store.meta().dtype if target.exists else target.meta.dtype
    with (
        connected(workers.address),
        Encoders[_Piece](
            workers.checkpoint, model.fingerprint(), kind, workers.most, workers.cpus
        ) as encoders,
    ):
        started, tokens = time.monotonic(), 0
        for piece, sealed in encoders.in_order(_pieces(model, target, taken, sources)):
            memory_NJD = sealed.open()
            tokens += piece.commit(target, sealed.blocks, memory_NJD)
            if progress is not None:
                speed = tokens / (time.monotonic() - started)
                progress(piece.done, max(sources.total, piece.done), speed)
    bank = MemoryBank.open(path)
    if keys is not None:
        save_keys(bank, model.selector, keys)
    return Report(taken.added, taken.replaced, taken.unchanged, len(bank.documents), len(bank))


class _Target:
    """The bank that is built, and its metadata if it is new."""

    def __init__(self, store: PlacedStore, meta: Meta) -> None:
        self.store, self.meta = store, meta
        self.exists = store.exists()

    @contextmanager
    def created(self) -> Iterator[Store]:
        """Create the bank; it appears when the block ends without an error."""
        with self.store.creating(self.meta) as unfinished:
            yield unfinished
        self.exists = True


@dataclass
class _Piece(Work):
    """What is committed at once; `done` is the bytes of all documents up to its end."""

    done: int

    def commit(self, target: _Target, blocks: Blocks, memory_NJD: Quantized) -> int:
        """Write some documents into the bank, in one commit; returns their tokens."""
        assert not isinstance(self.content, Segments)
        what = target.meta.fingerprint, self.content, blocks, memory_NJD
        if target.exists:
            target.store.append(*what)
        else:
            with target.created() as unfinished:
                unfinished.append(*what)
        return int(blocks.slot_tokens.sum())


@dataclass
class _LongPiece(_Piece):
    """A part of a document that takes several commits."""

    document: Document
    part: MissingPart

    def commit(self, target: _Target, blocks: Blocks, memory_NJD: Quantized) -> int:
        """Write the part into the bank; its blocks are already known here."""
        commit_part(target.store, target.meta.fingerprint, self.document, self.part, memory_NJD)
        return int(self.part.blocks.slot_tokens.sum())


def _pieces(
    model: SedemModules, target: _Target, taken: Taken, sources: Sources
) -> Iterator[_Piece]:
    """Yield what the bank lacks, in the order of the sources."""
    changed = given = 0

    def counted() -> Iterator[Document]:
        nonlocal changed
        for document in taken.changed(sources):
            changed += sources.sizes[document.name]
            yield document

    for group in commits(counted()):
        given += sum(sources.sizes[document.name] for document in group)
        # Without a long document that was already taken but comes in the next group.
        done = taken.total - (changed - given)
        if not is_long(group[0]):
            yield _Piece(group, done)
            continue
        [document] = group
        if not target.exists:
            with target.created():
                pass
        segments = segments_of(model, document)
        missing = missing_parts(model.config, target.store, document, segments)
        size = sources.sizes[document.name]
        left = sum(len(part.segments) for part in missing)
        for part in missing:
            left -= len(part.segments)
            before = done - size * left // len(segments)
            yield _LongPiece(part.segments, before, document, part)

"""Build a bank on many machines: workers read, this machine commits.

Each worker makes a bank of the documents that it is given. For a bank in one file, it sends that
bank here, where it is appended. For a bank in parts, it uploads that bank as a part, and this
machine only commits the part.

Documents are grouped as in `sedem.reading.building`, and every worker builds with it, so the memory
is the same as on one machine. Groups are committed in the order of the sources. To resume a killed
build, repeat it: it skips the documents that were committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sedem.bank.database import WAIT
from sedem.bank.file import BankFile
from sedem.bank.keys import save_keys
from sedem.bank.memory_bank import MemoryBank, append_to, copy_to
from sedem.bank.parts import Entry, Place, Store, is_remote, local_file, store_at
from sedem.bank.rows import Meta
from sedem.modules import SedemModules
from sedem.quantization import check_dtype
from sedem.reading.building import Report, Taken, commits, new_meta, stored_digests
from sedem.scale.cluster import connected
from sedem.scale.encoder import SentBank
from sedem.scale.encoders import Encoders, Piece
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
    words: bool = True,
    wait: float = WAIT,
) -> Report:
    """Create or extend a bank with the workers of a Ray cluster.

    The bank is the same as `sedem.reading.building.build_bank` makes from the same documents.

    Args:
        model: the model on this machine; the workers open theirs, which must be the same.
        workers: the workers that read.
        path: file of the bank, or its place if it is in parts, which every worker can write.
        sources: the documents.
        progress: called after every commit.
        source: where the model was opened from, to be recorded in the bank.
        dtype: type of the stored slots; None means the bank's, or bfloat16 in a new one.
        keys: type in which to store the selector's keys of the whole bank; None stores none.
        no_text: make a bank that keeps the SHA-256 of each text instead of the text.
        words: make a bank with an index of the words of its blocks.
        wait: seconds to wait for another writer before each commit.

    Raises:
        ConfigError: there is no such cluster, or a host lacks the model.
        UnavailableError: the cluster has lost all workers, or a piece kills every worker.
        SedemError: as in `build_bank`.
    """
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    if keys is not None:
        local_file(path, "'sedem build --keys'")
    stored = stored_digests(model, path, dtype, no_text)
    taken = Taken(stored, lambda document: sources.sizes[document.name])
    target = _Target(store_at(path, wait), new_meta(model, source, dtype, no_text, words))
    limits = workers.most, workers.cpus
    with (
        connected(workers.address),
        Encoders(workers.checkpoint, *target.pieces(path), *limits) as encoders,
    ):
        started, tokens = time.monotonic(), 0
        for piece, made in encoders.in_order(_pieces(taken, sources)):
            replaced = [one.name for one in piece.documents if one.name in stored]
            tokens += target.add(made, replaced)
            if progress is not None:
                speed = tokens / (time.monotonic() - started)
                progress(piece.done, max(sources.total, piece.done), speed)
    bank = MemoryBank.open(path)
    if keys is not None:
        save_keys(bank, model.selector, keys)
    return Report(taken.added, taken.replaced, taken.unchanged, len(bank.documents), len(bank))


class _Target:
    """The bank that is built.

    Args:
        store: its store; it appears with the first commit.
        meta: its metadata if it is new.
    """

    def __init__(self, store: Store, meta: Meta) -> None:
        self.store, self.exists = store, store.exists()
        self.meta = store.meta() if self.exists else meta

    def pieces(self, path: Place) -> tuple[Meta, Place | None]:
        """Return the metadata of the banks that workers make, and where they are uploaded to.

        Args:
            path: the place of this bank.
        """
        if isinstance(self.store, BankFile):
            # They are appended, which needs the texts and indexes the words here.
            return replace(self.meta, texts=True, words=False), None
        # A worker has another working folder.
        return self.meta, path if is_remote(path) else Path(path).resolve()

    def add(self, made: SentBank | Entry, replaced: Sequence[str]) -> int:
        """Commit a bank that a worker made.

        Args:
            made: the bank, or its entry if the worker uploaded it.
            replaced: names of its documents that the target had before the build.

        Returns:
            Tokens of its documents.
        """
        if isinstance(made, SentBank):
            assert isinstance(self.store, BankFile)
            piece = made.open()
            if self.exists:
                append_to(self.store, piece)
            else:
                copy_to(self.store, piece, self.meta)
            tokens = piece.tokens
        else:
            assert not isinstance(self.store, BankFile)
            if self.exists:
                self.store.commit([made], replaced)
            else:
                self.store.start([made])
            tokens = made.head.tokens
        self.exists = True
        return tokens


def _pieces(taken: Taken, sources: Sources) -> Iterator[Piece]:
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
        yield Piece(group, taken.total - (changed - given))

"""Building a bank on disk from documents, commit by commit, and describing a bank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sedem.bank.key_index import save_keys
from sedem.bank.memory_bank import MemoryBank, append_to
from sedem.bank.store.catalog import text_digest
from sedem.bank.store.kept_files import kept_bytes
from sedem.bank.store.key_files import stored_bytes
from sedem.bank.store.local import LocalStore
from sedem.engine.interface import Engine
from sedem.errors import BankError
from sedem.inference.read import read
from sedem.method.modules import SedemModules
from sedem.quantization import check_dtype
from sedem.types import Document, distinct

COMMIT = 400_000
"""Characters read between two commits: about 8 MB of memory for a 1B model at C = 4."""


@dataclass(frozen=True)
class Report:
    """What a build did, and the size of the bank after it.

    Attributes:
        added: documents that the bank did not have.
        replaced: documents that had changed.
        unchanged: documents that the bank already had.
        documents: documents of the bank now.
        blocks: blocks of the bank now.
    """

    added: int
    replaced: int
    unchanged: int
    documents: int
    blocks: int


def build_bank(
    model: SedemModules,
    engine: Engine,
    path: Path,
    documents: Iterable[Document],
    progress: Callable[[int], None] | None = None,
    *,
    size: Callable[[Document], int] | None = None,
    source: str | None = None,
    dtype: str | None = None,
    keys: str | None = None,
) -> Report:
    """Create or extend a bank.

    Documents that the bank has already are skipped; changed ones are replaced. Each commit is
    durable, so the same call continues a build that was killed. Documents are taken one after the
    other, and no more than a commit of them is in memory. If taking one fails, those before it are
    committed before the error is raised.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        path: folder of the bank.
        documents: texts with distinct names.
        progress: called with the size of all documents that are done, and of what is done of the
            others.
        size: size of a document for `progress`; None means its characters.
        source: where the model was opened from, to be recorded in the bank.
        dtype: type of the stored slots; None means that of the bank, or bfloat16 in a new one.
        keys: type in which to store the selector's keys of the whole bank; None stores none.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank stores its slots as another type.
        ConfigError: there is no such type.
        DataError: there are no documents, or two have the same name.
    """
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    taken = _Taken(_stored(model, path, dtype), size or (lambda document: len(document.text)))
    for group in commits(taken.changed(documents)):
        group_size = sum(map(taken.size, group))
        before = taken.total - group_size

        def report(segments: int, of: int, before: int = before, part: int = group_size) -> None:
            if progress is not None:
                progress(before + part * segments // of)

        part = read(model, engine, group, source=source, progress=report)
        if path.exists():
            # The bank is not opened for it, so a commit costs what it adds.
            append_to(LocalStore(path), part.snapshot())
        else:
            part.save(path, dtype)
    bank = MemoryBank.open(path)
    if keys is not None:
        save_keys(bank, model.selector, keys)
    return Report(taken.added, taken.replaced, taken.unchanged, len(bank.documents), len(bank))


def describe(path: Path) -> dict[str, Any]:
    """Return facts about a bank on disk: which model made it, what it holds, how large it is."""
    bank = MemoryBank.open(path)
    tokens = bank.tokens
    return {
        "documents": len(bank.documents),
        "blocks": len(bank),
        "tokens": tokens,
        "dtype": bank.dtype,
        "memory_bytes": bank.memory_bytes,
        "bytes_per_token": round(bank.memory_bytes / tokens, 1) if tokens else 0.0,
        "key_bytes": stored_bytes(path),
        "kept_bytes": kept_bytes(path),
        "fingerprint": bank.fingerprint,
        **bank.made_by,
    }


@dataclass
class _Taken:
    """What was taken from a stream of documents.

    Attributes:
        stored: SHA-256 of the texts in the bank, by name.
        size: size of a document.
        total: size of all documents that were taken.
        added: how many of them the bank did not have.
        replaced: how many had changed.
        unchanged: how many the bank had.
    """

    stored: dict[str, str]
    size: Callable[[Document], int]
    total: int = field(default=0, init=False)
    added: int = field(default=0, init=False)
    replaced: int = field(default=0, init=False)
    unchanged: int = field(default=0, init=False)

    def changed(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Take documents, and yield those that the bank lacks."""
        for document in distinct(documents):
            self.total += self.size(document)
            found = self.stored.get(document.name)
            if found == text_digest(document.text):
                self.unchanged += 1
                continue
            self.added += found is None
            self.replaced += found is not None
            yield document


def _stored(model: SedemModules, path: Path, dtype: str | None) -> dict[str, str]:
    """SHA-256 of the texts in a bank by name; arguments and errors as in `build_bank`."""
    if not path.exists():
        return {}
    bank = MemoryBank.open(path)
    bank.check_made_by(model.fingerprint())
    if dtype not in (None, bank.dtype):
        raise BankError(
            f"bank '{path}' stores its slots as {bank.dtype}, not as {dtype}; "
            "leave the type out, or build another bank"
        )
    return LocalStore(path).digests()


def commits(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into commits of at least `COMMIT` characters, but for the last."""
    group: list[Document] = []
    size = 0
    try:
        for document in documents:
            group.append(document)
            size += len(document.text)
            if size >= COMMIT:
                yield group
                group, size = [], 0
    except Exception:
        # What came before the document that could not be taken is not lost.
        if group:
            yield group
        raise
    if group:
        yield group

"""Building a bank on disk from documents, commit by commit, and describing a bank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from sedem.inference.read import Progress, read
from sedem.method.modules import SedemModules
from sedem.quantization import check_dtype
from sedem.types import Document, check_documents

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
    documents: Sequence[Document],
    progress: Progress | None = None,
    *,
    source: str | None = None,
    dtype: str | None = None,
    keys: str | None = None,
) -> Report:
    """Create or extend a bank.

    Documents that the bank has already are skipped; changed ones are replaced. Each commit is
    durable, so the same call continues a build that was killed.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        path: folder of the bank.
        documents: texts with distinct names.
        progress: called with the number of characters read and the number of all characters.
        source: where the model was opened from, to be recorded in the bank.
        dtype: type of the stored slots; None means that of the bank, or bfloat16 in a new one.
        keys: type in which to store the selector's keys of the whole bank; None stores none.

    Raises:
        BankMismatchError: another model made the bank.
        BankError: the bank stores its slots as another type.
        ConfigError: there is no such type.
        DataError: two documents have the same name.
    """
    check_documents(documents)
    for name in filter(None, (dtype, keys)):
        check_dtype(name)
    stored: dict[str, str] = {}
    if path.exists():
        bank = MemoryBank.open(path)
        bank.check_made_by(model.fingerprint())
        if dtype not in (None, bank.dtype):
            raise BankError(
                f"bank '{path}' stores its slots as {bank.dtype}, not as {dtype}; "
                "leave the type out, or build another bank"
            )
        stored = LocalStore(path).digests()
    new = [d for d in documents if stored.get(d.name) != text_digest(d.text)]
    replaced = sum(document.name in stored for document in new)
    total = sum(len(document.text) for document in new)
    done = 0
    for group in commits(new):
        size = sum(len(document.text) for document in group)

        def report(segments: int, all_segments: int, done: int = done, size: int = size) -> None:
            if progress is not None:
                progress(done + size * segments // all_segments, total)

        part = read(model, engine, group, source=source, progress=report)
        if path.exists():
            # The bank is not opened for it, so a commit costs what it adds.
            append_to(LocalStore(path), part.snapshot())
        else:
            part.save(path, dtype)
        done += size
    bank = MemoryBank.open(path)
    if keys is not None:
        save_keys(bank, model.selector, keys)
    return Report(
        len(new) - replaced, replaced, len(documents) - len(new), len(bank.documents), len(bank)
    )


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


def commits(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Group documents into commits of at least `COMMIT` characters, but for the last."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= COMMIT:
            yield group
            group, size = [], 0
    if group:
        yield group

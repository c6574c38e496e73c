"""Repairing a bank: documents that lost something are read again where their texts are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sedem.bank.store import repair
from sedem.bank.store.catalog import text_digest
from sedem.bank.store.local import LocalStore
from sedem.engine.interface import Engine
from sedem.inference.build import commits
from sedem.inference.read import Progress, read
from sedem.method.modules import SedemModules
from sedem.types import Document


@dataclass(frozen=True)
class Report:
    """What a repair has done.

    Attributes:
        problems: the defects that it found, a sentence each.
        set_aside: files that were damaged, under their new names.
        repaired: documents whose blocks were whole in a damaged shard and were written anew.
        read_again: documents that had lost something and were read again; they are last now.
        dropped: documents that had lost something and are gone.
    """

    problems: list[str]
    set_aside: list[str]
    repaired: list[str]
    read_again: list[str]
    dropped: list[str]


def texts_at_hand(path: Path, sources: Sequence[Document]) -> list[Document]:
    """The damaged documents of a bank whose texts are whole, in the bank or among some sources.

    Args:
        path: folder of the bank.
        sources: documents; one counts if its name and its SHA-256 are those of the bank.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    given = {(source.name, text_digest(source.text)): source for source in sources}
    found = []
    for lost in repair.lost_documents(path):
        if lost.text is not None:
            found.append(Document(lost.name, lost.text))
        elif source := given.get((lost.name, lost.sha256)):
            found.append(source)
    return found


def read_again(
    model: SedemModules,
    engine: Engine,
    path: Path,
    documents: Sequence[Document],
    progress: Progress | None = None,
) -> None:
    """Read damaged documents of a bank again; each commit replaces some.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        path: folder of the bank.
        documents: their texts.
        progress: called with the number of documents read and the number of all documents.

    Raises:
        BankMismatchError: another model made the bank; it is unchanged.
    """
    done = 0
    for group in commits(documents):
        part = read(model, engine, group).snapshot()
        memory_NJD = part.stored(range(len(part)))
        LocalStore(path).append(
            part.fingerprint, list(part.documents), part.blocks, memory_NJD, again=True
        )
        done += len(group)
        if progress is not None:
            progress(done, len(documents))


def finish(path: Path, problems: Sequence[str], again: Sequence[Document]) -> Report:
    """Set damaged files aside and drop what was not read again.

    Args:
        path: folder of the bank.
        problems: its defects before anything was read again.
        again: the documents that were read again.

    Raises:
        BankError: another process writes the bank, or its catalog is damaged.
    """
    done = LocalStore(path).repair()
    names = [document.name for document in again]
    return Report([*problems], done.set_aside, done.repaired, names, done.dropped)

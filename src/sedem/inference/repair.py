"""Repairing a bank: damaged documents are read again if their texts are available."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sedem.bank.documents import Source
from sedem.bank.store import repair
from sedem.bank.store.catalog import text_digest
from sedem.bank.store.interface import check_fingerprint
from sedem.bank.store.local import LocalStore
from sedem.bank.store.salvage import WHOLE, Salvaged
from sedem.engine.interface import Engine
from sedem.inference.build import commits, is_long
from sedem.inference.cutter import segments_of
from sedem.inference.read import Progress, read
from sedem.inference.read_parts import read_parts
from sedem.method.modules import SedemModules
from sedem.types import Document


@dataclass(frozen=True)
class Report(repair.Repaired):
    """What a repair did, including what was read again before it.

    Attributes:
        read_again: damaged documents that were read again; they are now last in the bank.
    """

    read_again: list[str]


def texts_at_hand(
    path: Path, sources: Sequence[Document], source: Source | None = None
) -> list[Document]:
    """The damaged documents of a bank whose texts are intact, in the bank or in the sources.

    Args:
        path: folder of the bank.
        sources: documents; one is used only if its name and SHA-256 match the bank's.
        source: reads texts by name if the bank holds none; one is used only if its SHA-256 matches.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    given = {(one.name, text_digest(one.text)): one.text for one in sources}
    found = []
    may_read = source is not None and not LocalStore(path).meta().texts
    for lost in repair.lost_documents(path):
        text = lost.text or given.get((lost.name, lost.sha256))
        if text is None and source is not None and may_read:
            again = source(lost.name)
            text = again if again and text_digest(again) == lost.sha256 else None
        if text is not None:
            found.append(Document(lost.name, text, lost.pages))
    return found


def read_again(
    model: SedemModules,
    engine: Engine,
    path: Path,
    documents: Sequence[Document],
    progress: Progress | None = None,
) -> None:
    """Read damaged documents of a bank again; each commit replaces some.

    A long document is read in parts, as `build_bank` does; if that is interrupted, the next repair
    or build continues it.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        path: folder of the bank.
        documents: their texts.
        progress: called with the number of characters read and of all characters.

    Raises:
        BankMismatchError: another model made the bank; it is unchanged.
    """
    store = LocalStore(path)
    check_fingerprint(str(path), store.meta().fingerprint, model.fingerprint())
    total, done = sum(len(one.text) for one in documents), 0
    for group in commits(documents):
        size = sum(len(one.text) for one in group)

        def report(segments: int, of: int, before: int = done, part: int = size) -> None:
            if progress is not None:
                progress(before + part * segments // of, total)

        if is_long(group[0]):
            read_parts(model, engine, store, group[0], segments_of(model, group[0]), report)
        else:
            part = read(model, engine, group, progress=report).snapshot()
            memory_NJD = part.stored(range(len(part)))
            store.append(
                part.fingerprint, list(part.documents), part.blocks, memory_NJD, again=True
            )
        done += size


def finish(
    path: Path,
    problems: Sequence[str],
    again: Sequence[Document],
    before: Salvaged = WHOLE,
) -> Report:
    """Set damaged files aside and drop what was not read again.

    Args:
        path: folder of the bank.
        problems: its defects before anything was read again.
        again: the documents that were read again.
        before: what was done to repair its catalog before that.

    Raises:
        BankError: another process writes the bank, or its catalog is damaged.
    """
    done = LocalStore(path).repair()
    names = [document.name for document in again]
    set_aside = [*before.set_aside, *done.set_aside]
    return Report([*before.problems, *problems], set_aside, done.repaired, done.dropped, names)

"""Repair a bank: documents that lost a part are read again if their texts are available."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sedem.bank.care import Again, DamagedDocument
from sedem.bank.file import BankFile, check_fingerprint, text_digest
from sedem.engine.interface import Engine
from sedem.modules import SedemModules
from sedem.reading.building import add_documents
from sedem.reading.encoding import Progress
from sedem.types import Document


def reading_again(
    open_model: Callable[[BankFile], tuple[SedemModules, Engine]],
    sources: Sequence[Document],
    progress: Progress | None = None,
) -> Again:
    """Return a function for `repair` that reads lost documents again.

    Args:
        open_model: opens the model that made a bank; called if there is anything to read.
        sources: documents; one is used only if its name and SHA-256 match the bank's.
        progress: called with the number of characters read and of all characters.

    Returns:
        The function. It raises `BankMismatchError` if another model made the bank.
    """
    given = {(one.name, text_digest(one.text)): one for one in sources}

    def again(bank: BankFile, lost: Sequence[DamagedDocument]) -> list[str]:
        documents = [one for one in (_recovered(each, given) for each in lost) if one]
        if documents:
            model, engine = open_model(bank)
            check_fingerprint(str(bank), bank.meta().fingerprint, model.fingerprint())
            add_documents(model, engine, bank, bank.meta(), documents, progress)
        return [one.name for one in documents]

    return again


def _recovered(lost: DamagedDocument, given: dict[tuple[str, str], Document]) -> Document | None:
    """Return a lost document with the text that was read before; None if it is not available."""
    if lost.text is not None:
        return Document(lost.name, lost.text, lost.pages)
    found = given.get((lost.name, lost.sha256))
    return None if found is None else replace(found, pages=found.pages or lost.pages)

"""The interface of a store: it keeps one bank, and every change to the bank is atomic.

A bank is written and read through four steps:

    with store.creating(meta) as unfinished:     # a new bank; it exists once the block has ended
        unfinished.append(fingerprint, documents, blocks, memory)
    contents = store.open()                      # documents and blocks now, memory on first use
    store.append(...), store.remove(name)        # one commit each
    problems = store.verify()                    # every byte against its checksum

`MemoryBank.open_from` and `save_to` take any store. `local.LocalStore` is the one on local disk.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks, Piece
from sedem.bank.documents import Documents
from sedem.errors import BankMismatchError
from sedem.quantization import BFLOAT16, Quantized
from sedem.types import Document


@dataclass(frozen=True)
class Meta:
    """Bank-wide metadata.

    Attributes:
        fingerprint: hash of the model that made it.
        made_by: the settings behind the fingerprint, for people; `width` is D.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".
        texts: whether the texts of documents are stored; if not, only their SHA-256 is.
    """

    fingerprint: str
    made_by: dict[str, Any]
    dtype: str = BFLOAT16
    texts: bool = True


@dataclass(frozen=True, eq=False)
class Contents:
    """Everything that a bank holds as of one commit; it never changes.

    Attributes:
        meta: the bank-wide metadata.
        documents: names and texts, in reading order.
        blocks: the span behind each block, in reading order.
        pieces: the memory; a piece is read when it is first used.
        places: piece and row of each block's memory `[N, 2]`.
    """

    meta: Meta
    documents: Documents
    blocks: Blocks
    pieces: Sequence[Piece]
    places: NDArray[np.int64]


class Store(Protocol):
    """Keeps one bank. One process writes at a time; readers keep the commit they have opened."""

    def creating(self, meta: Meta) -> AbstractContextManager[Store]:
        """Create the bank; it appears, complete, when the block ends without an error.

        Yields:
            A store that holds the unfinished bank, to append to.

        Raises:
            BankError: a bank exists already, or it cannot be written.
        """
        ...

    def append(
        self,
        fingerprint: str,
        documents: Sequence[Document],
        blocks: Blocks,
        memory_NJD: Quantized,
    ) -> None:
        """Add documents and their blocks in one commit; each replaces one of the same name.

        A document that the bank already has with the same text is kept.

        Args:
            fingerprint: hash of the model that made the memory.
            documents: the documents.
            blocks: their blocks; `Blocks.documents` are indices into `documents`.
            memory_NJD: the memory of the blocks, in the same order, of any type; the store casts
                it to the bank's.

        Raises:
            BankMismatchError: another model made the bank.
            BankError: another process writes the bank, it is damaged, or the memory of a block
                holds infinities or NaN.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a document and its blocks in one commit.

        Raises:
            BankError: no document has that name, or another process writes the bank.
        """
        ...

    def open(self, known: Contents | None = None) -> Contents:
        """Read documents and blocks; memory is read when it is first used.

        Args:
            known: contents opened before; what has not changed since need not be read again.

        Raises:
            BankError: there is no bank, or it is damaged or of an unknown format.
        """
        ...

    def verify(self) -> list[str]:
        """Read every byte and compare it with its checksum.

        Returns:
            One sentence for each defect; empty if there is none.

        Raises:
            BankError: there is no bank, or it cannot be read.
        """
        ...


def check_fingerprint(bank: str, has: str, needs: str) -> None:
    """Refuse the memory of another model.

    Args:
        bank: its name, for the message.
        has: fingerprint of the model that made the bank.
        needs: fingerprint of the model that would use it.

    Raises:
        BankMismatchError: they differ; the message names both.
    """
    if has != needs:
        raise BankMismatchError(
            f"bank '{bank}' was built by model {has[:12]}, this model is {needs[:12]}; only the "
            "model that made a memory can use it: use that one, or build again with 'sedem build'"
        )

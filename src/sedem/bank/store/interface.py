"""What a store of banks can do, and what it keeps of a bank.

A store holds the documents and blocks of one bank. The one on local disk is `local`; another kind
of store implements the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sedem.bank.blocks import BlockRow, Piece
from sedem.errors import BankMismatchError
from sedem.quantization import BFLOAT16, Quantized


@dataclass(frozen=True)
class Meta:
    """What is known of a bank as a whole.

    Attributes:
        fingerprint: of the model that made it.
        made_by: the same for people.
        dtype: what its slots are stored as.
    """

    fingerprint: str
    made_by: dict[str, Any]
    dtype: str = BFLOAT16


@dataclass(frozen=True)
class Contents:
    """All that a store keeps of a bank; memory is read when it is first used.

    Attributes:
        meta: of the bank as a whole.
        documents: names and texts, in reading order.
        blocks: where each block comes from.
        pieces: the memory.
        places: piece and row of each block.
    """

    meta: Meta
    documents: list[tuple[str, str]]
    blocks: list[BlockRow]
    pieces: list[Piece]
    places: list[tuple[int, int]]


class Store(Protocol):
    """Keeps one bank. Every change is one commit: it happens whole or not at all."""

    def creating(self, meta: Meta) -> AbstractContextManager[Store]:
        """Make the bank; it appears, whole, when the block ends without an error.

        Yields:
            The unfinished bank, to append to.

        Raises:
            BankError: something is there already, or it cannot be written.
        """
        ...

    def append(
        self,
        fingerprint: str,
        documents: Sequence[tuple[str, str]],
        blocks: Sequence[BlockRow],
        memory_NJD: Quantized,
    ) -> None:
        """Add documents and their blocks; a document of the same name is replaced.

        Args:
            fingerprint: of the model that made the memory.
            documents: names and texts.
            blocks: their blocks; `document` counts within `documents`.
            memory_NJD: the blocks' memory, in the same order; stored as the bank's type.

        Raises:
            BankMismatchError: another model made the bank.
            BankError: another process writes it, or it is damaged.
        """
        ...

    def remove(self, name: str) -> None:
        """Take out a document and its blocks.

        Raises:
            BankError: no document has that name, or another process writes the bank.
        """
        ...

    def open(self) -> Contents:
        """Read what the bank holds, without its memory.

        Raises:
            BankError: there is no bank, or it is damaged or of another version.
        """
        ...

    def verify(self) -> list[str]:
        """Read every byte and compare it with its checksums.

        Returns:
            One sentence for each defect; empty when there is none.

        Raises:
            BankError: there is no bank, or it cannot be read.
        """
        ...


def check_fingerprint(bank: str, has: str, needs: str) -> None:
    """Refuse memory of another model.

    Raises:
        BankMismatchError: the fingerprints differ; both are named.
    """
    if has != needs:
        raise BankMismatchError(
            f"bank '{bank}' was built by model {has[:12]}, this model is {needs[:12]}; memory "
            "means nothing to another model: use that one, or build again with 'sedem build'"
        )

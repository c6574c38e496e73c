"""The engine interface: it runs the encoder and decodes answers for a batch of questions.

An engine belongs to one model. Reading documents needs `encode`. Questions are encoded, and their
answers share rows, which each begin and end on their own:

    hidden = engine.encode_questions(ids)                  # to score blocks with, or
    hidden = engine.read_prefixes(prefixes)                # if the question is read once
    with engine.open_rows(count) as rows:
        logits = rows.join([row], [inputs], [limit])       # decompress, inject, prefill
        logits = rows.branches(row, tokens)                # several continuations of one row
        logits = rows.step(tokens)                         # one more token of each row in use
        rows.leave(row)                                    # the row is free again

`eager.Eager` is the reference, `static.Static` the fast path; `static.open_engine` opens either.

Letters: B batch, T tokens, K selected blocks, J slots per block, P prefix tokens, E encoder width,
D decoder width, V vocabulary, X extraction layers, S branches, L tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sedem.bank.memory_bank import BankReader

Step = Callable[[Tensor], Tensor]
"""Runs one token of each row `[B]` and returns the logits after it `[B, V]`."""

WIDE = 4096
"""Number of restored states from which a row of independent blocks has its buffers to itself."""


@dataclass(frozen=True)
class AnswerInputs:
    """The inputs for answering one question.

    Attributes:
        blocks: indices of the selected blocks, in the order in which the decoder sees them.
        scores: their scores `[K]`, for guided attention.
        prefix: ids of the start token and the question `[P]`.
    """

    bank: BankReader
    blocks: Sequence[int]
    scores: Tensor
    prefix: Tensor


class Rows(Protocol):
    """Rows that are answered together; each begins and ends on its own."""

    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Decompress, inject and prefill some rows together, while others are being answered.

        Args:
            rows: rows that are not in use, from 0 to the count that was opened.

        Returns:
            Logits after the prefixes, one row for each of `rows`, `[J, V]`.
        """
        ...

    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of a row in use, none of which is stored.

        Args:
            ids_SL: tokens of each continuation, padded on the right.

        Returns:
            Logits after each token `[S, L, V]`.
        """
        ...

    def leave(self, row: int) -> None:
        """Free a row."""
        ...

    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of each row in use, of which there is at least one.

        Args:
            ids_B: tokens of all rows, on the device.

        Returns:
            Logits `[B, V]`; those of other rows are undefined.
        """
        ...


class Engine(Protocol):
    """Runs one model for reading and answering, without gradients.

    Attributes:
        batch_size: number of questions that it runs efficiently together.
        ahead: whether to start a step before the previous token has been read on the host.
    """

    name: str
    batch_size: int
    ahead: bool

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`, without the start token's.

        Args:
            ids_BT: segments of documents without the start token, padded on the right.
        """
        ...

    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """Return the same for questions, which are short; their ids are on the CPU."""
        ...

    def read_prefixes(self, prefixes: Sequence[Tensor]) -> list[Tensor]:
        """Return the decoder's states at the injection layer `[P, D]` of some prefixes `[P]`.

        Their positions leave room for a block, as `SedemConfig.read_once` requires, so that answers
        to them may reuse what was computed.
        """
        ...

    def open_rows(self, count: int) -> AbstractContextManager[Rows]:
        """Open rows for questions that arrive one after another."""
        ...

    def most_blocks(self) -> int | None:
        """Return how many blocks of full size one answer may use; None if memory sets no limit."""
        ...

    def memory(self) -> dict[str, int]:
        """Return the bytes of "weights", "caches", "graphs" and "kept".

        "graphs" is what captured graphs keep, "kept" the keys and values of independent blocks.
        """
        ...

    def release(self) -> None:
        """Free unused buffers and kept keys and values; later calls make new ones."""
        ...

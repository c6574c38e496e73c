"""What an engine is: encode, start a batch of answers, run it token by token.

Letters: B batch, T tokens, W slots of a row, U restored states of a row, E encoder width, D decoder
width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Step = Callable[[Tensor, Sequence[int]], Tensor]
"""Runs the given tokens `[B]` and returns the logits after them `[B, V]`. Only of the rows that are
named, which are not finished, will anything be read."""


@dataclass(frozen=True)
class Start:
    """Where one row starts from.

    Attributes:
        slots: memory of its blocks `[W, D]`, in the order in which the decoder is to see them.
        real: which restored states stand for real tokens `[U]`.
        prefix: start token and question.
    """

    slots: Tensor
    real: Tensor
    prefix: Tensor


class Engine(Protocol):
    """What reading and answering run a model with.

    Attributes:
        name: "eager", "static" or "graphs".
        batch_size: questions that it answers well together.
        ahead: whether a step may be started before the token before it is read.
    """

    name: str
    batch_size: int
    ahead: bool

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Frozen states at the extraction layers `[X, B, T, E]`, the start token's dropped."""
        ...

    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """The same for questions: few tokens, often."""
        ...

    def start(
        self, starts: Sequence[Start], limit: int
    ) -> AbstractContextManager[tuple[Tensor, Step]]:
        """Decompress, inject and prefill a batch, for answers of at most `limit` tokens."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of caches, and of what captured graphs keep beside them."""
        ...

    def release(self) -> None:
        """Let go of buffers that nobody uses; the next batches make their own."""
        ...

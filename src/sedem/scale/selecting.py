"""A selector replica: the keys of one part of each bank, and exact selection among its blocks.

Letters: Q question tokens, E encoder width, n blocks of the part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sedem.answering.scores import of_documents
from sedem.bank import keys, search
from sedem.bank.memory_bank import Snapshot
from sedem.method.selector import Selector
from sedem.scale.partitions import Found, best
from sedem.scale.versions import OpenVersions, Version


@dataclass(frozen=True, eq=False)
class Wanted:
    """A request to one part.

    Attributes:
        version: version of the bank.
        hidden_QE: states of the question.
        count: how many of the best blocks to return; None means all.
        documents: indexes of the documents to search; None means all.
    """

    version: Version
    hidden_QE: NDArray[np.float32]
    count: int | None
    documents: tuple[int, ...] | None


class PartSelector:
    """Selects among the blocks of one part of each bank; threads may share it.

    Args:
        selector: the selector of the model that answers.
        part: index of this part, from 0.
        parts: number of parts.
        fetch: returns the snapshot of a version.
    """

    def __init__(
        self, selector: Selector, part: int, parts: int, fetch: Callable[[Any], Snapshot]
    ) -> None:
        self.selector, self.part, self.parts = selector, part, parts
        self.versions = OpenVersions(fetch, self._open)
        # One question at a time, as on one machine: products of several would round differently.
        self._scoring = threading.Lock()

    def prepare(self, version: Version) -> None:
        """Make the keys of this part of a version.

        Raises:
            SedemError: the bank cannot be read.
        """
        self.versions.get(version)

    @torch.no_grad()
    def find(self, wanted: Wanted) -> Found:
        """Return the best blocks of this part.

        Raises:
            SedemError: the bank cannot be read.
        """
        bank, blocks = self.versions.get(wanted.version)
        if not len(blocks):
            return Found(np.zeros(0, np.int64), np.zeros(0, np.float32))
        count, documents = wanted.count, wanted.documents
        every = count is None or documents is not None or count > search.CANDIDATES
        device = self.selector.w_key.weight.device
        hidden_BQE = torch.tensor(wanted.hidden_QE).to(device)[None]
        mask_BQ = torch.ones(hidden_BQE.shape[:2], dtype=torch.bool)
        with self._scoring:
            scores_n = search.score_questions(
                self.selector, bank, hidden_BQE, mask_BQ, every=every
            )[0]
        return best(of_documents(bank, documents, scores_n.cpu()), blocks.start, count)

    def _open(self, bank: Snapshot) -> tuple[Snapshot, range]:
        """Return this part of a bank with its keys, and its blocks."""
        blocks = bank.split(self.parts)[self.part]
        part = bank.part(blocks)
        if len(blocks):
            # Of any size: keeping them is the purpose of this process.
            keys.prepare(part, self.selector)
        return part, blocks

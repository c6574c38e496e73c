"""Windows of context and continuation, cut from a tokenized corpus in a seeded order.

Letters: T context tokens, A continuation tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sedem.data.tokenized_corpus import TokenizedCorpus
from sedem.errors import DataError


class Windows(Dataset[dict[str, NDArray[np.int64]]]):
    """Windows of context and continuation, in a seeded order.

    The windows of a text start at a seeded offset. They do not overlap within an epoch, and differ
    between seeds. Item i does not depend on the items read before it, so resumed training continues
    with the same windows.

    Args:
        corpus: the tokenized corpus.
        context: T.
        continuation: A.
        seed: decides offsets and order.
        texts: indices of the texts to use; None means all.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        context: int,
        continuation: int,
        seed: int,
        texts: range | None = None,
    ) -> None:
        self.corpus = corpus
        self.context = context
        width = context + continuation
        rng = np.random.default_rng(seed)
        used = range(len(corpus)) if texts is None else texts
        starts = []
        for text in used:
            begin, end = int(corpus.bounds[text]), int(corpus.bounds[text + 1])
            offset = int(rng.integers(0, width))
            if end - begin < offset + width:
                offset = 0
            starts.append(np.arange(begin + offset, end - width + 1, width))
        self.starts: NDArray[np.int64] = np.concatenate(starts) if starts else np.zeros(0, np.int64)
        self.width = width
        if not len(self.starts):
            raise DataError(f"no text is {width} tokens long; give longer texts or shorter windows")
        rng.shuffle(self.starts)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Tokens of one window: `context` `[T]` and `continuation` `[A]`."""
        start = self.starts[index]
        tokens = np.asarray(self.corpus.tokens[start : start + self.width], dtype=np.int64)
        return {"context": tokens[: self.context], "continuation": tokens[self.context :]}


def collate_windows(windows: Sequence[Mapping[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Windows as a batch: `context` `[B, T]` and `continuation` `[B, A]`."""
    return {
        name: torch.from_numpy(np.stack([window[name] for window in windows]))
        for name in ("context", "continuation")
    }

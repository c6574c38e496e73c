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

from sedem.errors import DataError
from sedem_lab.data.corpus import TokenizedCorpus


class Windows(Dataset[dict[str, NDArray[np.int64]]]):
    """Windows of context and continuation, in a seeded order.

    The windows of a text start at a seeded offset. They do not overlap within an epoch, and differ
    between seeds. In every later epoch, the same number of windows is taken from other positions of
    the text, if it has room. An item depends only on the seed and the epoch, not on the items read
    before it, so resumed training continues with the same windows. `texts` has the indices of the
    texts to use, and `limit` takes the first windows in order.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        context: int,
        continuation: int,
        seed: int,
        texts: range | None = None,
        limit: int | None = None,
    ) -> None:
        self.corpus = corpus
        self.context = context
        self.width = width = context + continuation
        self.seed = seed
        rng = np.random.default_rng(seed)
        used = range(len(corpus)) if texts is None else texts
        starts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        # How far the windows of each text can move towards its beginning and its end.
        self._room = np.zeros((len(used), 2), np.int64)
        for number, text in enumerate(used):
            begin, end = int(corpus.bounds[text]), int(corpus.bounds[text + 1])
            offset = int(rng.integers(0, width))
            if end - begin < offset + width:
                offset = 0
            own = np.arange(begin + offset, end - width + 1, width)
            starts.append(own)
            if len(own):
                self._room[number] = offset, end - width - own[-1]
        order = np.arange(sum(map(len, starts)))
        if not len(order):
            raise DataError(f"no text is {width} tokens long; give longer texts or shorter windows")
        rng.shuffle(order)
        order = order[:limit]
        self._text = np.repeat(np.arange(len(used)), [len(own) for own in starts[1:]])[order]
        self._first = np.concatenate(starts)[order]
        self.epoch = 0

    @property
    def epoch(self) -> int:
        """Passes over the windows before this one; the trainer sets it before every pass."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """Move the windows to their positions in an epoch."""
        self._epoch = epoch
        self.starts = self._first
        if epoch:
            rng = np.random.default_rng([self.seed, epoch])
            moved = rng.integers(-self._room[:, 0], self._room[:, 1], endpoint=True)
            self.starts = self._first + moved[self._text]

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Tokens of one window: `context` `[T]` and `continuation` `[A]`."""
        start = self.starts[index]
        tokens = np.asarray(self.corpus.tokens[start : start + self.width], dtype=np.int64)
        return {"context": tokens[: self.context], "continuation": tokens[self.context :]}


def collate_windows(windows: Sequence[Mapping[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Collate windows into a batch: `context` `[B, T]` and `continuation` `[B, A]`."""
    return {
        name: torch.from_numpy(np.stack([window[name] for window in windows]))
        for name in ("context", "continuation")
    }


def window_tokens(batch: Mapping[str, Tensor]) -> int:
    """Count the tokens of contexts and continuations, whatever of them a method's loss uses."""
    return batch["context"].numel() + batch["continuation"].numel()

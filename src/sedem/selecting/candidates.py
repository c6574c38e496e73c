"""Candidates in a large bank: the blocks that are scored exactly for a question.

They are those whose codes are nearest to the question (`bank.codes`), and those with its words.
docs/performance.md reports how much of the evidence was measured to be among them.

Letters: N blocks, n some blocks, E width of all heads, W words of a code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.codes import ROW, SAMPLE, Codes, CodesFile, CodeSpace, codes_path, mean_keys
from sedem.bank.database import damaged, delete_database
from sedem.bank.keys import key_index, keys_of
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.bank.words import Words
from sedem.errors import BankError, DamagedBankError
from sedem.method.selector import Selector

logger = logging.getLogger(__name__)

COARSE_FROM = 100_000
"""Largest bank in which all blocks are scored; larger banks are searched for candidates."""
CANDIDATES = 256
"""Candidates of a question by codes."""
CANDIDATES_ALONE = 1024
"""The same for a question without candidates by words."""
WORD_CANDIDATES = 128
"""Candidates of a question by words: evidence that has them is among the first."""


def best_by_words(words: Words | None) -> Tensor:
    """Return the blocks of a large bank to compare by states because of their words, in order."""
    if words is None or words.count <= COARSE_FROM:
        return torch.zeros(0, dtype=torch.long)
    best_N = words.scores.topk(min(WORD_CANDIDATES, words.count))
    return best_N.indices[best_N.values > 0].sort().values


def nearest(bank: BankReader, selector: Selector, query_QRH: Tensor, words_n: Tensor) -> list[int]:
    """Return the candidates of a question in a large bank, in order.

    Args:
        query_QRH: unit vectors of its tokens.
        words_n: those that it has by words.
    """
    query_E, codes = query_QRH.float().mean(0).flatten().cpu(), bank_codes(bank, selector)
    count = CANDIDATES if len(words_n) else CANDIDATES_ALONE
    found_n = codes.nearest(query_E, min(count, len(bank)))
    candidates: list[int] = torch.cat([found_n, words_n]).unique().tolist()
    return candidates


@torch.no_grad()
def bank_codes(bank: BankReader, selector: Selector) -> Codes:
    """Return the codes of all blocks, and keep them in a file beside a bank that is one file.

    Only the codes of blocks that are new are made. Without a place for the file they are made
    again by the next process.
    """
    now = bank.snapshot()
    index = key_index(now, selector)
    if index.codes is None:
        index.codes = _stored_codes(now, selector)
    if index.codes is None:
        space = _fit(now, selector)
        parts = [_codes_of(now, selector, space, part_n) for part_n in _rows(np.arange(len(now)))]
        index.codes = Codes.of(space, np.concatenate(parts))
    return index.codes


def _stored_codes(now: Snapshot, selector: Selector, *, again: bool = True) -> Codes | None:
    """Return the codes in the file beside a bank, which gets those it lacks; None without one.

    A damaged file is deleted and made again.
    """
    path = now.path
    if path is None:
        return None
    (view,) = now.views
    ids_N = view.columns.ids[now.held.start : now.held.stop]
    try:
        with closing(CodesFile(path, view.head.id, selector.digest())) as file:
            space = file.space(lambda: _fit(now, selector))
            if len(space.mean_E) != selector.w_key.out_features:
                raise damaged(file.path, "its mean is not that of this selector's keys")
            codes_NW, is_known_N = file.read(ids_N, space.words)
            missing_n = np.flatnonzero(~is_known_N)
            if len(missing_n):
                logger.warning("making codes of %d blocks of bank '%s'", len(missing_n), path)
            for part_n in _rows(missing_n):
                codes_NW[part_n] = _codes_of(now, selector, space, part_n)
                file.add(ids_N[part_n], codes_NW[part_n])
    except DamagedBankError:
        delete_database(codes_path(path))
        return _stored_codes(now, selector, again=False) if again else None
    except BankError as error:
        logger.warning("%s; the codes of the bank are not stored", error)
        return None
    return Codes.of(space, codes_NW)


def _fit(bank: Snapshot, selector: Selector) -> CodeSpace:
    """Fit a space of codes to blocks from all over a bank."""
    sample_n = np.linspace(0, len(bank) - 1, min(SAMPLE, len(bank))).astype(np.int64)
    return CodeSpace.fit(_means(bank, selector, sample_n))


def _codes_of(
    bank: Snapshot, selector: Selector, space: CodeSpace, blocks_n: NDArray[np.int64]
) -> NDArray[np.uint64]:
    return space.codes(_means(bank, selector, blocks_n))


def _means(bank: Snapshot, selector: Selector, blocks_n: NDArray[np.int64]) -> Tensor:
    """Return the mean keys of some blocks `[n, E]`."""
    parts = []
    for part in scan_ranges(len(blocks_n)):
        blocks = blocks_n[part.start : part.stop].tolist()
        padding_P = (bank.slot_tokens(blocks).flatten() == 0).nonzero()[:, 0]
        parts.append(mean_keys(keys_of(bank, selector, blocks), padding_P))
    return torch.cat(parts)


def _rows(blocks_n: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split blocks into what a row of the file holds."""
    for start in range(0, len(blocks_n), ROW):
        yield blocks_n[start : start + ROW]

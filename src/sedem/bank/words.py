"""Score a bank's blocks by the words of a question: BM25 over the index of words in its files.

Hidden states find paraphrases and lose names; words find names and miss paraphrases.

Letters: N blocks, n blocks with one word, K ways to write it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.database import damaged, query
from sedem.bank.memory_bank import BankReader, Snapshot, View
from sedem.errors import BankError
from sedem.folding import Asked, asked_words, common_words, folded, is_letter

POSTINGS = 50_000
"""Blocks with a word that one question may read, rarest words first. It limits only large banks."""
ALIKE = 0.95
"""Share of the best score from which blocks have the words of a question alike."""
COMMON = math.log(2)
"""Most weight of a word of grammar: that of a word in half of all blocks."""
TELLING = 0.25
"""Least weight of a word that is shown with a block, as a share of the heaviest one's."""
_FREQUENT: WeakKeyDictionary[View, set[tuple[str, int]]] = WeakKeyDictionary()
"""Words that stand in so many blocks of a version or more: most questions have the same ones."""


_ROWS: WeakKeyDictionary[View, int] = WeakKeyDictionary()
"""Rows of blocks in the file of a view, removed ones included, when they were counted last."""


@dataclass(frozen=True)
class Word:
    """A word of a question and where it stands.

    Attributes:
        blocks: indices of the blocks with it, in order `[n]`.
        scores: BM25 of the word in each of them `[n]`.
        weight: its inverse document frequency; `COMMON` at most for a word of grammar.
        parts: 2 for a number or code of several parts, which tells as much as two words.
        common: whether it is a word of grammar.
    """

    text: str
    blocks: NDArray[np.int64]
    scores: NDArray[np.float32]
    weight: float
    parts: int = 1
    common: bool = False


@dataclass(frozen=True)
class Words:
    """The words of a question in a bank of `count` blocks."""

    words: tuple[Word, ...]
    count: int

    @cached_property
    def scores(self) -> Tensor:
        """BM25 of every block `[N]`: the sum over words; 0 for a block without any."""
        scores_N = np.zeros(self.count, np.float32)
        for word in self.words:
            scores_N[word.blocks] += word.scores
        return torch.from_numpy(scores_N)

    def covered(self, block: int) -> float:
        """Share of the words that stand in a block; 1 if there are none.

        Each counts by its weight squared, so that a block with "is" and "of" has not much of a
        question.
        """
        total = sum(word.weight**2 for word in self.words)
        held = sum(word.weight**2 for word in self.words if block in word.blocks)
        return held / total if total else 1.0

    def beside(self, others: Words, share: float) -> Words:
        """Return these words and others of the same bank, which count for a share."""
        known = {folded(word.text) for word in self.words}
        added = (
            replace(word, scores=share * word.scores, weight=share * word.weight)
            for word in others.words
            if folded(word.text) not in known
        )
        return Words((*self.words, *added), self.count)

    def alike(self) -> list[int]:
        """Return the blocks that have the words of the question about as the best one has."""
        best = self.scores.max().item() if self.count else 0.0
        return (self.scores >= ALIKE * best).nonzero()[:, 0].tolist() if best > 0 else []

    def among(self, blocks: Sequence[int]) -> Words:
        """Return the same words in a bank of these blocks alone, which are given in order."""
        chosen_n = np.asarray(blocks, np.int64)
        words = []
        for word in self.words:
            held_n = np.isin(word.blocks, chosen_n)
            weight = word.parts * word_weight(len(chosen_n), int(held_n.sum()), word.common)
            scores_n = word.scores[held_n] * np.float32(weight / word.weight)
            places_n = np.searchsorted(chosen_n, word.blocks[held_n])
            words.append(replace(word, blocks=places_n, scores=scores_n, weight=weight))
        return Words(tuple(words), len(chosen_n))

    def matching(self, block: int) -> tuple[str, ...]:
        """Words of the question that stand in a block or its document's name, rarest first.

        Those are left out that are common beside the rarest one, and words of grammar such as "is".
        """
        own = [word for word in self.words if len(word.blocks) and not word.common]
        least = TELLING * max((word.weight for word in own), default=0.0)
        found = [word for word in own if word.weight >= least and block in word.blocks]
        return tuple(word.text for word in sorted(found, key=lambda word: -word.weight))


def score_words(bank: BankReader, question: str, postings: int | None = None) -> Words:
    """Find the words of a question in a bank, by their stems; each block is scored by BM25.

    A word's weight is that of all files of the bank. How its score grows with repetitions and falls
    with a block's length is FTS5's: k1 = 1.2 and b = 0.75.

    Args:
        postings: read words from the rarest on until they stand in this many blocks together.

    Raises:
        BankError: the bank has no index of words, is damaged, or was compacted since.
    """
    now = bank.snapshot()
    if not now.has_words:
        raise BankError(
            f"bank '{now.store}' has no index of words, which selection by words needs; build it "
            "without --no-words, or select by states"
        )
    held = (word for one in asked_words(question) for word in _held(now, one))
    wanted = list({word.keys: word for word in held}.values())
    if postings is not None:
        # The rarest words, which stand in at most so many blocks together.
        counts = {one: sum(_count(view, one, postings + 1) for view in now.views) for one in wanted}
        wanted.sort(key=counts.__getitem__)
        together = accumulate(counts[word] for word in wanted)
        wanted = wanted[: sum(count <= postings for count in together)]
    total, grammar = sum(map(len, now.views)), common_words(question)
    files = [_in_file(view, wanted) for view in now.views]
    words = []
    for number, word in enumerate(wanted):
        blocks_n = np.concatenate(
            [now.indices_of(file, found[number][0]) for file, found in enumerate(files)]
        )
        shares_n = np.concatenate([found[number][1] for found in files])
        parts = 1 + (" " in word.keys[0])
        common = word.keys[0] in grammar
        weight = parts * word_weight(total, len(blocks_n), common)
        held_n = (blocks_n >= 0) & (blocks_n < len(now))
        scores_n = (weight * shares_n[held_n]).astype(np.float32)
        words.append(Word(word.text, blocks_n[held_n], scores_n, weight, parts, common))
    return Words(tuple(words), len(now))


def word_weight(total: int, count: int, common: bool = False) -> float:
    """The inverse document frequency of a word that stands in `count` of `total` blocks."""
    weight = math.log(1 + (total - count + 0.5) / (count + 0.5))
    return min(weight, COMMON) if common else weight


def _held(now: Snapshot, word: Asked) -> Iterator[Asked]:
    """Yield a word of a question, or what stands in for a number or code that is nowhere."""
    if word.otherwise is None or any(_count(view, word, 1) for view in now.views):
        yield word
        return
    for part in word.otherwise:
        yield from _held(now, part)


def _count(view: View, word: Asked, most: int) -> int:
    """Count the blocks of a file with a word, up to `most`: a frequent one stands in millions."""
    frequent = _FREQUENT.setdefault(view, set())
    pattern = " OR ".join(map(_pattern, word.keys))
    if (pattern, most) in frequent:
        return most
    with view.file.reading() as connection:
        statement = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        [(count,)] = query(connection, statement, pattern, most)
    if count == most:
        frequent.add((pattern, most))
    return int(count)


def _in_file(
    view: View, words: Sequence[Asked]
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return the rows of the blocks with each word, and their BM25 without the word's weight.

    A word of the document's name counts beside the same word in the block. Of the ways to write a
    number or code, the one that counts most does.
    """
    places = []
    with view.file.reading() as connection:
        [(indexed,)] = query(connection, "SELECT count(*) FROM words_docsize")
        if indexed > _ROWS.get(view, 0):
            [(_ROWS[view],)] = query(connection, "SELECT count(*) FROM blocks")
            if indexed > _ROWS[view]:
                raise damaged(view.file, "its index of words has more rows than it has blocks")
        for word in words:
            numbers, rows, shares = list[Any](), list[Any](), list[Any]()
            for number, pattern in enumerate(map(_pattern, word.keys)):
                for column in ("name", "text"):
                    found = query(
                        connection,
                        "SELECT rowid, bm25(words) FROM words WHERE words MATCH ?",
                        f"{column} : {pattern}",
                    )
                    try:
                        numbers_n2 = np.fromiter(chain.from_iterable(found), float).reshape(-1, 2)
                    except (TypeError, ValueError):
                        what = "its index of words holds more than numbers"
                        raise damaged(view.file, what) from None
                    # -1 for blocks that are not in this version.
                    rows_n = view.rows_of(numbers_n2[:, 0].astype(np.int64))
                    # FTS5 weighs a word by what one file holds, removed blocks included.
                    others = max(0, indexed - len(found))
                    own_weight = max(1e-6, math.log((others + 0.5) / (len(found) + 0.5)))
                    rows.append(rows_n[rows_n >= 0])
                    shares.append(-numbers_n2[rows_n >= 0, 1] / own_weight)
                    numbers.append(np.full(len(rows[-1]), number))
            held_n, place_n = np.unique(np.concatenate(rows), return_inverse=True)
            total_Kn = np.zeros((len(word.keys), len(held_n)))
            np.add.at(total_Kn, (np.concatenate(numbers), place_n), np.concatenate(shares))
            places.append((held_n, total_Kn.max(0)))
    return places


def _pattern(key: str) -> str:
    """Return the pattern of FTS5 for a word; a single letter may begin any pair."""
    return f'"{key}"' + "*" * is_letter(key)

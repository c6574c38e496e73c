"""What a question is compared with: the selector's keys of a bank's blocks, and their words.

Hidden states find paraphrases and lose names; words find names and miss paraphrases.

Computing keys from memory costs far more than comparing them, so they are cached for the next
question if they fit. `prepare` caches keys of any size; `save_keys` stores them in the bank's file.
Keys belong to one selector: those of another are ignored and recomputed. A large bank also has
codes of its blocks, which are made of their keys (`bank.codes`). Words are in an index of the
bank's files, and scored by BM25.

Letters: N blocks, n some blocks, J slots of a block, R heads, H width of a head, E numbers of a
mean key, W words of a code, K ways to write a word.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.codes import ROW, SAMPLE, Codes, CodesFile, CodeSpace, codes_path, mean_keys
from sedem.bank.database import damaged, delete_database, query
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import BankReader, Snapshot, View, checked_memory, open_values
from sedem.errors import BankError, DamagedBankError
from sedem.folding import Asked, asked_words, common_words, folded, is_letter
from sedem.method.selector import Selector
from sedem.tensors import (
    BFLOAT16,
    DTYPES,
    Quantized,
    check_dtype,
    empty,
    join,
    quantize,
    vector_bytes,
)

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**30
"""Bytes of keys that may be cached without `prepare`; more on a GPU that has the memory."""
GPU_SHARE = 4
"""On a GPU the limit is 1/GPU_SHARE of its free memory: keys exist twice while their parts are
joined, and decoding needs memory too."""
ROW_BYTES = 2**20
"""Bytes of keys per row of the bank's table."""


@dataclass
class KeyIndex:
    """The keys of one snapshot of a bank that have been computed so far.

    Attributes:
        selector: digest of the selector that made them.
        stored: the keys that the bank's file has.
        cached: keys of all blocks `[N, J, R, H]` on the selector's device.
        slot_mask: False where a slot is padding `[N, J]`, on the same device.
        codes: codes of all blocks.
    """

    selector: str
    stored: StoredKeys
    cached: Quantized | None = None
    slot_mask: Tensor | None = None
    codes: Codes | None = None


_INDEXES: WeakKeyDictionary[Snapshot, KeyIndex] = WeakKeyDictionary()


def key_index(bank: BankReader, selector: Selector) -> KeyIndex:
    """Return the index of a bank for a selector; a new one if the bank or selector changed."""
    digest, now = selector.digest(), bank.snapshot()
    index = _INDEXES.get(now)
    if index is None or index.selector != digest:
        index = KeyIndex(digest, StoredKeys(now, selector))
        _INDEXES[now] = index
    return index


def slot_mask(bank: BankReader, selector: Selector) -> Tensor:
    """Return a mask `[N, J]` on the selector's device that is False where a slot is padding."""
    index = key_index(bank, selector)
    if index.slot_mask is None:
        is_slot_NJ = torch.from_numpy(bank.blocks.slot_tokens > 0)
        index.slot_mask = is_slot_NJ.to(selector.w_key.weight.device)
    return index.slot_mask


def cache_dtype(device: torch.device) -> torch.dtype:
    """The type of cached keys: the fastest to multiply on their device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def cache_limit(device: torch.device) -> int:
    """Bytes of keys that may be cached on a device without `prepare`."""
    if device.type == "cpu":
        return CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(CACHE_BYTES, free // GPU_SHARE)


def cached_bytes(bank: BankReader, selector: Selector) -> int:
    """Bytes of the keys of all blocks of a bank, once they are cached."""
    numbers = len(bank) * bank.meta.slots * selector.w_key.out_features
    return numbers * cache_dtype(selector.w_key.weight.device).itemsize


def prepare(bank: BankReader, selector: Selector) -> None:
    """Make a bank's keys now and cache them on the selector's device, regardless of size."""
    for _ in key_parts(bank, selector, of_any_size=True):
        pass


@torch.no_grad()
def key_parts(
    bank: BankReader, selector: Selector, *, of_any_size: bool = False
) -> Iterator[tuple[range, Quantized]]:
    """Yield block indices and keys `[n, J, R, H]` of all blocks, in order and part by part.

    The keys are cached for the next question if they fit into `cache_limit`, or are `of_any_size`.
    """
    bank = bank.snapshot()
    index = key_index(bank, selector)
    device = selector.w_key.weight.device
    if index.cached is not None:
        index.cached = index.cached.to(device)
        yield range(len(bank)), index.cached
        return
    dtype = cache_dtype(device)
    fits = of_any_size or cached_bytes(bank, selector) <= cache_limit(device)
    parts = []
    for start, stop, part in _runs(bank, selector, index, range(len(bank))):
        if fits:
            part = Quantized(part.dequantize().to(dtype))
            parts.append(part)
        yield range(start, stop), part
    if fits:
        index.cached = join(parts)


@torch.no_grad()
def keys_of(bank: BankReader, selector: Selector, blocks: Sequence[int]) -> Quantized:
    """Return the keys `[n, J, R, H]` of some blocks, in the order of `blocks`."""
    bank = bank.snapshot()
    index = key_index(bank, selector)
    if index.cached is not None:
        return index.cached[list(blocks)]
    parts = [keys for *_, keys in _runs(bank, selector, index, blocks)]
    if len({part.values.dtype for part in parts}) == 1:
        return join(parts)
    # Stored keys and keys made now differ in type.
    return Quantized(torch.cat([part.dequantize().float() for part in parts]))


@torch.no_grad()
def save_keys(bank: BankReader, selector: Selector, dtype: str = BFLOAT16) -> None:
    """Store a bank's keys in its file; existing keys of this selector and type are kept.

    Rows are committed one after the other, so that an interrupted run continues.

    Raises:
        BankError: the bank is in parts or damaged, or cannot be written.
        ConfigError: there is no such type.
    """
    check_dtype(dtype)
    file = bank.store
    if not isinstance(file, BankFile) or file.path is None:
        raise BankError(f"keys are stored in a bank in one file; this one is {file}: save it first")
    digest, now = selector.digest(), Snapshot([View.newest(file)], file)
    with file.writing() as connection:
        connection.execute("DELETE FROM keys WHERE (selector, dtype) <> (?, ?)", (digest, dtype))
    ids, missing = now.views[0].columns.ids, np.flatnonzero(StoredKeys(now, selector).type_of < 0)
    heads, width = _heads(selector)
    step = max(1, ROW_BYTES // (now.meta.slots * heads * vector_bytes(width, dtype)))
    for start in range(0, len(missing), step):
        blocks = missing[start : start + step]
        keys = quantize(_project(selector, now.stored(blocks.tolist())), dtype)
        keys = keys.to(torch.device("cpu"))
        row = digest, dtype, ids[blocks].astype("<i8").tobytes(), *keys.raw()
        with file.writing() as connection:
            connection.execute(
                "INSERT INTO keys (selector, dtype, blocks, vectors, scales) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )
    _INDEXES.pop(bank.snapshot(), None)


def stored_bytes(file: BankFile) -> int:
    """Total bytes of the keys in a file."""
    with file.reading() as connection:
        return int(
            connection.execute(
                "SELECT ifnull(sum(length(vectors) + ifnull(length(scales), 0)), 0) FROM keys"
            ).get
        )


class StoredKeys:
    """The keys of one selector in the file of a bank, as of one snapshot.

    Attributes:
        type_of: type of each block's keys `[N]`, as an index of `DTYPES`; -1 if it has none.
    """

    def __init__(self, bank: Snapshot, selector: Selector) -> None:
        self.type_of = np.full(len(bank), -1, np.int8)
        self._row_of, self._place_of = (np.zeros(len(bank), np.int64) for _ in range(2))
        self._counts: dict[int, int] = {}
        self._shape = bank.meta.slots, *_heads(selector)
        self._file = file = bank.store
        if not isinstance(file, BankFile) or len(bank.views) > 1 or not len(bank):
            return
        with file.reading() as connection:
            rows = query(connection, "SELECT id, selector, dtype, blocks FROM keys")
        if any(row[1] != selector.digest() for row in rows):
            logger.warning("the keys in bank '%s' are of another selector", file)
        ids = bank.views[0].columns.ids[bank.held.start : bank.held.stop]
        order = np.argsort(ids)
        for row, digest, dtype, blocks in rows:
            if digest != selector.digest() or dtype not in DTYPES or len(blocks) % 8:
                continue
            wanted = np.frombuffer(blocks, "<i8")
            found = order[np.searchsorted(ids, wanted, sorter=order).clip(max=len(ids) - 1)]
            places = np.flatnonzero(ids[found] == wanted)
            self.type_of[found[places]] = [*DTYPES].index(dtype)
            self._row_of[found[places]], self._place_of[found[places]] = row, places
            self._counts[row] = len(wanted)

    def read(self, blocks: Sequence[int]) -> Quantized:
        """Return the keys `[n, J, R, H]` of blocks whose keys have one type."""
        rows = self._row_of[list(blocks)].tolist()
        keys = empty((len(blocks), *self._shape), [*DTYPES.values()][self.type_of[blocks[0]]])
        assert isinstance(self._file, BankFile)
        with self._file.reading() as connection:
            for column, rooms in zip(("vectors", "scales"), keys.raw(), strict=True):
                if rooms is None:
                    continue
                blobs = open_values(connection, "keys", column, rows, _replaced)
                for blob, row, block, room in zip(blobs, rows, blocks, rooms, strict=True):
                    if blob.length() != self._counts[row] * room.nbytes:
                        raise BankError(
                            "stored keys of the bank do not fit its blocks; store them again with "
                            "'sedem build BANK FILE... --keys TYPE'"
                        )
                    blob.seek(int(self._place_of[block]) * room.nbytes)
                    blob.read_into(room.data)
        return checked_memory(self._file, keys)


def _replaced() -> BankError:
    return BankError("keys of the bank were replaced; open the bank again")


def _heads(selector: Selector) -> tuple[int, int]:
    return selector.heads, selector.w_key.out_features // selector.heads


def _project(selector: Selector, memory_NJD: Quantized) -> Tensor:
    return selector.keys(memory_NJD.dequantize().to(selector.w_key.weight))


def _runs(
    bank: BankReader, selector: Selector, index: KeyIndex, blocks: Sequence[int]
) -> Iterator[tuple[int, int, Quantized]]:
    """Yield start, stop and keys of runs of `blocks`, which are stored as one type, or not at all.

    A run has at most `SCAN` blocks.
    """
    # Arrays, because lists of a million numbers would take more memory than a part's keys.
    chosen = slice(blocks.start, blocks.stop) if isinstance(blocks, range) else list(blocks)
    ends = (np.flatnonzero(np.diff(index.stored.type_of[chosen])) + 1).tolist()
    for first, last in pairwise([0, *ends, len(blocks)]):
        for part in scan_ranges(last - first):
            start, stop = first + part.start, first + part.stop
            run = blocks[start:stop]
            if index.stored.type_of[run[0]] < 0:
                keys = Quantized(_project(selector, bank.stored(run)))
            else:
                keys = index.stored.read(run)
            yield start, stop, keys.to(selector.w_key.weight.device)


# Codes of mean keys, by which a large bank is searched


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
        space, every_N = _fit(now, selector), np.arange(len(now))
        parts = [space.codes(_means(now, selector, part_n)) for part_n in _rows(every_N)]
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
                codes_NW[part_n] = space.codes(_means(now, selector, part_n))
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


def _rows(blocks_n: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Split blocks into what a row of the file holds."""
    for start in range(0, len(blocks_n), ROW):
        yield blocks_n[start : start + ROW]


def _means(bank: Snapshot, selector: Selector, blocks_n: NDArray[np.int64]) -> Tensor:
    """Return the mean keys of some blocks `[n, E]`."""
    parts = []
    for part in scan_ranges(len(blocks_n)):
        blocks = blocks_n[part.start : part.stop].tolist()
        padding_P = (bank.slot_tokens(blocks).flatten() == 0).nonzero()[:, 0]
        parts.append(mean_keys(keys_of(bank, selector, blocks), padding_P))
    return torch.cat(parts)


# Scores by words

POSTINGS = 50_000
"""Blocks with a word that one question may read, rarest words first. It limits only large banks."""
ALIKE = 0.95
"""Share of the best score from which blocks have the words of a question alike."""
COMMON = math.log(2)
"""Most weight of a word of grammar: that of a word in half of all blocks."""
UNSEEN = 15
"""Blocks without words of a question that are thought beside a bank, to weigh words by."""
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
        parts: how much it counts beside others: 2 for a number or code of several parts, a share
            for a word of what was said before.
        common: whether it is a word of grammar.
    """

    text: str
    blocks: NDArray[np.int64]
    scores: NDArray[np.float32]
    weight: float
    parts: float = 1
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
        question; by its weight among `UNSEEN` more blocks, because in a bank of one block what it
        says would weigh next to nothing.
        """
        shares = [
            (word.parts * word_weight(self.count + UNSEEN, len(word.blocks), word.common)) ** 2
            for word in self.words
        ]
        pairs = zip(shares, self.words, strict=True)
        held = sum(share for share, word in pairs if block in word.blocks)
        return held / sum(shares) if shares else 1.0

    def beside(self, others: Words, share: float) -> Words:
        """Return these words and others of the same bank, which count for a share."""
        known = {folded(word.text) for word in self.words}
        added = (
            replace(
                word,
                scores=share * word.scores,
                weight=share * word.weight,
                parts=share * word.parts,
            )
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

"""Codes: one short code per block, to find the blocks of a large bank that a question is about.

The mean of a block's keys says roughly what it is about, once what all blocks have in common is
taken away. A code holds only signs of it, so that a question is compared with a million codes in
milliseconds. Codes are derived data, in a file beside the bank that may be deleted at any time.

Letters: N blocks, J slots of a block, R heads, H width of a head, E numbers of a mean key (R * H),
C signs of a code, W words of 64 signs.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import apsw
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.database import (
    check_no_link,
    connect,
    damaged,
    database_errors,
    delete_database,
    empty_log,
    free_space,
    has_tables,
    prepare_empty,
    query,
)
from sedem.errors import BankError, DamagedBankError
from sedem.tensors import Quantized

logger = logging.getLogger(__name__)

SUFFIX = ".codes"
SAMPLE = 2**14
"""Blocks that directions are fitted to."""
SIGNS = 2
"""Signs of a code per number of a mean key: C is SIGNS * E, rounded up to whole words."""
RIDGE = 0.1
"""What is added to the variances of mean keys before they are evened out, as a share of their
mean: directions in which blocks hardly differ say little."""
CLOSE = 8
"""Blocks with a similar code that are compared by the numbers of the query, for each wanted one."""
SLICE = 2**15
"""Codes that are compared at once; more would not fit a CPU's cache."""
ROW = 2**13
"""Codes per row of the file: about a megabyte."""
_APPLICATION = 0x53644344
_TABLES = """
CREATE TABLE space (
    bank TEXT NOT NULL,       -- id of the bank
    selector TEXT NOT NULL,   -- digest of the selector whose keys they are made of
    mean BLOB NOT NULL,       -- float32 x E
    directions BLOB NOT NULL  -- float32 x C x E
) STRICT;
CREATE TABLE codes (
    blocks BLOB NOT NULL,     -- ids of blocks, int64
    signs BLOB NOT NULL       -- C bits per block
) STRICT;
"""


def codes_path(bank: Path) -> Path:
    """Return the file of codes of a bank."""
    return bank.with_name(bank.name + SUFFIX)


def mean_keys(keys_NJRH: Quantized, padding_P: Tensor) -> Tensor:
    """Average each block's keys over its real slots `[N, E]`, on the CPU.

    Args:
        padding_P: indices of padding among the N * J slots, on the CPU.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    real_L = torch.ones(blocks * slots)
    real_L[padding_P] = 0
    real_NJ = real_L.view(blocks, slots)
    weights_NJ = real_NJ / real_NJ.sum(1, keepdim=True).clamp_min(1)
    keys_NJE = keys_NJRH.dequantize().float().flatten(2)
    return torch.einsum("nje,nj->ne", keys_NJE, weights_NJ.to(keys_NJE)).cpu()


@dataclass(frozen=True)
class CodeSpace:
    """The directions whose signs are the codes of a bank.

    Attributes:
        mean_E: the mean key of the whole bank.
        directions_CE: rows of random rotations, after variances were evened out.
    """

    mean_E: Tensor
    directions_CE: Tensor

    @classmethod
    def fit(cls, means_NE: Tensor) -> CodeSpace:
        """Fit directions to the mean keys of a sample of blocks.

        What all questions have in common lies mostly along the mean key, and would favour the same
        blocks for each of them. So that direction is left out.
        """
        mean_E = means_NE.mean(0)
        common_E = torch.nn.functional.normalize(mean_E, dim=0)
        without_EE = torch.eye(len(mean_E)) - torch.outer(common_E, common_E)
        centred_NE = (means_NE - mean_E) @ without_EE
        variances_E, axes_EE = torch.linalg.eigh(centred_NE.T @ centred_NE / len(means_NE))
        # A quarter for the block and a quarter for the query: their product is divided by the
        # standard deviation, which finds more than variances left as they are or made equal.
        even_E = (variances_E + RIDGE * variances_E.mean()).clamp_min(1e-12) ** -0.25
        count = -(-SIGNS * len(mean_E) // 64) * 64
        generator = torch.Generator().manual_seed(0)
        rotations = [
            torch.linalg.qr(torch.randn(len(mean_E), len(mean_E), generator=generator))[0]
            for _ in range(-(-count // len(mean_E)))
        ]
        turned_CE = torch.cat(rotations)[:count] @ (even_E[:, None] * axes_EE.T)
        return cls(mean_E, turned_CE @ without_EE)

    @property
    def words(self) -> int:
        """W."""
        return len(self.directions_CE) // 64

    def codes(self, means_NE: Tensor) -> NDArray[np.uint64]:
        """Return the codes `[N, W]` of blocks with these mean keys."""
        signs_NC = (means_NE - self.mean_E) @ self.directions_CE.T > 0
        return np.packbits(signs_NC.numpy(), axis=1, bitorder="little").view("<u8")


@dataclass(frozen=True)
class Codes:
    """The codes of all blocks of a bank.

    Attributes:
        words_WN: their signs, 64 in each word.
    """

    space: CodeSpace
    words_WN: NDArray[np.uint64]

    @classmethod
    def of(cls, space: CodeSpace, codes_NW: NDArray[np.uint64]) -> Codes:
        """Return codes in the order in which they are compared."""
        return cls(space, np.ascontiguousarray(codes_NW.T))

    def nearest(self, query_E: Tensor, count: int) -> Tensor:
        """Return the indices of the blocks that look most like what a question is about.

        Args:
            query_E: mean of the question's queries, on the CPU.
            count: how many, at most the number of blocks.
        """
        query_C = self.space.directions_CE @ query_E
        query_W = np.packbits(query_C.numpy() > 0, bitorder="little").view("<u8")
        blocks = self.words_WN.shape[1]
        differing_N = np.zeros(blocks, np.uint16)

        def count_differing(start: int) -> None:
            part = slice(start, start + SLICE)
            for word, words_N in zip(query_W, self.words_WN, strict=True):
                differing_N[part] += np.bitwise_count(words_N[part] ^ word)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(count_differing, range(0, blocks, SLICE)))
        # Counted, because few numbers are possible: a partition takes three times as long.
        limit = np.bincount(differing_N).cumsum().searchsorted(min(CLOSE * count, blocks))
        close_n = np.flatnonzero(differing_N <= limit)
        bytes_nB = np.ascontiguousarray(self.words_WN[:, close_n].T).view(np.uint8)
        signs_nC = torch.from_numpy(np.unpackbits(bytes_nB, axis=1, bitorder="little"))
        best_n = (signs_nC.float() @ query_C).topk(count).indices
        return torch.from_numpy(close_n)[best_n]


def forget_codes(bank: Path, ids: Collection[int]) -> None:
    """Delete the codes of some blocks, if there is a file; nothing stays in it or its log.

    A damaged or malformed file is deleted as a whole. One that is something else stays.
    """
    path, gone_n = codes_path(bank), np.fromiter(ids, np.int64)
    if not path.is_file():
        return
    try:
        with closing(CodesFile(bank, create=False)) as file, file.using() as connection:
            with connection:
                for row, *columns in query(connection, "SELECT rowid, blocks, signs FROM codes"):
                    is_kept_n = ~np.isin(np.frombuffer(columns[0], "<i8"), gone_n)
                    if is_kept_n.all():
                        continue
                    by_block = (
                        np.frombuffer(column, np.uint8).reshape(len(is_kept_n), -1)
                        for column in columns
                    )
                    kept = (bytes_nB[is_kept_n].tobytes() for bytes_nB in by_block)
                    statement = "UPDATE codes SET blocks = ?, signs = ? WHERE rowid = ?"
                    connection.execute(statement, (*kept, row))
                free_space(connection)
            empty_log(path, connection)
    except (DamagedBankError, ValueError):
        delete_database(path)
    except BankError as error:
        logger.warning("%s; it may hold what was removed from its bank", error)


class CodesFile:
    """The codes of one bank and selector, in a SQLite file beside the bank; threads may share it.

    Args:
        bank: file of the bank.
        id: id of the bank.
        selector: digest of the selector.
        create: create the file if it does not exist.
    """

    def __init__(
        self, bank: Path, id: str = "", selector: str = "", *, create: bool = True
    ) -> None:
        self.path = path = codes_path(bank)
        self._belongs = id, selector
        self._lock = threading.Lock()
        check_no_link(path)
        with database_errors(path):
            self._connection = connect(path.parent.resolve() / path.name, create=create)
        weakref.finalize(self, self._connection.close)
        with self.using() as connection:
            # A killed process may have left a file without a table.
            if create and not has_tables(connection):
                prepare_empty(connection, 2**20)
                with connection:
                    connection.execute(f"PRAGMA application_id = {_APPLICATION}; {_TABLES}")
            if create:
                # Codes need not survive a power cut, but must not be damaged by one.
                connection.pragma("journal_mode", "wal")
                connection.execute("PRAGMA synchronous = NORMAL")
            found = query(connection, "SELECT sql FROM sqlite_master WHERE sql NOT NULL")
            stated = "\n" + "".join(f"{sql};\n" for (sql,) in found)
            if connection.pragma("application_id") != _APPLICATION or stated != _TABLES:
                raise BankError(f"'{path}' is not a file of codes; remove it")

    @contextmanager
    def using(self) -> Iterator[apsw.Connection]:
        """Yield the connection to one thread at a time."""
        with self._lock, database_errors(self.path):
            yield self._connection

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def space(self, new: Callable[[], CodeSpace]) -> CodeSpace:
        """Return the space of the codes; without one, a new one, and other codes are deleted."""
        if (found := self._space()) is not None:
            return found
        made = new()
        blobs = (
            tensor.numpy().astype("<f4").tobytes() for tensor in (made.mean_E, made.directions_CE)
        )
        with self.using() as connection, connection:
            connection.execute("DELETE FROM space WHERE (bank, selector) <> (?, ?)", self._belongs)
            connection.execute("DELETE FROM codes WHERE NOT EXISTS (SELECT 1 FROM space)")
            # Unless another process was faster: then its codes are in the file.
            connection.execute(
                "INSERT INTO space SELECT ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM space)",
                (*self._belongs, *blobs),
            )
        return self._space() or made

    def _space(self) -> CodeSpace | None:
        statement = "SELECT mean, directions FROM space WHERE (bank, selector) = (?, ?)"
        with self.using() as connection:
            rows = query(connection, statement, *self._belongs)
        if not rows:
            return None
        mean, directions = (
            torch.tensor(np.frombuffer(blob[: len(blob) // 4 * 4], "<f4")) for blob in rows[0]
        )
        if not len(mean) or not len(directions) or len(directions) % (64 * len(mean)):
            raise damaged(self.path, "its directions do not fit its mean")
        if not (mean.isfinite().all() and directions.isfinite().all()):
            raise damaged(self.path, "its directions hold infinities or NaN")
        return CodeSpace(mean, directions.view(-1, len(mean)))

    def read(
        self, ids_N: NDArray[np.int64], words: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Return the codes `[N, W]` of blocks with some ids, and which of them the file has."""
        codes_NW, known_N = np.zeros((len(ids_N), words), np.uint64), np.zeros(len(ids_N), bool)
        order_N = np.argsort(ids_N)
        with self.using() as connection:
            for blocks, signs in connection.execute("SELECT blocks, signs FROM codes"):
                if len(blocks) % 8 or len(signs) != len(blocks) * words:
                    raise damaged(self.path, "its codes do not fit its blocks")
                wanted_n = np.frombuffer(blocks, "<i8")
                places_n = np.searchsorted(ids_N, wanted_n, sorter=order_N).clip(max=len(ids_N) - 1)
                found_n = order_N[places_n]
                is_here_n = ids_N[found_n] == wanted_n
                codes_nW = np.frombuffer(signs, "<u8").reshape(-1, words)
                codes_NW[found_n[is_here_n]] = codes_nW[is_here_n]
                known_N[found_n[is_here_n]] = True
        return codes_NW, known_N

    def add(self, ids_n: NDArray[np.int64], codes_nW: NDArray[np.uint64]) -> None:
        """Store the codes of blocks, in one commit."""
        row = ids_n.astype("<i8").tobytes(), codes_nW.astype("<u8").tobytes()
        with self.using() as connection:
            connection.execute("INSERT INTO codes VALUES (?, ?)", row)

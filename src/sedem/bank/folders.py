"""Banks of formats 3 and 4, which were folders: read here to be converted, and nowhere else.

Such a folder has a SQLite catalog and safetensors files with the memory of blocks. Memory and texts
are copied as they are, each compared with its checksum; nothing is read by a model again.

Letters: N blocks of a file, J slots of a block.
"""

from __future__ import annotations

import json
import re
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sedem.bank import rows
from sedem.bank.blocks import Blocks
from sedem.bank.file import BankFile
from sedem.bank.rows import Meta
from sedem.errors import BankError
from sedem.quantization import Quantized, join
from sedem.types import Document

_FORMATS = {"3": True, "4": False}
"""Whether texts are stored, by format."""
_FILE = re.compile(r"\d{6,}\.safetensors")


@dataclass(frozen=True, eq=False)
class _Part:
    """A file of memory, and its rows according to the catalog.

    Attributes:
        path: the file.
        blocks: its rows; `documents` are ids.
        checksums: CRC-32 of the memory of each row `[N]`.
    """

    path: Path
    blocks: Blocks
    checksums: NDArray[np.uint32]

    def read(self, chosen: NDArray[np.int64]) -> Quantized:
        """Return the memory of some rows `[n, J, D]`, compared with their checksums."""
        if not self.path.is_file():
            raise BankError(f"'{self.path}' is missing, or not a regular file; restore it")
        with safe_open(self.path, framework="pt") as file:
            tensors = [
                file.get_tensor(name)[torch.from_numpy(chosen)]
                for name in ("memory", "scales")
                if name in file.keys()  # noqa: SIM118
            ]
        memory = Quantized(*tensors)
        for place, row in enumerate(chosen.tolist()):
            content = b"".join(
                tensor[place].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors
            )
            if zlib.crc32(content) != self.checksums[row]:
                raise BankError(f"block {row} of '{self.path}' is damaged; restore the old bank")
        return memory


def import_folder(folder: Path, target: BankFile) -> int:
    """Convert a bank of format 3 or 4; the new bank appears when all of it is written.

    Args:
        folder: the old bank; it stays as it is.
        target: the new bank.

    Returns:
        Bytes of the new bank.

    Raises:
        BankError: the folder is not such a bank, it is damaged, or the new bank cannot be written.
    """
    with _reading(folder) as catalog:
        meta, parts = _meta(folder, catalog), _parts(folder, catalog)
        slots, width = _shape(parts)
        texts = _FORMATS[meta["schema_version"]]
        new = Meta(
            meta["fingerprint"], meta["made_by"], slots or 1, width or meta["made_by"]["width"],
            meta["dtype"], texts, words=texts,
        )  # fmt: skip
        documents = catalog.execute(
            "SELECT id, name, characters, sha256, pages FROM documents WHERE removed = 0 "
            "ORDER BY id"
        ).fetchall()
        with target.creating(new), target.writing() as connection:
            version = rows.next_version(connection)
            for number, name, characters, sha256, pages in documents:
                first = np.frombuffer(pages, "<i8").tolist()
                added = rows.insert_document(connection, name, characters, sha256, first)
                blocks, memory = _rows_of(parts, number)
                rows.insert_blocks(connection, added, blocks, memory, range(len(blocks)))
                if texts:
                    text = _text(folder, catalog, number, sha256)
                    rows.insert_text(connection, new, added, Document(name, text, tuple(first)))
                rows.show_document(connection, added, version)
    return target.size


@contextmanager
def _reading(folder: Path) -> Iterator[sqlite3.Connection]:
    path = folder / "catalog.sqlite"
    for inside in (path, *folder.rglob("*")):
        if inside.is_symlink():
            raise BankError(f"'{inside}' is a link, which could lead anywhere; restore the bank")
    if not path.is_file():
        raise BankError(f"'{folder}' is not a bank: it has no catalog.sqlite")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as catalog:
            catalog.execute("BEGIN")
            yield catalog
    except (sqlite3.Error, SafetensorError, ValueError, TypeError, KeyError, IndexError) as error:
        raise BankError(
            f"'{folder}' is damaged ({error}); restore it, or build the bank again"
        ) from None


def _meta(folder: Path, catalog: sqlite3.Connection) -> dict[str, Any]:
    meta = dict(catalog.execute("SELECT key, value FROM meta"))
    if meta.get("schema_version") not in _FORMATS:
        raise BankError(
            f"bank '{folder}' has format {meta.get('schema_version')!a}, formats "
            f"{' and '.join(_FORMATS)} can be converted; build it again with 'sedem build'"
        )
    return {**meta, "made_by": json.loads(meta["made_by"])}


def _parts(folder: Path, catalog: sqlite3.Connection) -> list[_Part]:
    found = []
    for file, count, documents, spans, tokens, checksums in catalog.execute(
        "SELECT file, blocks, documents, spans, slot_tokens, checksums FROM shards ORDER BY id"
    ):
        # A name that contains a path could point outside the bank.
        if not _FILE.fullmatch(file):
            raise BankError(f"bank '{folder}' names a file {file!a}; restore it")
        spans_N2 = np.frombuffer(spans, "<i8").reshape(count, 2)
        blocks = Blocks(
            np.frombuffer(documents, "<i8"),
            spans_N2[:, 0],
            spans_N2[:, 1],
            np.frombuffer(tokens, np.uint8).reshape(count, -1 if count else 0),
        )
        path = folder / "shards" / file
        found.append(_Part(path, blocks, np.frombuffer(checksums, "<u4")))
    return found


def _shape(parts: list[_Part]) -> tuple[int, int]:
    """Return J and the width of a slot; zeros if there are no blocks."""
    for part in parts:
        if len(part.blocks):
            _, slots, width = part.read(np.zeros(1, np.int64)).values.shape
            return slots, width
    return 0, 0


def _rows_of(parts: list[_Part], document: int) -> tuple[Blocks, Quantized]:
    """Return the blocks of a document and their memory."""
    chosen = [(part, np.flatnonzero(part.blocks.documents == document)) for part in parts]
    chosen = [(part, wanted) for part, wanted in chosen if len(wanted)]
    blocks = Blocks.join([part.blocks.take(wanted) for part, wanted in chosen])
    return blocks, join([part.read(wanted) for part, wanted in chosen])


def _text(folder: Path, catalog: sqlite3.Connection, document: int, sha256: str) -> str:
    pieces = catalog.execute(
        "SELECT text FROM texts WHERE document = ? ORDER BY start", (document,)
    )
    text = "".join(piece for (piece,) in pieces)
    if rows.text_digest(text) != sha256:
        raise BankError(
            f"the text of document {document} of '{folder}' is damaged; repair the bank with the "
            "sedem that made it"
        )
    return text

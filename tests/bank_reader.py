"""A reader of banks from docs/bank-format.md alone: plain Python and numpy, nothing of sedem."""

import json
import sqlite3
import struct
import zlib
from pathlib import Path

import numpy as np


def read_table(catalog: sqlite3.Connection, table: str, total: list | None = None) -> list:
    """The rows of a table, each compared with its checksum, all with their number and sum."""
    rows = [dict(row) for row in catalog.execute(f"SELECT * FROM {table} ORDER BY 1")]
    for row in rows:
        values = [row[c] for c in row if c != "crc32" and (table, c) != ("texts", "id")]
        values = [v.encode() if isinstance(v, str) else v for v in values]
        values = [struct.pack("<q", v) if isinstance(v, int) else v for v in values]
        framed = b"".join(struct.pack("<q", len(value)) + value for value in values)
        assert zlib.crc32(framed) == row["crc32"], f"a row of {table} is damaged"
    found = [len(rows), sum(row["crc32"] for row in rows)]
    assert total in (None, found), f"{table} is damaged: rows are missing, or older ones are back"
    return rows


def decode(raw: bytes, kind: str) -> np.ndarray:
    """The numbers behind bytes; `kind` is what safetensors calls their type."""
    if kind == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    numbers = np.frombuffer(raw, np.int8).astype("<i4")
    if kind == "F8_E4M3":
        sign, power, fraction = np.where(numbers < 0, -1, 1), numbers >> 3 & 15, numbers & 7
        numbers = sign * (fraction + 8 * (power > 0)) * 2.0 ** (np.maximum(power, 1) - 10)
    return numbers.astype("<f4")


def read_shard(bank: Path, shard: dict) -> list:
    """Document id, start, end and memory `[J, D]` of each row."""
    file, rows = shard["file"], []
    assert Path(file).name == file, f"{file} may lie outside the bank"
    data = (bank / "shards" / file).read_bytes()
    first = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:first])
    places = [header[name]["data_offsets"] for name in ("memory", "scales") if name in header]
    tensors = [data[first + start : first + end] for start, end in places]
    ids, crcs = np.frombuffer(shard["documents"], "<i8"), np.frombuffer(shard["checksums"], "<u4")
    for row, span in enumerate(struct.iter_unpack("<qq", shard["spans"])):
        raw = [one[row * len(one) // len(ids) :][: len(one) // len(ids)] for one in tensors]
        assert zlib.crc32(b"".join(raw)) == crcs[row], f"block {row} of {file} is damaged"
        memory = decode(raw[0], header["memory"]["dtype"]).reshape(header["memory"]["shape"][1:])
        scales = np.frombuffer(raw[1], "<f4")[:, None] if len(raw) > 1 else 1
        rows.append((ids[row], *span, memory * scales))
    return rows


def read_bank(bank: Path) -> tuple[dict, list]:
    """Texts by name, and name, span and memory of each block, both in reading order."""
    with sqlite3.connect(f"{bank.absolute().as_uri()}/catalog.sqlite?mode=ro", uri=True) as catalog:
        catalog.row_factory = sqlite3.Row
        meta = {row["key"]: row["value"] for row in read_table(catalog, "meta")}
        assert meta["schema_version"] in ("3", "4"), "another format"
        state = json.loads(meta["state"])
        tables = {t: read_table(catalog, t, state[t]) for t in ("documents", "shards", "texts")}
    names = {row["id"]: row["name"] for row in tables["documents"] if not row["removed"]}
    texts = {name: "" for name in names.values()}
    for piece in sorted(tables["texts"], key=lambda piece: piece["start"]):
        if piece["document"] in names:
            texts[names[piece["document"]]] += piece["text"]
    blocks = [b for shard in tables["shards"] for b in read_shard(bank, shard) if b[0] in names]
    return texts, [(names[b[0]], *b[1:]) for b in sorted(blocks, key=lambda block: block[0])]

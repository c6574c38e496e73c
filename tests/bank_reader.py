"""A reader of banks from docs/bank-format.md alone: plain Python and numpy, nothing of sedem."""

import json
import re
import sqlite3
import struct
import zlib
from pathlib import Path

import numpy as np


def e4m3(byte: int) -> float:
    """The number behind a byte of type fp8: a sign, four bits of exponent, three of fraction."""
    sign, power, fraction = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    return sign * (fraction + 8 * bool(power)) * 2.0 ** (max(power, 1) - 10)


def checked(rows: list, total: list | None = None) -> list:
    """Rows without their checksums, which come last and are compared."""
    for *values, crc in rows:
        found = 0
        for value in values:
            data = value.to_bytes(8, "little", signed=True) if isinstance(value, int) else value
            data = data.encode() if isinstance(data, str) else data
            found = zlib.crc32(data, zlib.crc32(struct.pack("<Q", len(data)), found))
        assert found == crc, f"damaged row {values[:2]}"
    assert total is None or total == [len(rows), sum(row[-1] for row in rows)], "rows are missing"
    return [row[:-1] for row in rows]


def read_shard(bank: Path, shard: tuple) -> list:
    """Document id, start, end and memory `[J, D]` of each row."""
    _, name, count, size, _, documents, spans, _, checksums = shard
    assert re.fullmatch(r"\d{6,}\.safetensors", name), f"{name} may lie outside the bank"
    data = (bank / "shards" / name).read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    content = memoryview(data)[len(data) - max(t["data_offsets"][1] for t in header.values()) :]
    parts = {}
    for tensor, about in header.items():
        first, last = about["data_offsets"]
        parts[tensor] = np.frombuffer(content[first:last], np.uint8).reshape(count, -1)
    assert len(data) == size, f"{name} is cut"
    rows = []
    ids, crcs = struct.unpack(f"<{count}q", documents), struct.unpack(f"<{count}I", checksums)
    for row, (start, end) in enumerate(struct.iter_unpack("<qq", spans)):
        raw = [parts[t][row].tobytes() for t in ("memory", "scales") if t in parts]
        assert zlib.crc32(b"".join(raw)) == crcs[row], f"block {row} of {name} is damaged"
        kind, shape = header["memory"]["dtype"], header["memory"]["shape"][1:]
        if kind == "BF16":  # the upper half of a float32
            memory = (np.frombuffer(raw[0], "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        else:
            numbers = np.frombuffer(raw[0], np.int8)
            if kind != "I8":
                numbers = np.array([e4m3(byte) for byte in raw[0]])
            scales = np.frombuffer(raw[1], "<f4")[:, None]
            memory = numbers.reshape(shape).astype("<f4") * scales
        rows.append((ids[row], start, end, memory))
    return rows


def read_bank(bank: Path) -> tuple[dict, list]:
    """Texts by name, and name, span and memory of each block, both in reading order."""
    with sqlite3.connect(f"{bank.absolute().as_uri()}/catalog.sqlite?mode=ro", uri=True) as catalog:
        meta = dict(checked(catalog.execute("SELECT key, value, crc32 FROM meta").fetchall()))
        assert meta["schema_version"] in ("3", "4"), "another format"
        rows = {}
        for table, columns in (
            ("documents", "id, name, characters, sha256, removed, pages"),
            ("shards", "id, file, blocks, bytes, sha256, documents, spans, slot_tokens, checksums"),
            ("texts", "document, start, text"),
        ):
            found = catalog.execute(f"SELECT {columns}, crc32 FROM {table} ORDER BY 1, 2")
            rows[table] = checked(found.fetchall(), json.loads(meta["state"])[table])
    pieces = {number: [] for number, *_ in rows["documents"]}
    for number, _, text in rows["texts"]:
        pieces[number].append(text)
    names = {number: name for number, name, *_, removed, _ in rows["documents"] if not removed}
    blocks = [row for shard in rows["shards"] for row in read_shard(bank, shard)]
    blocks = sorted((b for b in blocks if b[0] in names), key=lambda b: b[0])
    texts = {name: "".join(pieces[number]) for number, name in names.items()}
    return texts, [(names[number], *block) for number, *block in blocks]

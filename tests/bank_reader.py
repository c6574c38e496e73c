"""A reader of banks from docs/bank-format.md alone: sqlite3 and numpy, nothing of sedem."""

import sqlite3
from pathlib import Path

import numpy as np


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """The numbers behind bytes."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    numbers = np.frombuffer(raw, np.int8).astype("<i4")
    if dtype == "fp8":  # sign, 4 bits of exponent, 3 bits of fraction
        sign, power, fraction = np.where(numbers < 0, -1, 1), numbers >> 3 & 15, numbers & 7
        numbers = sign * (fraction + 8 * (power > 0)) * 2.0 ** (np.maximum(power, 1) - 10)
    return numbers.astype("<f4")


def read_bank(path: Path) -> tuple[dict, list]:
    """Texts by name, and name, span and memory of each block, both in reading order."""
    with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True) as bank:
        dtype, slots, width = bank.execute("SELECT dtype, slots, width FROM bank").fetchone()
        live = "added NOT NULL AND removed IS NULL"
        names = bank.execute(f"SELECT id, name FROM documents WHERE {live} ORDER BY id").fetchall()
        texts = {
            name: "".join(
                text
                for (text,) in bank.execute(
                    "SELECT text FROM texts WHERE document = ? ORDER BY start", (number,)
                )
            )
            for number, name in names
        }
        blocks = []
        for name, start, end, memory, scales in bank.execute(
            'SELECT name, start, "end", memory, scales FROM blocks JOIN documents '
            f"ON documents.id = blocks.document WHERE {live} ORDER BY document, number"
        ):
            factors = 1 if scales is None else np.frombuffer(scales, "<f4")[:, None]
            blocks.append((name, start, end, decode(memory, dtype).reshape(slots, width) * factors))
        return texts, blocks

"""Small banks of made-up memory, for tests of stores: no model is needed."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import apsw
import torch
from torch import Tensor

from sedem import Document, MemoryBank
from sedem.bank.blocks import BlockRow, Blocks, Meta
from sedem.bank.database import connect
from sedem.bank.file import BankFile
from sedem.bank.parts import Store
from sedem.tensors import Quantized

PRINT = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
WIDTH, SLOTS = 8, 4
META = Meta(PRINT, {"model": "made up"}, SLOTS, WIDTH)


def text_of(number: int, characters: int = 0) -> str:
    """The text of a document; no two are the same."""
    text = f"document {number} says {number * 7919}"
    return text + f" {number}" * (characters // len(f" {number}"))


def memory_of(number: int, width: int = WIDTH) -> Tensor:
    """Random memory of two blocks `[2, J, D]`, different for each document."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, SLOTS, width, generator=generator).to(torch.bfloat16)


def append(
    store: Store,
    *numbers: int,
    fingerprint: str = PRINT,
    characters: int = 0,
    version: int = 0,
    width: int = WIDTH,
) -> None:
    """Append documents of some numbers in one commit; document 7 has pages.

    Args:
        store: of the bank.
        numbers: of the documents; number 1 is "1.txt".
        fingerprint: of the model.
        characters: length of the texts, about.
        version: another one has other texts and other memory.
        width: numbers per slot.
    """
    seeds = [number + 1000 * version for number in numbers]
    documents = [
        Document(f"{number}.txt", text_of(seed, characters), (0, 9) if number == 7 else ())
        for number, seed in zip(numbers, seeds, strict=True)
    ]
    rows = [
        row
        for index, document in enumerate(documents)
        for row in (
            BlockRow(index, 0, 9, (4, 4, 1, 0)),
            BlockRow(index, 9, min(len(document.text), 16_000), (4, 4, 4, 4)),
        )
    ]
    memory_NJD = Quantized(torch.cat([memory_of(seed, width) for seed in seeds]))
    with nullcontext(store) if isinstance(store, BankFile) else store.adding() as file:
        file.append(fingerprint, documents, Blocks.of(rows), memory_NJD)


Fact = tuple[str, str, list[BlockRow], Tensor]


def facts(store: Store) -> list[Fact]:
    """Name, text, blocks and memory of each document of a bank."""
    bank = MemoryBank.open_from(store)
    found = []
    for index, document in enumerate(bank.documents):
        blocks = [n for n, block in enumerate(bank.blocks) if block.document == index]
        rows = [bank.blocks[n] for n in blocks]
        found.append((document.name, document.text, rows, bank.memory(blocks)))
    return found


def same(one: list[Fact], other: list[Fact]) -> bool:
    """Whether the facts of two banks are equal, and their memory to the bit."""
    return [fact[:3] for fact in one] == [fact[:3] for fact in other] and all(
        torch.equal(mine[3], theirs[3]) for mine, theirs in zip(one, other, strict=True)
    )


def path_of(file: BankFile) -> Path:
    """Where a bank that is no bank in RAM lies."""
    assert file.path is not None
    return file.path


def change(path: Path, *statements: str, values: tuple[Any, ...] = ()) -> None:
    """Change a bank behind sedem's back, as a stranger with SQLite and its checksums could."""
    with closing(connect(path)) as connection:
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 0)
        connection.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            connection.execute(statement, values)

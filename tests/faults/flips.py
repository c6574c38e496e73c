"""Flipped bits and cut files: whatever is damaged is found before it is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from campaign import Result
from faults.operations import (
    BANK,
    CHECKPOINT,
    Scene,
    WrongError,
    append,
    create,
    look,
    opened,
    problems_of,
    read_again,
    read_checkpoint,
    save_checkpoint,
)

from sedem.bank.care import repair
from sedem.bank.file import BankFile
from sedem.errors import BankError, SedemError

CUT = 0.1
"""Share of the cases in which a file is cut instead of a bit being flipped."""
BANKS = 4
"""How many times more often a bank is damaged than a file of a checkpoint."""
REPAIRED = 0.25
"""Share of the damaged banks that are repaired."""


def flips(points: int, folder: Path, seed: int = 0) -> Result:
    """Damage one place after the other in the files of banks and of a checkpoint."""
    result = Result("offsets")
    chance = random.Random(seed)
    scene = Scene.number(2)
    whole = folder / "whole"
    banks = [whole / dtype / BANK for dtype in ("bfloat16", "int8")]
    for path in banks:
        create(path, scene.documents, path.parent.name)
        # A document that needs many pages, and pages that were freed.
        append(BankFile(path), [("doc-1", 1234)])
        BankFile(path).remove("doc-0")
        BankFile(path).compact()
    expected = {path: _all_of(path) for path in banks}
    save_checkpoint(whole / CHECKPOINT, 1)
    places = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    places += banks * (BANKS - 1)
    for number in range(points):
        path = places[number % len(places)]
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        top = whole / path.relative_to(whole).parts[0]
        shutil.copytree(top, work)
        damaged = work / path.relative_to(top)
        told = _damage(damaged, chance)
        with result.case(path.name, f"{path.relative_to(whole)}: {told}"):
            if path in expected:
                result.count(_after_damage_of_bank(damaged, expected[path]))
                if chance.random() < REPAIRED:
                    result.count(_after_repair(damaged, expected[path]))
            else:
                result.count(_after_damage_of_checkpoint(work))
    return result


def _damage(path: Path, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    offset = chance.randrange(len(data))
    if chance.random() < CUT:
        path.write_bytes(data[:offset])
        return f"cut to {offset} bytes"
    bit = chance.randrange(8)
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {offset} flipped"


def _after_damage_of_bank(path: Path, expected: list[Any]) -> str:
    """Where damage was found; nothing that is used may have been changed by it.

    Raises:
        WrongError: what is used was changed and nobody noticed, or it is not found by verify.
    """
    try:
        if _all_of(path) != expected:
            raise WrongError("what is used was changed, and nobody noticed")
        found = "found by verify alone"
    except SedemError:
        found = "found at use"
    if not problems_of(path):
        raise WrongError(f"{found}, but not by verify")
    return found


def _after_repair(path: Path, expected: list[Any]) -> str:
    """What a repair could do; it may keep nothing that was changed.

    Raises:
        WrongError: it did.
    """
    try:
        done = repair(BankFile(path), read_again)
    except BankError:
        if not problems_of(path):
            raise WrongError("the damage is gone, and the bank was not repaired") from None
        return "beyond repair"
    look(path)
    # Memory that was cast or read again is compared by `look`.
    documents = [one for one in expected[-1] if one[0] not in done.dropped]
    # Documents that were read again come last.
    if sorted(_all_of(path)[-1]) != sorted(documents):
        raise WrongError(f"a repair that dropped {done.dropped} changed others")
    return "repaired in part" if done.dropped else "repaired"


def _all_of(path: Path) -> list[Any]:
    """All that can be read of a bank; the documents are last."""
    with opened(path) as bank:
        rows = range(len(bank))
        return [
            bank.fingerprint,
            bank.made_by,
            bank.dtype,
            list(bank.blocks),
            [bank.block_text(row) for row in rows],
            bank.slot_tokens(rows).tolist(),
            bank.memory(rows).tolist(),
            _found_by_words(bank.store),
            [(one.name, one.text, one.pages) for one in bank.documents],
        ]


def _found_by_words(file: Any) -> list[tuple[Any, ...]]:
    """Blocks and scores of a search for words."""
    with file.reading() as connection:
        return connection.execute(
            "SELECT rowid, bm25(words) FROM words WHERE words MATCH 'version OR doc' ORDER BY rowid"
        ).fetchall()


def _after_damage_of_checkpoint(folder: Path) -> str:
    try:
        found = read_checkpoint(folder)
    except SedemError:
        return "found at opening"
    if found != ((CHECKPOINT, 1),):
        raise WrongError("what is used was changed, and nobody noticed")
    return "harmless"

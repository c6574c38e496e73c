"""Flipped bits and cut files: whatever is damaged is found before it is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from campaign import Result
from faults.operations import (
    CHECKPOINT,
    Scene,
    WrongError,
    append,
    append_next,
    create,
    look,
    read_bank,
    read_checkpoint,
    save_checkpoint,
)

from sedem import MemoryBank
from sedem.bank.store.local import LocalStore
from sedem.errors import SedemError

CUT = 0.1
"""Share of the cases in which a file is cut instead of a bit being flipped."""

CATALOGS = 5
"""How many times more often a catalog is damaged than any other file: it has the most to tell."""


def flips(points: int, folder: Path, seed: int = 0) -> Result:
    """Damage one place after the other in the files of banks and of a checkpoint."""
    result = Result("offsets")
    chance = random.Random(seed)
    scene = Scene.number(2)
    whole = folder / "whole"
    for dtype in ("bfloat16", "int8"):
        create(whole / dtype, scene.documents, dtype)
        append(LocalStore(whole / dtype), [("doc-1", 1234)])
        LocalStore(whole / dtype).remove("doc-0")
    save_checkpoint(whole / CHECKPOINT, 1)
    places = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    places += [path for path in places if path.suffix == ".sqlite"] * CATALOGS
    for number in range(points):
        path = places[number % len(places)]
        name = path.relative_to(whole)
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(whole / name.parts[0], work / name.parts[0])
        told = _damage(work / name, chance)
        what = name.name if name.parts[0] == CHECKPOINT else _kind(name)
        with result.case(what, f"{name}: {told}"):
            if name.parts[0] == CHECKPOINT:
                found = _after_damage_of_checkpoint(work / name.parts[0])
            else:
                found = _after_damage_of_bank(work / name.parts[0], whole / name.parts[0], scene)
            result.count(found)
    return result


def _kind(name: Path) -> str:
    return "shard" if name.suffix == ".safetensors" else name.name


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


def _after_damage_of_bank(folder: Path, whole: Path, scene: Scene) -> str:
    """Where damage was found; or that nothing which is used was changed by it.

    Raises:
        WrongError: what is used was changed and nobody noticed.
    """
    try:
        damaged = MemoryBank.open(folder)
    except SedemError:
        return _confirmed(folder, "found at opening")
    try:
        if _all_of(damaged) != _all_of(MemoryBank.open(whole)):
            raise WrongError("what is used was changed, and nobody noticed")
    except SedemError:
        return _confirmed(folder, "found at use")
    found = "harmless" if not _problems(folder) else "found by verify alone"
    # What is not read may yet matter to the next writer.
    before = read_bank(folder)
    try:
        wanted = append_next(folder, scene, before)
    except SedemError:
        if read_bank(folder) != before:
            raise WrongError("a commit that was refused has changed the bank") from None
        return found
    if (after := look(folder) if found == "harmless" else read_bank(folder)) != wanted:
        raise WrongError(f"the next commit made {after} of the bank, not {wanted}")
    return found


def _confirmed(folder: Path, found: str) -> str:
    if not _problems(folder):
        raise WrongError(f"{found}, but not by verify")
    return found


def _problems(folder: Path) -> list[str]:
    try:
        return LocalStore(folder).verify()
    except SedemError as error:
        return [str(error)]


def _all_of(bank: MemoryBank) -> list[Any]:
    """All that can be read of a bank."""
    rows = range(len(bank))
    return [
        bank.fingerprint,
        bank.made_by,
        bank.dtype,
        [(document.name, document.text) for document in bank.documents],
        list(bank.blocks),
        [bank.block_text(row) for row in rows],
        bank.slot_tokens(rows).tolist(),
        bank.memory(rows).tolist(),
    ]


def _after_damage_of_checkpoint(folder: Path) -> str:
    try:
        found = read_checkpoint(folder)
    except SedemError:
        return "found at opening"
    if found != ((CHECKPOINT, 1),):
        raise WrongError("what is used was changed, and nobody noticed")
    return "harmless"

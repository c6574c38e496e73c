"""What is done to banks and checkpoints while something fails, and what may be found afterwards.

An operation is one entry of `OPERATIONS`. Documents are told by name and version: a version's text,
spans and memory can be made again at any time, so what is found is compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sedem import Document, MemoryBank
from sedem.bank.blocks import BlockRow, Blocks, Meta
from sedem.bank.care import DAMAGED, DamagedDocument, examine, repair
from sedem.bank.copies import copy_bank
from sedem.bank.file import BankFile, text_digest
from sedem.bank.index import keys_of, save_keys, stored_bytes
from sedem.checkpoint import folder as checkpoint
from sedem.config import CONFIG_FILE
from sedem.errors import SedemError
from sedem.method.selector import Selector
from sedem.tensors import Quantized, join, load_weights, quantize, save_tensors

FINGERPRINT = "0123456789abcdef" * 4
WIDTH, SLOTS = 1024, 4
"""A block takes pages of its own."""
MADE_BY = {"model": "made up"}
BANK = "a.bank"
NEW_BANK = "new/deep/a.bank"
CHECKPOINT = "a.checkpoint"
SELECTOR = Selector(16, WIDTH, 2, 8)

Version = tuple[str, int]
State = tuple[Version, ...]
"""The documents of a bank in reading order; the only version of a checkpoint."""


class WrongError(AssertionError):
    """What was found is no state that may be found."""


# Documents


def text_of(version: int) -> str:
    """A text; some have characters of several bytes, and some need pages of their own."""
    return f"version {version} says naïve 🥧 {version * 7919} " + "and more " * (version % 5 * 1500)


def rows_of(version: int, document: int) -> list[BlockRow]:
    whole = len(text_of(version))
    half = whole // 2
    return [
        BlockRow(document, 0, min(half, 9_000), (4, 4, 1, 0)),
        BlockRow(document, half, min(whole, half + 16_000), (4, 4, 4, 4)),
    ]


@cache
def memory_of(version: int) -> Quantized:
    generator = torch.Generator().manual_seed(version)
    return Quantized(torch.randn(2, SLOTS, WIDTH, generator=generator).to(torch.bfloat16))


def append(file: BankFile, versions: Sequence[Version]) -> None:
    """Append documents in one commit."""
    documents = [Document(name, text_of(version)) for name, version in versions]
    rows = [row for index, (_, version) in enumerate(versions) for row in rows_of(version, index)]
    memory = join([memory_of(version) for _, version in versions])
    file.append(FINGERPRINT, documents, Blocks.of(rows), memory)


def append_in_parts(file: BankFile, version: Version) -> None:
    """Append a document in two parts, but for those that an earlier attempt has left."""
    name, number = version
    document, memory, rows = Document(name, text_of(number)), memory_of(number), rows_of(number, 0)
    for row in range(file.stored_part(document), len(rows)):
        blocks, last = Blocks.of(rows[row : row + 1]), row == len(rows) - 1
        part = memory[row : row + 1]
        file.append_part(FINGERPRINT, document, blocks, part, before=row, last=last)


def create(path: Path, state: State, dtype: str = "bfloat16", words: bool = True) -> None:
    """Make a bank."""
    file = BankFile(path)
    with file.creating(Meta(FINGERPRINT, MADE_BY, SLOTS, WIDTH, dtype, words=words)):
        for version in state:
            append(file, [version])


def read_again(file: BankFile, lost: Sequence[DamagedDocument]) -> Iterator[str]:
    """Append lost documents, for `repair`."""
    for one in lost:
        version = _version(_known_texts()[one.sha256])
        append(file, [(one.name, version)])
        yield one.name


@contextmanager
def opened(path: Path) -> Iterator[MemoryBank]:
    """A bank, of which nothing stays open at the end."""
    file = BankFile(path)
    try:
        yield MemoryBank.open_from(file)
    finally:
        file.close()


def read_bank(path: Path) -> State | None:
    """The documents of a bank, every bit of which is compared; None if there is no bank.

    Raises:
        WrongError: something in it was never written.
    """
    if not BankFile(path).exists():
        return None
    with opened(path) as bank:
        state = [(d.name, _version(d.text)) for d in bank.documents]
        rows = [row for index, (_, version) in enumerate(state) for row in rows_of(version, index)]
        if list(bank.blocks) != rows or (bank.fingerprint, bank.made_by) != (FINGERPRINT, MADE_BY):
            raise WrongError(f"the spans of {path} are wrong")
        if state:
            wanted = join([memory_of(version) for _, version in state])
            expected = quantize(wanted.dequantize(), bank.dtype)
            if not torch.equal(expected.dequantize(), bank.memory(range(len(bank)))):
                raise WrongError(f"the memory of {path} is wrong")
            _check_keys(bank)
    return tuple(state)


def _check_keys(bank: MemoryBank) -> None:
    """Assert that stored keys are those of the memory."""
    every = range(len(bank))
    found = keys_of(bank, SELECTOR, every).dequantize()
    if not torch.allclose(found.float(), SELECTOR.keys(bank.memory(every).float()), atol=0.1):
        raise WrongError("stored keys are wrong")


@cache
def _known_texts() -> dict[str, str]:
    """Every text that a scene may have by its SHA-256."""
    return {text_digest(text): text for text in map(text_of, range(2000))}


def _version(text: str) -> int:
    version = int(text.split()[1])
    if text != text_of(version):
        raise WrongError(f"a text is wrong: {text[:60]!a}")
    return version


def look(path: Path) -> State | None:
    """Like `read_bank`; examining the bank has to find nothing, too."""
    state = read_bank(path)
    if state is not None and (problems := problems_of(path)):
        raise WrongError(f"{path} is damaged: {problems}")
    return state


def problems_of(path: Path) -> list[str]:
    """What examining a bank finds."""
    file = BankFile(path)
    try:
        return examine(file).problems
    except SedemError as error:
        return [str(error)]
    finally:
        file.close()


# Checkpoints


def save_checkpoint(folder: Path, version: int) -> None:
    """Save a checkpoint, each file of which names its version."""
    weights = {"weight": torch.full((64, 8), float(version))}
    with checkpoint.unfinished(folder) as place:
        (place / CONFIG_FILE).write_text(json.dumps({"version": version}))
        save_tensors(weights, place / checkpoint.WEIGHTS_FILE)
        (place / checkpoint.ADAPTER).mkdir()
        (place / checkpoint.ADAPTER / "adapter_config.json").write_text(str(version))
        save_tensors(weights, place / checkpoint.ADAPTER / "adapter_model.safetensors")


def read_checkpoint(folder: Path) -> State | None:
    """The version of a checkpoint; None if there is none."""
    place = checkpoint.locate(str(folder))
    with checkpoint.opening(place):
        version = json.loads((place / CONFIG_FILE).read_text())["version"]
        adapter = place / checkpoint.ADAPTER
        found = {
            version,
            int((adapter / "adapter_config.json").read_text()),
            *load_weights(place / checkpoint.WEIGHTS_FILE)["weight"].flatten().tolist(),
            *load_weights(adapter / "adapter_model.safetensors")["weight"].flatten().tolist(),
        }
    if found != {version}:
        raise WrongError(f"{folder} mixes versions {found}")
    return ((CHECKPOINT, version),)


# Operations


@dataclass(frozen=True)
class Scene:
    """Where an operation begins: the documents of a bank, its type, and whether it has words."""

    documents: State
    dtype: str
    words: bool

    @classmethod
    def number(cls, number: int) -> Scene:
        """One of endlessly many."""
        documents = tuple((f"doc-{i}", number * 10 + i) for i in range(1 + number % 3))
        return cls(documents, ("bfloat16", "int8", "fp8")[number % 3], number % 2 == 0)

    def build(self, folder: Path) -> None:
        """Make the bank and a checkpoint of version 1."""
        folder.mkdir()
        create(folder / BANK, self.documents, self.dtype, self.words)
        save_checkpoint(folder / CHECKPOINT, 1)

    def fresh(self, count: int) -> State:
        """Documents that the bank does not have."""
        first = self.documents[0][1] + 5
        return tuple((f"new-{i}", first + i) for i in range(count))


@dataclass(frozen=True)
class Operation:
    """Something that happens wholly or not at all.

    Attributes:
        act: does it in the folder of a scene.
        before: what `look` finds before.
        after: what it finds afterwards.
        errors: names of the exceptions that a full disk may raise.
        look: reads what the operation changes.
        again: does the next thing to the same place, as a user would after a crash; returns what
            is then to be found, given what was found.
        prepare: changes the folder of a scene before the operation.
    """

    act: Callable[[Path, Scene], object]
    before: Callable[[Scene], State | None]
    after: Callable[[Scene], State]
    errors: tuple[str, ...] = ("BankError",)
    look: Callable[[Path], State | None] = lambda folder: look(folder / BANK)
    again: Callable[[Path, Scene, State | None], State] = lambda folder, scene, found: append_next(
        folder / BANK, scene, found
    )
    prepare: Callable[[Path, Scene], object] = lambda folder, scene: None


def append_next(bank: Path, scene: Scene, found: State | None) -> State:
    """Append one document more; to a new bank if none was found."""
    if found is None:
        create(bank, scene.documents, scene.dtype, scene.words)
        found = scene.documents
    added = ("next", scene.documents[0][1] + 9)
    append(BankFile(bank), [added])
    return (*found, added)


def _go_on(folder: Path, scene: Scene, found: State | None) -> State:
    """Append what an attempt may have left unfinished, and then one document more."""
    if found == scene.documents:
        append_in_parts(BankFile(folder / BANK), scene.fresh(1)[0])
    return append_next(folder / BANK, scene, (*scene.documents, *scene.fresh(1)))


def _save_next(folder: Path, _: Scene, __: State | None) -> State:
    save_checkpoint(folder / CHECKPOINT, 3)
    return ((CHECKPOINT, 3),)


def _before(scene: Scene) -> State:
    return scene.documents


def _replacement(scene: Scene) -> Version:
    return (scene.documents[0][0], scene.documents[0][1] + 7)


def _remove_some(folder: Path, scene: Scene) -> None:
    append(BankFile(folder / BANK), [("old", 1999)])
    BankFile(folder / BANK).remove("old")


def _damage(folder: Path, _: Scene) -> None:
    """Flip a bit of the memory of the first document."""
    path = folder / BANK
    with opened(path) as bank:
        memory = bank.stored([1])
    content = bytearray(path.read_bytes())
    place = content.index(memory.values.view(torch.uint8).numpy().tobytes()[-1000:])
    content[place] ^= 1
    path.write_bytes(content)


def _repair(folder: Path, _: Scene) -> None:
    repair(BankFile(folder / BANK), read_again)


def _look_after_repair(folder: Path) -> State | None:
    """What a repair leaves, in any order: documents that it reads again come last."""
    if not problems_of(folder / BANK) and not Path(f"{folder / BANK}{DAMAGED}").exists():
        raise WrongError("the damaged file is gone")
    repair(BankFile(folder / BANK), read_again)
    found = look(folder / BANK)
    return None if found is None else tuple(sorted(found))


def _save_keys(folder: Path, _: Scene) -> None:
    with opened(folder / BANK) as bank:
        save_keys(bank, SELECTOR)


def _save_keys_again(folder: Path, scene: Scene, found: State | None) -> State:
    _save_keys(folder, scene)
    state = append_next(folder / BANK, scene, found)
    if not stored_bytes(BankFile(folder / BANK)):
        raise WrongError("there are no keys")
    return state


def _of_new_bank(act: Callable[[Path, Scene], object], **more: Any) -> Operation:
    """An operation that makes a new bank with the documents of the scene."""
    return Operation(
        act,
        lambda scene: None,
        _before,
        look=lambda folder: look(folder / NEW_BANK),
        again=lambda folder, scene, found: append_next(folder / NEW_BANK, scene, found),
        **more,
    )


OPERATIONS = {
    "append": Operation(
        lambda folder, scene: append(BankFile(folder / BANK), scene.fresh(2)),
        _before,
        lambda scene: (*scene.documents, *scene.fresh(2)),
    ),
    "append in parts": Operation(
        lambda folder, scene: append_in_parts(BankFile(folder / BANK), scene.fresh(1)[0]),
        _before,
        lambda scene: (*scene.documents, *scene.fresh(1)),
        again=_go_on,
    ),
    "replace": Operation(
        lambda folder, scene: append(BankFile(folder / BANK), [_replacement(scene)]),
        _before,
        lambda scene: (*scene.documents[1:], _replacement(scene)),
    ),
    "remove": Operation(
        lambda folder, scene: BankFile(folder / BANK).remove(scene.documents[0][0]),
        _before,
        lambda scene: scene.documents[1:],
    ),
    "create": _of_new_bank(
        lambda folder, scene: create(folder / NEW_BANK, scene.documents, scene.dtype, scene.words)
    ),
    "compact": Operation(
        lambda folder, scene: BankFile(folder / BANK).compact(),
        _before,
        _before,
        prepare=_remove_some,
    ),
    "repair": Operation(_repair, _before, _before, look=_look_after_repair, prepare=_damage),
    "backup": _of_new_bank(lambda folder, scene: copy_bank(folder / BANK, folder / NEW_BANK)),
    "export": _of_new_bank(
        lambda folder, scene: copy_bank(folder / BANK, folder / NEW_BANK, check=True)
    ),
    "store keys": Operation(_save_keys, _before, _before, again=_save_keys_again),
    "save a checkpoint": Operation(
        lambda folder, scene: save_checkpoint(folder / CHECKPOINT, 2),
        lambda scene: ((CHECKPOINT, 1),),
        lambda scene: ((CHECKPOINT, 2),),
        errors=("OSError", "SafetensorError"),
        look=lambda folder: read_checkpoint(folder / CHECKPOINT),
        again=_save_next,
    ),
}


def check_whole(
    operation: Operation, scene: Scene, folder: Path, *, promised: bool, where: str
) -> None:
    """Assert that an operation happened wholly or not at all, and that the next one works.

    Args:
        folder: as it is found.
        promised: whether the operation had returned, so that it must have happened.
        where: it was interrupted, for the message.
    """
    allowed = [operation.after(scene)] if promised else [operation.before(scene)]
    if not promised:
        allowed.append(operation.after(scene))
    try:
        found = operation.look(folder)
        if found not in allowed:
            raise WrongError(f"found {found}, not one of {allowed}")
        wanted = operation.again(folder, scene, found)
        if (then := operation.look(folder)) != wanted:
            raise WrongError(f"after the next operation found {then}, not {wanted}")
    except Exception as error:
        raise WrongError(f"{where}: {type(error).__name__}: {error}") from error

"""What is done to banks and checkpoints while something fails, and what may be found afterwards.

An operation is one entry of `OPERATIONS`. Documents are told by name and version: a version's text,
spans and memory can be made again at any time, so what is found is compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sedem import Document, MemoryBank
from sedem.backbone.safetensors import load_weights, save_tensors
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.store.archive import export_bank, import_bank
from sedem.bank.store.backup import backup
from sedem.bank.store.catalog import CATALOG, text_digest
from sedem.bank.store.interface import Meta
from sedem.bank.store.local import LocalStore
from sedem.bank.store.unfinished import append_part, stored_parts
from sedem.config import CONFIG_FILE
from sedem.errors import BankError
from sedem.inference import checkpoint
from sedem.quantization import Quantized, join, quantize

FINGERPRINT = "0123456789abcdef" * 4
WIDTH, SLOTS = 8, 4
BANK = "a.bank"
NEW_BANK = "new/deep/a.bank"
CHECKPOINT = "a.checkpoint"

Version = tuple[str, int]
State = tuple[Version, ...]
"""The documents of a bank in reading order; the only version of a checkpoint."""


class WrongError(AssertionError):
    """What was found is no state that may be found."""


# Documents


def text_of(version: int) -> str:
    """A text; some have characters of several bytes, and some need a page of their own."""
    return f"version {version} says naïve 🥧 {version * 7919} " + "and more " * (version % 5 * 150)


def rows_of(version: int, document: int) -> list[BlockRow]:
    whole = len(text_of(version))
    return [
        BlockRow(document, 0, whole // 2, (4, 4, 1, 0)),
        BlockRow(document, whole // 2, whole, (4, 4, 4, 4)),
    ]


def memory_of(version: int) -> Quantized:
    generator = torch.Generator().manual_seed(version)
    return Quantized(torch.randn(2, SLOTS, WIDTH, generator=generator).to(torch.bfloat16))


def append(store: LocalStore, versions: Sequence[Version]) -> None:
    """Append documents in one commit."""
    documents = [Document(name, text_of(version)) for name, version in versions]
    rows = [row for index, (_, version) in enumerate(versions) for row in rows_of(version, index)]
    memory = join([memory_of(version) for _, version in versions])
    store.append(FINGERPRINT, documents, Blocks.of(rows), memory)


def append_in_parts(store: LocalStore, version: Version) -> None:
    """Append a document in two parts, but for those that an earlier attempt has left."""
    name, number = version
    document, memory, rows = Document(name, text_of(number)), memory_of(number), rows_of(number, 0)
    for row in range(len(stored_parts(store, document)), len(rows)):
        blocks, last = Blocks.of(rows[row : row + 1]), row == len(rows) - 1
        part = memory[row : row + 1]
        append_part(store, FINGERPRINT, document, blocks, part, before=row, last=last)


def create(folder: Path, state: State, dtype: str = "bfloat16", texts: bool = True) -> None:
    """Make a bank; each document is appended in a commit of its own."""
    meta = Meta(FINGERPRINT, {"width": WIDTH}, dtype, texts)
    with LocalStore(folder).creating(meta) as unfinished:
        for version in state:
            append(unfinished, [version])


def read_bank(folder: Path) -> State | None:
    """The documents of a bank, every bit of which is compared; None if there is no bank.

    Raises:
        WrongError: something in it was never written.
    """
    if not folder.exists():
        return None
    digests = LocalStore(folder).digests()
    bank = MemoryBank.open(folder, source=lambda name: _known_texts()[digests[name]])
    state = [(d.name, _version(d.text)) for d in bank.documents]
    rows = [row for index, (_, version) in enumerate(state) for row in rows_of(version, index)]
    if list(bank.blocks) != rows or bank.fingerprint != FINGERPRINT:
        raise WrongError(f"the spans of {folder} are wrong")
    if state:
        wanted = join([memory_of(version) for _, version in state])
        expected = quantize(wanted.dequantize(), bank.dtype)
        if not torch.equal(expected.dequantize(), bank.memory(range(len(bank)))):
            raise WrongError(f"the memory of {folder} is wrong")
    return tuple(state)


@cache
def _known_texts() -> dict[str, str]:
    """Every text that a scene may have by its SHA-256, for banks that hold no texts."""
    return {text_digest(text): text for text in map(text_of, range(2000))}


def _version(text: str) -> int:
    version = int(text.split()[1])
    if text != text_of(version):
        raise WrongError(f"a text is wrong: {text[:60]!a}")
    return version


def look(folder: Path) -> State | None:
    """Like `read_bank`; the bank has to verify, too."""
    state = read_bank(folder)
    if state is not None and (problems := LocalStore(folder).verify()):
        raise WrongError(f"{folder} does not verify: {problems}")
    return state


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
    """Where an operation begins.

    Attributes:
        documents: of the bank.
        dtype: of its slots.
        texts: whether it holds texts.
    """

    documents: State
    dtype: str
    texts: bool

    @classmethod
    def number(cls, number: int) -> Scene:
        """One of endlessly many."""
        documents = tuple((f"doc-{i}", number * 10 + i) for i in range(1 + number % 3))
        return cls(documents, ("bfloat16", "int8", "fp8")[number % 3], number % 2 == 0)

    def build(self, folder: Path) -> None:
        """Make the bank and a checkpoint of version 1."""
        create(folder / BANK, self.documents, self.dtype, self.texts)
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
    """

    act: Callable[[Path, Scene], object]
    before: Callable[[Scene], State | None]
    after: Callable[[Scene], State]
    errors: tuple[str, ...] = ("BankError",)
    look: Callable[[Path], State | None] = lambda folder: look(folder / BANK)
    again: Callable[[Path, Scene, State | None], State] = lambda folder, scene, found: append_next(
        folder / BANK, scene, found
    )


def append_next(bank: Path, scene: Scene, found: State | None) -> State:
    """Append one document more; to a new bank if none was found."""
    if found is None:
        create(bank, scene.documents, scene.dtype, scene.texts)
        found = scene.documents
    added = ("next", scene.documents[0][1] + 9)
    append(LocalStore(bank), [added])
    return (*found, added)


def _go_on(folder: Path, scene: Scene, found: State | None) -> State:
    """Append what an attempt may have left unfinished, and then one document more."""
    if found == scene.documents:
        append_in_parts(LocalStore(folder / BANK), scene.fresh(1)[0])
    return append_next(folder / BANK, scene, (*scene.documents, *scene.fresh(1)))


def _save_next(folder: Path, _: Scene, __: State | None) -> State:
    save_checkpoint(folder / CHECKPOINT, 3)
    return ((CHECKPOINT, 3),)


def _before(scene: Scene) -> State:
    return scene.documents


def _replacement(scene: Scene) -> Version:
    return (scene.documents[0][0], scene.documents[0][1] + 7)


def _through_an_archive(folder: Path, _: Scene) -> None:
    (folder / "a.tar").unlink(missing_ok=True)
    export_bank(folder / BANK, folder / "a.tar")
    import_bank(folder / "a.tar", folder / NEW_BANK)


def _repair_catalog(folder: Path, _: Scene) -> None:
    """Damage the first page of the catalog, which finds all others, and repair it."""
    try:
        with (folder / BANK / CATALOG).open("rb+", buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        # It is the repair that is tried on a full disk, not the damage.
        raise BankError(f"nothing was damaged ({error})") from None
    LocalStore(folder / BANK).repair()


def _look_after_repair(folder: Path) -> State | None:
    LocalStore(folder / BANK).repair()
    return look(folder / BANK)


OPERATIONS = {
    "append": Operation(
        lambda folder, scene: append(LocalStore(folder / BANK), scene.fresh(2)),
        _before,
        lambda scene: (*scene.documents, *scene.fresh(2)),
    ),
    "append in parts": Operation(
        lambda folder, scene: append_in_parts(LocalStore(folder / BANK), scene.fresh(1)[0]),
        _before,
        lambda scene: (*scene.documents, *scene.fresh(1)),
        again=_go_on,
    ),
    "replace": Operation(
        lambda folder, scene: append(LocalStore(folder / BANK), [_replacement(scene)]),
        _before,
        lambda scene: (*scene.documents[1:], _replacement(scene)),
    ),
    "remove": Operation(
        lambda folder, scene: LocalStore(folder / BANK).remove(scene.documents[0][0]),
        _before,
        lambda scene: scene.documents[1:],
    ),
    "create": Operation(
        lambda folder, scene: create(folder / NEW_BANK, scene.documents, scene.dtype, scene.texts),
        lambda scene: None,
        _before,
        look=lambda folder: look(folder / NEW_BANK),
        again=lambda folder, scene, found: append_next(folder / NEW_BANK, scene, found),
    ),
    "compact": Operation(
        lambda folder, scene: LocalStore(folder / BANK).compact(),
        _before,
        _before,
    ),
    "repair the catalog": Operation(
        _repair_catalog,
        _before,
        _before,
        look=_look_after_repair,
    ),
    "backup": Operation(
        lambda folder, scene: backup(folder / BANK, folder / NEW_BANK),
        lambda scene: None,
        _before,
        look=lambda folder: look(folder / NEW_BANK),
        again=lambda folder, scene, found: append_next(folder / NEW_BANK, scene, found),
    ),
    "export and import": Operation(
        _through_an_archive,
        lambda scene: None,
        _before,
        look=lambda folder: look(folder / NEW_BANK),
        again=lambda folder, scene, found: append_next(folder / NEW_BANK, scene, found),
    ),
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
        operation: what was going on.
        scene: where it began.
        folder: as it is found.
        promised: whether the operation had returned, so that it must have happened.
        where: it was interrupted, for the message.

    Raises:
        WrongError: a part of it is there, or what was promised is lost.
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

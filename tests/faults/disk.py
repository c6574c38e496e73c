"""A disk that forgets what was not synced: files and folders as a power cut may leave them.

Nothing is assumed that POSIX does not promise. A file's content is durable after the file was
synced, a name after its folder was synced; of all else any part may be there. A write that was not
synced may be lost, or torn at a border of 512 or 4,096 bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from faults.tracing import Change

SECTORS = (512, 4096)
KINDS = ("nothing", "names alone", "contents alone", "some", "some, torn")
"""What of all that was not synced survives."""

T = TypeVar("T")
Write = tuple[int, bytes] | int
"""Where and what was written; or the size to which a file was cut or enlarged."""


@dataclass
class Node:
    """A file or a folder: what is durable, and what is not yet.

    Attributes:
        is_folder: which of the two it is.
        data: of a file.
        writes: to it that were not synced.
        names: of a folder.
        renamed: changes of names that were not synced; None means that a name is gone.
    """

    is_folder: bool
    data: bytes = b""
    writes: list[Write] = field(default_factory=list)
    names: dict[str, Node] = field(default_factory=dict)
    renamed: list[dict[str, Node | None]] = field(default_factory=list)

    def now(self) -> dict[str, Node]:
        """Names of a folder, as they are while the power lasts."""
        return _renamed(self.names, self.renamed)

    def sync(self) -> None:
        """Make the content of this file, or the names in this folder, durable."""
        self.data, self.writes = _written(self.data, self.writes), []
        self.names, self.renamed = self.now(), []


class Disk:
    """A folder that processes see at a place, all of whose content is durable at first."""

    def __init__(self, content: Path, place: Path) -> None:
        self.place = place
        self.root = _read(content)

    def apply(self, change: Change) -> None:
        """Do what a process did."""
        if change.kind in ("create", "mkdir"):
            self._rename(change.path, Node(change.kind == "mkdir"))
        elif change.kind == "write":
            self._find(change.path).writes.append((change.offset, change.data))
        elif change.kind == "truncate":
            self._find(change.path).writes.append(change.size)
        elif change.kind == "unlink":
            self._rename(change.path, None)
        elif change.kind == "sync":
            self._find(change.path).sync()
        elif change.kind in ("rename", "link"):
            assert change.target is not None
            self._move(change.path, change.target, keep=change.kind == "link")

    def after_power_cut(self, place: Path, kind: str, chance: random.Random) -> None:
        """Write what may be left of the folder into a new one; `kind` is one of `KINDS`."""
        _write(self.root, place, kind, chance)

    def _move(self, path: Path, target: Path, *, keep: bool) -> None:
        node = self._find(path)
        new: dict[str, Node | None] = {target.name: node}
        if path.parent == target.parent and not keep:
            self._find(path.parent).renamed.append({path.name: None, **new})
            return
        self._find(target.parent).renamed.append(new)
        if not keep:
            self._rename(path, None)

    def _rename(self, path: Path, node: Node | None) -> None:
        self._find(path.parent).renamed.append({path.name: node})

    def _find(self, path: Path) -> Node:
        node = self.root
        for name in path.relative_to(self.place).parts:
            node = node.now()[name]
        return node


def _read(path: Path) -> Node:
    if path.is_dir():
        return Node(True, names={entry.name: _read(entry) for entry in path.iterdir()})
    return Node(False, path.read_bytes())


def _renamed(names: dict[str, Node], changes: Iterable[dict[str, Node | None]]) -> dict[str, Node]:
    found: dict[str, Node | None] = {**names}
    for change in changes:
        found.update(change)
    return {name: node for name, node in found.items() if node is not None}


def _written(data: bytes, writes: Iterable[Write]) -> bytes:
    content = bytearray(data)
    for write in writes:
        if isinstance(write, int):
            content[write:] = bytes(max(write - len(content), 0))
            continue
        offset, piece = write
        content[len(content) :] = bytes(max(offset - len(content), 0))
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def _torn(write: Write, chance: random.Random) -> list[Write]:
    """Some of the sectors of a write."""
    if isinstance(write, int):
        return [write]
    offset, data = write
    sector = chance.choice(SECTORS)
    first = offset - offset % sector
    borders = [*range(first, offset + len(data), sector), offset + len(data)]
    pieces = [(max(a, offset), b) for a, b in pairwise(borders)]
    return [(a, data[a - offset : b - offset]) for a, b in pieces if chance.random() < 0.5]


def _write(node: Node, place: Path, kind: str, chance: random.Random) -> None:
    if node.is_folder:
        place.mkdir()
        kept = _survivors(node.renamed, kind, "names alone", chance)
        for name, child in _renamed(node.names, kept).items():
            _write(child, place / name, kind, chance)
        return
    writes = _survivors(node.writes, kind, "contents alone", chance)
    if kind == "some, torn":
        writes = [piece for write in writes for piece in _torn(write, chance)]
    content = _written(node.data, writes)
    whole = len(_written(node.data, node.writes))
    if chance.random() < 0.5:  # a new size may be durable before the content
        content += bytes(max(whole - len(content), 0))
    place.write_bytes(content)


def _survivors(changes: list[T], kind: str, all_of: str, chance: random.Random) -> list[T]:
    if kind == all_of:
        return changes
    if kind.startswith("some"):
        return [change for change in changes if chance.random() < 0.5]
    return []

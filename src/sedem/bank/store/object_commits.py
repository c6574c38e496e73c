"""Commits of a bank in an object store: small objects that are created once and never changed.

    commits/000000000012     the bank as of its twelfth commit
    catalog/SHA256           1 MiB of the catalog; the last one may be shorter
    shards/SHA256.safetensors

A commit exists when its object does. The store creates an object of a name only once, so of two
writers that start from the same commit, one succeeds. docs/bank-format.md describes every byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sedem.bank.store.object_bucket import Bucket, Entry
from sedem.errors import BankError

COMMITS, CATALOG_PARTS, SHARDS = "commits", "catalog", "shards"
FORMAT = 1
PART = 2**20
"""Bytes of the catalog per object; a commit writes only the parts that it changed."""
LIMIT = 2**28
"""Maximum bytes of a commit; each MiB of catalog and each shard take 67."""
_NAME = re.compile(r"commits/\d{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class LostRaceError(BankError):
    """Another writer has committed first."""


@dataclass(frozen=True)
class Commit:
    """A bank as of one commit.

    Attributes:
        number: number of the commit, from 1.
        writer: a random name for the writer of this commit.
        parent: writer of the previous commit; empty for the first.
        size: bytes of the catalog.
        parts: SHA-256 of each part of the catalog, in order.
        shards: SHA-256 of the shards that the catalog names, in ascending order.
    """

    number: int
    parent: str
    size: int
    parts: tuple[str, ...]
    shards: tuple[str, ...]
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def name(self) -> str:
        """Name of its object."""
        return _name(self.number)

    @property
    def objects(self) -> set[str]:
        """Names of the objects that make up the bank."""
        return {part_name(part) for part in self.parts} | {shard_name(one) for one in self.shards}

    def content(self) -> bytes:
        """Return the content of its object: a line of JSON, and a line with its SHA-256."""
        line = json.dumps(
            {
                "format": FORMAT,
                "number": self.number,
                "writer": self.writer,
                "parent": self.parent,
                "bytes": self.size,
                "catalog": self.parts,
                "shards": self.shards,
            }
        ).encode()
        return b"%s\n%s\n" % (line, hashlib.sha256(line).hexdigest().encode())


def part_name(digest: str) -> str:
    """Name of the object of a part of a catalog."""
    return f"{CATALOG_PARTS}/{digest}"


def shard_name(digest: str) -> str:
    """Name of the object of a shard."""
    return f"{SHARDS}/{digest}.safetensors"


def is_digest(text: object) -> bool:
    """Whether this is a SHA-256 in hexadecimal, which is safe in an object name."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def part_digests(catalog: Path) -> tuple[str, ...]:
    """SHA-256 of each part of a catalog."""
    with catalog.open("rb") as file:
        return tuple(
            hashlib.sha256(content).hexdigest() for content in iter(lambda: file.read(PART), b"")
        )


def newest(bucket: Bucket, known: tuple[Commit, str] | None = None) -> tuple[Commit, str] | None:
    """Return the newest commit of a bank and the tag of its object; None if there is no bank.

    Args:
        bucket: where the bank is.
        known: what this function returned before; earlier commits are not listed again.

    Raises:
        BankError: the store cannot be used, or the commit is damaged.
    """
    after = None if known is None else f"{known[0].number - 1:012d}"
    listed = _listed(bucket.entries(COMMITS, after))
    if known is not None:
        if not listed or listed[0].name != known[0].name or listed[0].tag != known[1]:
            # The bank was deleted, and perhaps another one was made in its place.
            return newest(bucket)
        if len(listed) == 1:
            return known
    if not listed:
        return None
    commit = read(bucket, listed[-1].name)
    # It was deleted after the listing, so there is a newer one.
    return newest(bucket) if commit is None else (commit, listed[-1].tag)


def read(bucket: Bucket, name: str) -> Commit | None:
    """Read a commit; None if it does not exist.

    Raises:
        BankError: it is damaged.
    """
    content = bucket.read(name, LIMIT)
    if content is None:
        return None
    commit = _parsed(content)
    if commit is None or commit.name != name:
        raise BankError(f"the commit '{bucket.url}/{name}' is damaged; restore it")
    return commit


def publish(bucket: Bucket, commit: Commit) -> str:
    """Make a commit the newest; everything that it names must already be written.

    Returns:
        The tag of its object.

    Raises:
        LostRaceError: another writer came first.
        BankError: the store would let a writer replace another writer's commit.
    """
    if bucket.create(commit.name, commit.content()):
        if commit.number == 1:
            _check_conditions(bucket, commit)
        later = _listed(bucket.entries(COMMITS, f"{commit.number - 1:012d}"))
        if len(later) == 1:
            return later[0].tag
        if len(later) > 1 and later[1].name == _name(commit.number + 1):
            following = read(bucket, later[1].name)
            if following is None or following.parent == commit.writer:
                return later[0].tag
        # The bank is far ahead, and its own commit of this number was already removed.
        bucket.delete([commit.name])
    raise LostRaceError(
        f"bank '{bucket.url}' is being written by another process; wait until it is done"
    )


def _check_conditions(bucket: Bucket, first: Commit) -> None:
    """Refuse a store that overwrites an object that it should create only once."""
    if bucket.create(first.name, b"to be refused"):
        bucket.delete([first.name])
        raise BankError(
            f"the store of '{bucket.url}' ignores conditions (If-None-Match), so two writers could "
            "lose each other's commits; use one that honours them"
        )


def _parsed(content: bytes) -> Commit | None:
    """Parse a commit from the content of its object; None if it is damaged."""
    line, _, digest = content.partition(b"\n")
    if digest.strip() != hashlib.sha256(line).hexdigest().encode():
        return None
    try:
        found = json.loads(line)
        if found["format"] != FORMAT:
            raise BankError(
                f"the bank has format {found['format']!a} of object stores, this sedem reads "
                f"{FORMAT}; use the sedem that wrote it or build it again"
            )
        commit = Commit(
            found["number"],
            found["parent"],
            found["bytes"],
            tuple(found["catalog"]),
            tuple(found["shards"]),
            found["writer"],
        )
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    whole = (
        all(type(number) is int and number > 0 for number in (commit.number, commit.size))
        and len(commit.parts) == -(-commit.size // PART)
        and all(map(is_digest, (*commit.parts, *commit.shards)))
        and re.fullmatch(r"[0-9a-f]{32}", str(commit.writer)) is not None
    )
    return commit if whole else None


def _listed(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if _NAME.fullmatch(entry.name)]


def _name(number: int) -> str:
    return f"{COMMITS}/{number:012d}"

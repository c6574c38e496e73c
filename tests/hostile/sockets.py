"""Sockets that a process and those that it started listen on, as Linux tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

LISTEN = "0A"


def listening(process: int) -> list[tuple[str, int]]:
    """Addresses and ports of a process and its descendants."""
    inodes = {inode for one in family(process) for inode in sockets(one)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((address_of(bytes.fromhex(address)), int(port, 16)))
    return found


def address_of(words: bytes) -> str:
    """An address from its words, each of which has the byte order of this machine."""
    content = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    if len(content) == 4:
        return str(IPv4Address(content))
    address = IPv6Address(content)
    return str(address.ipv4_mapped or address)


def family(process: int) -> set[int]:
    """A process and its descendants."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(place.name)] = int(
                (place / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found, size = {process}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def sockets(process: int) -> Iterator[str]:
    """Inodes of the sockets of a process."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(descriptor)
                if name.startswith("socket:"):
                    yield name[8:-1]

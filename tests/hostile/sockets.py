"""Sockets that a process and those that it started listen on."""

from __future__ import annotations

from contextlib import suppress

import psutil


def listening(process: int) -> list[tuple[str, int]]:
    """Addresses and ports of a process and its descendants."""
    first = psutil.Process(process)
    found: list[tuple[str, int]] = []
    for one in (first, *first.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = one.net_connections("inet")
            found += [(s.laddr.ip, s.laddr.port) for s in sockets if s.status == psutil.CONN_LISTEN]
    return [(address.removeprefix("::ffff:"), port) for address, port in found]

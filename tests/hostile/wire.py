"""Raw connections to a server, and the latency of /health while others attack it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

SECONDS = 30.0


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname and address.port
    return socket.create_connection((address.hostname, address.port), SECONDS)


def exchange(url: str, *pieces: bytes) -> bytes:
    """Send pieces as far as the server takes them, and return what it answers until it closes."""
    with connect(url) as channel:
        try:
            for piece in pieces:
                channel.sendall(piece)
        except OSError:
            pass  # the server has closed; its answer may still be read
        return received(channel)


def received(channel: socket.socket) -> bytes:
    answer = b""
    try:
        while piece := channel.recv(2**16):
            answer += piece
    except OSError:
        pass
    return answer


class Latencies(list[float]):
    """Seconds that each request took."""

    @property
    def median(self) -> float:
        return sorted(self)[len(self) // 2]


@contextmanager
def watching(url: str, path: str = "/health") -> Iterator[Latencies]:
    """Ask for a path on new connections until the block ends."""
    seen, ended = Latencies(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            client = HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
            client.request("GET", path)
            assert client.getresponse().status == 200
            client.close()
            seen.append(time.perf_counter() - began)
            time.sleep(0.01)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join(SECONDS)
    assert seen and not thread.is_alive()

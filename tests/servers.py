"""A server on a loopback port, in a thread, for clients that need a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serving import READER, SECRET

from sedem import SeDeM
from sedem.serve.app import create_app
from sedem.serve.keys import Key, KeyRing, digest_of
from sedem.serve.run import Server, listen
from sedem.serve.service import Service
from sedem.serve.settings import Settings

SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Attributes:
        url: its address, without a slash at the end.
        service: what stands behind it.
    """

    url: str
    service: Service

    @property
    def api(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"


@contextmanager
def serving(settings: Settings, model: SeDeM) -> Iterator[Served]:
    """Run a server until the block ends."""
    keys = KeyRing(
        [
            Key("admin", digest_of(SECRET), write=True, metrics=True),
            Key("reader", digest_of(READER)),
        ]
    )
    app = create_app(settings, model, keys=keys)
    addresses: list[str] = []
    began = threading.Event()

    def announce(address: str) -> None:
        addresses.append(address)
        began.set()

    listening = listen("127.0.0.1", 0)
    server = Server(app, settings, announce)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        assert began.wait(SECONDS), "the server did not start"
        service = app.state.lifecycle.service
        assert service is not None
        yield Served(addresses[0].rstrip("/"), service)
    finally:
        server.stop()
        thread.join(SECONDS)
        listening.close()
    assert not thread.is_alive(), "the server did not end"

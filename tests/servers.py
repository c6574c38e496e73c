"""A server on a loopback port, in a thread, for clients that need a real socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serving import KEYS

from sedem import SeDeM
from sedem_serve.server.app import create_app
from sedem_serve.server.run import Server, listen
from sedem_serve.server.service import Service
from sedem_serve.server.settings import ServerSettings

SECONDS = 240.0


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Attributes:
        url: its address, without a slash at the end.
        service: what stands behind it.
        server: takes signals.
    """

    url: str
    service: Service
    server: Server

    @property
    def api(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"


@contextmanager
def serving(settings: ServerSettings, model: SeDeM) -> Iterator[Served]:
    """Run a server until the block ends."""
    app = create_app(settings, model, keys=KEYS)
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
        yield Served(addresses[0].rstrip("/"), service, server)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listening.close()
    assert not thread.is_alive(), "the server did not end"

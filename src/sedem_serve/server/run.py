"""Run the server: one process, one socket, and a shutdown that lets running answers finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Timer
from types import FrameType

import uvicorn
from fastapi import FastAPI

from sedem.errors import ConfigError
from sedem.untrusted import HEAD_BYTES
from sedem_serve.server import logs
from sedem_serve.server.app import create_app
from sedem_serve.server.connections import Connection
from sedem_serve.server.keys import keys_of, reload_keys
from sedem_serve.server.service import Lifecycle
from sedem_serve.server.settings import ServerSettings

CLOSING_SECONDS = 5
"""How long responses that have been told to end may take before they are cut off."""
CLOSING_SHARE = 6
"""One part in so many of the time that the server has to end is for closing, after the answers."""
BACKLOG = 2048
"""Connections that the system holds for the server until it accepts them."""
OPEN_FILES = 2**16
"""Files that the server may open: a bank takes three, and systems often allow 1024."""
SWITCH_SECONDS = 0.0005
"""How long a thread may run Python while another waits to. A step of an answer has hundreds of
operations, each of which waits for Python afterwards, at worst as long as this."""

Announce = Callable[[str, str | None], None]
"""Called with the address of the page, and the secret if one was generated for this run."""


def run(settings: ServerSettings, announce: Announce) -> None:
    """Serve until SIGTERM or Ctrl-C.

    The first signal lets running answers finish and refuses new ones; a second one stops at once.

    Args:
        announce: called once the server listens; the model may still be opening.

    Raises:
        ConfigError: the address cannot be used, or the keys cannot be read.
        SedemError: the model or a bank cannot be opened.
    """
    keys, secret = keys_of(settings.key_file)
    logs.configure(settings.log_format, log_text=settings.log_text)
    sys.setswitchinterval(SWITCH_SECONDS)
    listening = listen(settings.host, settings.port)
    try:
        app = create_app(settings, keys=keys)
        server = Server(app, settings, lambda address: announce(address, secret))
        app.state.on_failure = lambda: setattr(server, "should_exit", True)
        server.end_process = end_process
        server.run(sockets=[listening])
    finally:
        listening.close()
    failed: Exception | None = app.state.lifecycle.failed
    if failed is not None:
        raise failed


class Server(uvicorn.Server):
    """uvicorn's server, with a shutdown in two steps: first the answers, then the connections."""

    def __init__(
        self, app: FastAPI, settings: ServerSettings, announce: Callable[[str], None]
    ) -> None:
        # Banks need descriptors too, and as many as are accepted at once may be closing.
        connections = _allow_open_files() // 4
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, most=connections),  # type: ignore[arg-type]
                h11_max_incomplete_event_size=HEAD_BYTES,
                backlog=min(BACKLOG, connections // 4),
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=65,  # longer than proxies keep theirs, so that they close first
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self.app, self.settings, self.announce = app, settings, announce
        self.end_process: Callable[[], None] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0
        self._ending: Future[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and announce the address."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # more than are accepted at once
        self._loop = asyncio.get_running_loop()
        if self.settings.key_file is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self.reload_keys)
        if sockets:
            self.announce(address_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: the first one shuts down gracefully, the second one at once."""
        self._signals += 1
        if self._loop is None or self._signals > 1:
            self.should_exit = True
            self.force_exit = self._signals > 1
        else:
            # The last resort, if something cannot be interrupted.
            watchdog = Timer(self.settings.drain_seconds, self.end_process)
            watchdog.daemon = True
            watchdog.start()
            self._ending = asyncio.run_coroutine_threadsafe(self.end(), self._loop)

    async def end(self) -> None:
        """Finish running answers, refuse others, then close the connections."""
        lifecycle: Lifecycle = self.app.state.lifecycle
        lifecycle.draining = True
        logs.log("draining", in_flight=lifecycle.in_flight)
        if lifecycle.service is not None:
            scheduler = lifecycle.service.scheduler
            scheduler.drain()
            lifecycle.service.library.stop()
            seconds = self.settings.drain_seconds
            last = time.monotonic() + seconds - seconds / CLOSING_SHARE
            while lifecycle.in_flight and time.monotonic() < last:
                await asyncio.sleep(0.05)
            # Streams that are still running end with an error that their clients can see.
            await asyncio.to_thread(scheduler.close, at_once=True)
        self.should_exit = True

    def reload_keys(self) -> None:
        """Read the file of keys again."""
        assert self.settings.key_file is not None
        reload_keys(self.settings.key_file, lambda ring: setattr(self.app.state, "keys", ring))


def end_process() -> None:
    """End the process now; files of banks and uploads are whole at any moment."""
    logs.log("ended before everything was closed", logging.WARNING)
    os._exit(0)


def _allow_open_files() -> int:
    """Raise the process's own limit of open files as far as the system lets it, and return it."""
    if sys.platform == "win32":
        return OPEN_FILES
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except socket.gaierror:
        raise ConfigError(f"host is '{host}'; it must be an address of this machine") from None
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                why = f"port {port} of {host} is in use; end what uses it, or choose another"
                why += " with --port"
            case errno.EACCES:
                why = f"port {port} needs rights that this user lacks; choose one above 1023"
            case _:
                reason = os.strerror(error.errno or 0)
                why = (
                    f"{host}:{port} cannot be used: {reason}; choose another with --host and --port"
                )
        raise ConfigError(why) from None


def address_of(listening: socket.socket) -> str:
    """Return the address of the page for a browser on this machine."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

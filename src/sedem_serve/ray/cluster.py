"""Connect to a Ray cluster: one on this machine, or one that is already running."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

from sedem.errors import ConfigError, first_line

LOCAL, AUTO, CLIENT = "local", "auto", "ray://"
SECONDS = 5.0
"""Timeout for reaching an address; Ray itself would try for half a minute."""
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable that, if it is 0, lets all processes of a cluster listen on loopback only."""
_FORMS = (
    f"'{LOCAL}' starts a cluster on this machine, '{AUTO}' finds the one that runs here; others "
    f"are HOST:PORT, such as 10.0.0.1:6379, or {CLIENT}HOST:10001"
)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster; a process that is already connected keeps its connection.

    Args:
        address: "local" starts a cluster on this machine, which ends with the block, and which only
            processes of this machine with its token can use; "auto" is the cluster that runs on
            this machine; others are "HOST:PORT" of the head node of a cluster that this machine is
            in, and "ray://HOST:PORT" of Ray's client server.

    Raises:
        ConfigError: Ray is not installed, there is no such cluster, or it has no token.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            "many machines are joined by Ray, which is not installed; run "
            "pip install 'sedem[scale]'"
        )
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        yield
        return
    # Refuse an address where nothing listens, and a cluster that anyone may use.
    if address not in (LOCAL, AUTO):
        host, colon, port = address.removeprefix(CLIENT).rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"'{address}' is not a Ray cluster address; {_FORMS}")
        try:
            socket.create_connection((host.strip("[]"), int(port)), SECONDS).close()
        except OSError as error:
            raise ConfigError(
                f"no Ray cluster answers at '{address}' ({error.strerror or error}); start one "
                f"with 'ray start --head', or correct the address: {_FORMS}"
            ) from None
    if address != LOCAL and MODE not in os.environ:  # unless the user has decided so
        raise ConfigError(
            f"a Ray cluster runs the code of anyone who reaches it, so '{address}' needs a token: "
            f"start its nodes with {MODE}=token and {TOKEN}=SECRET, and set both here; "
            f"{MODE}=disabled uses a cluster without a token"
        )
    # Connect
    options: dict[str, Any] = {} if address.startswith(CLIENT) else {"log_to_driver": False}
    options |= {"include_dashboard": False} if address == LOCAL else {"address": address}
    with _alone() if address == LOCAL else nullcontext():
        import ray

        try:
            ray.init(logging_level=logging.ERROR, **options)
        except Exception as error:
            raise ConfigError(_reason(address, error)) from None
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _alone() -> Iterator[None]:
    """Let a new cluster listen on loopback only, with a token that only this process has."""
    if "ray" in sys.modules and not _token.cache_info().currsize:
        raise ConfigError(
            "this process has imported Ray, so it cannot start a cluster for itself alone; connect "
            "to one with ray.init(), or import Ray later"
        )
    before = dict(os.environ)
    os.environ |= {LOOPBACK: "0", MODE: "token", TOKEN: _token()}
    try:
        yield
    finally:
        for name in (LOOPBACK, MODE, TOKEN):
            del os.environ[name]
            os.environ |= {name: before[name]} if name in before else {}


@cache
def _token() -> str:
    return secrets.token_hex(32)


def _reason(address: str, error: Exception) -> str:
    """Return why Ray could not connect, in a sentence."""
    text = f"{error} {error.__context__ or ''} {error.__cause__ or ''}"
    if "AuthToken" in text or "authentication" in text.lower():
        return (
            f"the Ray cluster at '{address}' asks for a token; set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token to the token of its head node"
        )
    if address == LOCAL:
        return f"no Ray cluster can be started on this machine ({first_line(error)})"
    if address == AUTO:
        return (
            f"no Ray cluster runs on this machine ({first_line(error)}); start one with "
            f"'ray start --head', or give another address: {_FORMS}"
        )
    return (
        f"the Ray cluster at '{address}' cannot be used ({first_line(error)}); without {CLIENT} "
        "this machine must be one of its nodes, and Ray and Python must be of the same version"
    )

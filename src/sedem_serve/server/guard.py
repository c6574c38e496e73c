"""A middleware in front of every route: only GET /health passes without a key.

A key is sent as `Authorization: Bearer SECRET` or, for the page, in a cookie. A browser attaches
the cookie automatically, so a request that changes something with a cookie must come from the page:
its origin must be this server.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sedem.untrusted import HEAD_BYTES, HEADERS
from sedem_serve.server.body_limit import in_time
from sedem_serve.server.errors import (
    bank_not_found,
    forbidden,
    foreign_origin,
    head_too_large,
    too_many_keys,
    unauthorized,
)
from sedem_serve.server.keys import Key, KeyRing
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.pages import COOKIE, asks_for_page, login, login_page, sign_out, welcome

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
OPEN = ("GET", "/health")
"""The only route that needs no key."""
WRONG_KEYS, WRONG_KEYS_RATE = 20.0, 1.0
"""Wrong keys that an address may send at once, and per second after that."""
ADDRESSES = 10_000
"""Addresses whose wrong keys are counted."""


class WrongKeys:
    """A token bucket for each address: how many more wrong keys it may send.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def left(self, address: str) -> float:
        """Return the tokens of an address; below 1, it has to wait."""
        tokens, at = self._buckets.get(address, (WRONG_KEYS, 0.0))
        return min(WRONG_KEYS, tokens + (self._clock() - at) * WRONG_KEYS_RATE)

    def take(self, address: str) -> None:
        """Count a wrong key."""
        self._buckets[address] = self.left(address) - 1, self._clock()
        self._buckets.move_to_end(address)
        if len(self._buckets) > ADDRESSES:
            self._buckets.popitem(last=False)


class Guard:
    """Checks the key before anything else sees a request."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics, self.wrong_keys = app, metrics, WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401 or 403."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            receive = in_time(receive)
            request = Request(scope, receive)
            response = await self._refusal_in_time(request)
            await (response or self.app)(scope, receive, send)
        else:
            # A web socket: no route supports it.
            await send({"type": "websocket.close", "code": 1008})

    async def _refusal_in_time(self, request: Request) -> Response | None:
        """Do as `_refusal`, but slow an address down that tries wrong keys."""
        path, address = request.scope["path"], request.client.host if request.client else ""
        has_key = (
            "authorization" in request.headers
            or COOKIE in request.cookies
            or "key" in request.query_params
            or path == "/login"
        )
        if not has_key or (request.method, path) == OPEN:
            return await self._refusal(request)
        # No key is compared before the address has waited, or the wait would not slow it down.
        if (left := self.wrong_keys.left(address)) < 1:
            self.metrics.refused.labels("key").inc()
            return too_many_keys(math.ceil((1 - left) / WRONG_KEYS_RATE)).response()
        response = await self._refusal(request)
        if response is not None and response.status_code == 401:
            self.wrong_keys.take(address)
        return response

    async def _refusal(self, request: Request) -> Response | None:
        """Put the key into the request's state, or return a response instead of passing it on."""
        head = request.scope["headers"]
        if len(head) > HEADERS or sum(len(name) + len(text) for name, text in head) > HEAD_BYTES:
            self.metrics.refused.labels("size").inc()
            return head_too_large().response()
        # Not of `request.url`, which some versions of Starlette build from the header Host.
        path = request.scope["path"]
        if (request.method, path) == OPEN:
            return None
        keys: KeyRing = request.app.state.keys
        if request.method == "POST" and path in ("/login", "/logout"):
            if not _from_here(request):
                return self._foreign()
            return await login(request, keys) if path == "/login" else sign_out()
        if request.method == "GET" and path == "/" and "key" in request.query_params:
            return welcome(request, keys, request.query_params["key"])
        header, cookie = request.headers.get("authorization"), request.cookies.get(COOKIE)
        if header is not None:
            scheme, _, secret = header.partition(" ")
            key = keys.find(secret.strip()) if scheme.lower() == "bearer" else None
        else:
            key = None if cookie is None else keys.find(cookie)
        if key is None:
            self.metrics.refused.labels("key").inc()
            if asks_for_page(request):
                return login_page()
            if header is None and cookie is None:
                what = "a key is needed; send it as the header 'Authorization: Bearer KEY'"
            else:
                what = "this key is not known; check it, or ask the server's operator"
            return unauthorized(what).response()
        changes = request.method not in SAFE_METHODS
        if header is None and changes and not _from_here(request):
            return self._foreign()
        request.state.key = key
        return None

    def _foreign(self) -> Response:
        self.metrics.refused.labels("origin").inc()
        return foreign_origin().response()


async def key_of(connection: HTTPConnection) -> Key:
    """Return the key of a request; a dependency of routes."""
    key: Key = connection.state.key
    return key


Owner = Annotated[Key, Depends(key_of)]


def require_write(key: Key) -> None:
    """Reject a key that may only query, with 403."""
    if not key.write:
        raise forbidden(
            f"key '{key.name}' may ask but change nothing; use a key with \"write\": true",
            "read_only_key",
        )


def require_bank(key: Key, name: str) -> None:
    """Reject a bank that is out of a key's scope with the 404 of one that does not exist."""
    if not key.may_read(name):
        raise bank_not_found(name)


def _from_here(request: Request) -> bool:
    """Return whether a page of this server sent a request, as reported by the browser."""
    if (site := request.headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    # Browsers omit it over plain HTTP. The scheme is not compared: behind a proxy that terminates
    # TLS it is http here and https in the browser.
    origin = urlsplit(request.headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == request.headers.get("host")

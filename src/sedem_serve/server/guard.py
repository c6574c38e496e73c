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
    ApiError,
    bank_not_found,
    foreign_origin,
    head_too_large,
)
from sedem_serve.server.keys import Key, KeyRing
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.pages import COOKIE, login, login_page, sign_out, welcome

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
        """Pass a request on, or answer it with 401 or 403; an address with wrong keys waits."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # A web socket: no route supports it.
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, in_time(receive))
        path, address = scope["path"], request.client.host if request.client else ""
        has_key = (request.method, path) != OPEN and (
            "authorization" in request.headers
            or COOKIE in request.cookies
            or "key" in request.query_params
            or path == "/login"
        )
        # No key is compared before the address has waited, or the wait would not slow it down.
        if has_key and (left := self.wrong_keys.left(address)) < 1:
            seconds = str(math.ceil((1 - left) / WRONG_KEYS_RATE))
            told = f"too many wrong keys came from this address; try again in {seconds} s"
            headers = {"Retry-After": seconds}
            error = ApiError(429, told, code="too_many_wrong_keys", headers=headers)
            response: Response | None = self._refused("key", error)
        else:
            response = await self._checked(request)
            if has_key and response is not None and response.status_code == 401:
                self.wrong_keys.take(address)
        await (response or self.app)(scope, request.receive, send)

    async def _checked(self, request: Request) -> Response | None:
        """Put the key into the request's state, or return a response instead of passing it on."""
        head = request.scope["headers"]
        if len(head) > HEADERS or sum(len(name) + len(text) for name, text in head) > HEAD_BYTES:
            return self._refused("size", head_too_large())
        # Not of `request.url`, which some versions of Starlette build from the header Host.
        path = request.scope["path"]
        if (request.method, path) == OPEN:
            return None
        keys: KeyRing = request.app.state.keys
        if request.method == "POST" and path in ("/login", "/logout"):
            if not _from_here(request):
                return self._refused("origin", foreign_origin())
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
            what = "this key is not known; check it, or ask the server's operator"
            if header is None and cookie is None:
                what = "a key is needed; send it as the header 'Authorization: Bearer KEY'"
            error = ApiError(401, what, headers={"WWW-Authenticate": "Bearer"})
            response, accepts = self._refused("key", error), request.headers.get("accept", "")
            of_page = request.method == "GET" and path == "/" and "text/html" in accepts
            return login_page() if of_page else response
        changes = request.method not in SAFE_METHODS
        if header is None and changes and not _from_here(request):
            return self._refused("origin", foreign_origin())
        request.state.key = key
        return None

    def _refused(self, reason: str, error: ApiError) -> Response:
        self.metrics.refused.labels(reason).inc()
        return error.response()


async def key_of(connection: HTTPConnection) -> Key:
    """Return the key of a request; a dependency of routes."""
    key: Key = connection.state.key
    return key


Owner = Annotated[Key, Depends(key_of)]


def require_write(key: Key) -> None:
    """Reject a key that may only query, with 403."""
    if not key.write:
        raise ApiError(
            403,
            f"key '{key.name}' may ask but change nothing; use a key with \"write\": true",
            code="read_only_key",
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

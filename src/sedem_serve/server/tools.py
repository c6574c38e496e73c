"""/mcp: the banks of the server as tools of agents, over streamable HTTP.

The middleware of the application has checked the key and bounded the body; a key sees its banks
here as everywhere. A browser may call it only from the server's own pages and those of --cors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sedem.errors import SedemError
from sedem_serve.server.errors import ApiError, foreign_origin, to_api_error
from sedem_serve.server.keys import Key
from sedem_serve.server.service import Answerer, Lifecycle
from sedem_serve.server.settings import ServerSettings
from sedem_serve.tools import Limits
from sedem_serve.tools.toolbox import Toolbox

PATH = "/mcp"
SESSIONS = 256
"""Most sessions of agents that are open; one that is not used for half an hour is closed."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")
"""Hosts by which this machine calls a server that listens on one of them."""


def add_tools(app: FastAPI, settings: ServerSettings) -> None:
    """Add the route of the tools, if the extra `tools` is installed."""
    if find_spec("mcp") is None:
        return
    from mcp.server.transport_security import TransportSecuritySettings

    from sedem_serve.tools.mcp import ToolServer

    server = ToolServer(ServedBackend(app.state.lifecycle))
    local = settings.host in (*LOCAL, "::1")
    origins = [f"http://{host}:*" for host in LOCAL]
    security = TransportSecuritySettings(
        # A page of another site could reach a server of this machine by a name of its own.
        enable_dns_rebinding_protection=local,
        allowed_hosts=[*LOCAL, *(f"{host}:*" for host in LOCAL)],
        allowed_origins=[*settings.cors, *origins],
    )
    tools = server.streamable_http_app(
        streamable_http_path=PATH, transport_security=security, max_sessions=SESSIONS
    )
    for route in tools.routes:
        # Behind a proxy, the server's own host is any.
        route.app = Owned(route.app, None if local else settings.cors)  # type: ignore[attr-defined]
        app.router.routes.append(route)
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def with_tools(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app), server.session_manager.run():
            yield

    app.router.lifespan_context = with_tools


class Owned:
    """Passes on requests of own pages, and tells the SDK whose they are: a session has a key.

    Args:
        origins: of other pages that may call; None if the SDK checks them.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] | None) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        request = Request(scope)
        origin, host = request.headers.get("origin"), request.headers.get("host")
        own = (None, f"http://{host}", f"https://{host}")
        if self.origins is not None and origin not in (*own, *self.origins):
            await foreign_origin().response()(scope, receive, send)
            return
        key: Key = request.state.key
        token = AccessToken(token=key.sha256, client_id=key.sha256, scopes=[])
        await self.app({**scope, "user": AuthenticatedUser(token)}, receive, send)


class ServedBackend:
    """The banks of a server, for the key of each request."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def toolbox(self, request: Any) -> Toolbox:
        """Return the tools for a key."""
        service, key = self._lifecycle.ready(), request.state.key
        assert isinstance(key, Key)
        settings = service.settings
        return Toolbox(
            [service.library.get(name) for name in service.library.names(key)],
            lambda: service.model,
            writable=key.write,
            reader=service.reader,
            limits=Limits(settings.max_question_characters, settings.max_k, settings.max_tokens),
        )

    def asker(self) -> Answerer | None:
        """Return what answers questions; None until the model is open."""
        opens = self._lifecycle.service is None and not self._lifecycle.draining
        return None if opens else self._lifecycle.ready().scheduler

    def told(self, error: BaseException | None) -> str | None:
        """Return what a client is told about an error, without the server's folders."""
        if isinstance(error, ApiError | SedemError):
            return to_api_error(error).message
        return None

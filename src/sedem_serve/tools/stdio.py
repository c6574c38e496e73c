"""The SDK's transport over stdin and stdout, with an answer to every line, also to the last ones.

By itself it says nothing about a line that is no message, and cancels calls at the end of input.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from pydantic import ValidationError

LAST_SECONDS = 1.3
"""How long calls may go on after the end of input; then they are answered with an error."""


@asynccontextmanager
async def answered_stdio() -> AsyncIterator[tuple[Any, OpenCalls]]:
    """Open the streams of messages from and to the client."""
    async with stdio_server() as (lines, wire):
        given, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        open_calls = OpenCalls(wire)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_calls.pass_on, lines, given)
            yield messages, open_calls


class OpenCalls:
    """A stream of replies that knows which calls have none yet."""

    def __init__(self, wire: Any) -> None:
        self._wire, self._open = wire, set[Any]()

    async def send(self, item: SessionMessage) -> None:
        """Send a message to the client."""
        await self._wire.send(item)
        if isinstance(item.message, JSONRPCResponse | JSONRPCError):
            self._open.discard(item.message.id)

    async def aclose(self) -> None:
        """Close the stream."""
        await self._wire.aclose()

    async def __aenter__(self) -> OpenCalls:
        """Return the stream."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the stream."""
        await self.aclose()

    async def pass_on(self, lines: Any, given: Any) -> None:
        """Pass on messages, refuse what is none, and wait for replies at the end of input."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with given:
                async for line in lines:
                    if isinstance(line, Exception):
                        if refusal := _refusal(line):
                            await self.send(SessionMessage(refusal))
                        continue
                    match line.message:
                        case JSONRPCRequest(id=number):
                            self._open.add(number)
                        case JSONRPCNotification(
                            method="notifications/cancelled", params={"requestId": number}
                        ):
                            self._open.discard(number)
                    await given.send(line)
                with anyio.move_on_after(LAST_SECONDS):
                    while self._open:
                        await anyio.sleep(0.02)


def _refusal(error: Exception) -> JSONRPCError | None:
    """Return the error for a line that is no message; None if it is empty."""
    found = error.errors() if isinstance(error, ValidationError) else []
    if any(one["type"] == "json_invalid" for one in found) or not found:
        if found and not str(found[0]["input"]).strip():
            return None
        told = ErrorData(code=PARSE_ERROR, message="the line is not JSON; send one message a line")
        return JSONRPCError(jsonrpc="2.0", id=None, error=told)
    told = ErrorData(code=INVALID_REQUEST, message="the line is no request of JSON-RPC 2.0")
    whole = next((one["input"] for one in found if isinstance(one["input"], dict)), {})
    number = whole.get("id")
    known = isinstance(number, str | int) and not isinstance(number, bool)
    return JSONRPCError(jsonrpc="2.0", id=number if known else None, error=told)

"""Lines that are no message, and calls that are under way when the input ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse, jsonrpc_message_adapter

from sedem_serve.tools import stdio
from sedem_serve.tools.stdio import OpenCalls


class Wire:
    """What the client reads."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def send(self, item: SessionMessage) -> None:
        self.sent.append(json.loads(item.message.model_dump_json(exclude_unset=True)))


async def lines(*texts: str) -> AsyncIterator[SessionMessage | Exception]:
    """Yield what the SDK makes of lines."""
    for text in texts:
        try:
            yield SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
        except ValueError as error:
            yield error


@pytest.mark.parametrize(
    ("line", "code", "number"),
    [
        ("nonsense", -32700, None), ('{"jsonrpc": "2.0", "id": 1,', -32700, None),
        ("5", -32600, None),
        ('{"id": 1, "method": "ping"}', -32600, 1), ("[" * 3000, -32700, None),
        ('{"jsonrpc": "1.0", "id": "a", "method": "ping"}', -32600, "a"),
        ('{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": "x"}', -32600, 7),
        ('{"jsonrpc": "2.0", "id": true, "method": 5}', -32600, None), ("[]", -32600, None),
        ('{"jsonrpc": "2.0", "foo": 1}', -32600, None), ("null", -32600, None),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_gets_an_error(line: str, code: int, number: object) -> None:
    wire = Wire()

    async def run() -> None:
        given, _messages = anyio.create_memory_object_stream[Any](9)
        await OpenCalls(wire).pass_on(lines("\n", line, " \n"), given)

    asyncio.run(run())
    [told] = wire.sent
    assert (told["error"]["code"], told["id"]) == (code, number)


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_of_input_waits_for_calls_but_not_long(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "LAST_SECONDS", 60.0 if answers else 0.1)
    wire = Wire()

    async def run() -> None:
        given, messages = anyio.create_memory_object_stream[Any](9)
        calls = OpenCalls(wire)
        asked = lines(
            *(json.dumps({"jsonrpc": "2.0", "id": n, "method": "tools/call"}) for n in (1, 2)),
            '{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":2}}',
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(calls.pass_on, asked, given)
            await anyio.sleep(0.05)
            assert messages.statistics().open_send_streams == 1
            if answers:
                await calls.send(SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=1, result={})))
        assert messages.statistics().open_send_streams == 0

    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(wire.sent) == answers

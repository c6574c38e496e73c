"""/mcp of the server: its keys, its limits, and clients of every version at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from conftest import LEASE
from fastapi.testclient import TestClient
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from servers import Served, serving
from serving import READER, SCOPED, SECRET, bearer
from unit.server.conftest import in_a_loop, read_all, send
from unit.tools.conftest import place

from sedem import Document, SeDeM
from sedem_serve.server import tools
from sedem_serve.server.settings import ServerSettings

QUESTION = "What is the rent?"
READING = {"search", "ask", "read", "documents", "fetch"}
VERSIONS = ["2025-06-18", "2025-11-25", "2026-07-28"]
ABOUT = {"clientInfo": {"name": "raw", "version": "1"}, "capabilities": {}}
LOCAL = {"Host": "127.0.0.1:8000", "Accept": "application/json, text/event-stream"}


@pytest.fixture
def banks(model: SeDeM, tmp_path: Path) -> dict[str, Path]:
    """A bank of the operator."""
    model.read([Document("lease.txt", LEASE)]).save(tmp_path / "lease.bank")
    return {"lease": tmp_path / "lease.bank"}


@pytest.fixture
def client(make_client: Callable[..., TestClient], banks: dict[str, Path]) -> TestClient:
    """A client of a server with that bank."""
    return make_client(banks=banks)


def message(version: str, method: str, **params: Any) -> dict[str, Any]:
    """A raw request of a protocol version."""
    if version == VERSIONS[-1]:
        prefix = "io.modelcontextprotocol"
        params["_meta"] = {
            f"{prefix}/protocolVersion": version,
            f"{prefix}/clientInfo": {"name": "raw", "version": "1"},
            f"{prefix}/clientCapabilities": {},
        }
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


class Raw:
    """Sends raw messages of one protocol version and returns their results."""

    def __init__(self, client: TestClient, version: str) -> None:
        self.client, self.version = client, version
        self.headers = {**LOCAL, "MCP-Protocol-Version": version}
        if version != VERSIONS[-1]:
            begun = self.send("initialize", protocolVersion=version, **ABOUT)
            assert begun["protocolVersion"] == version
            body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            assert client.post("/mcp", json=body, headers=self.headers).status_code == 202

    def send(self, method: str, **params: Any) -> Any:
        body = message(self.version, method, **params)
        named = params.get("name") or params.get("uri") or ""
        headers = {**self.headers, "Mcp-Method": method, "Mcp-Name": named}
        response = self.client.post("/mcp", json=body, headers=headers)
        assert response.status_code == 200, response.text
        if session := response.headers.get("mcp-session-id"):
            self.headers["Mcp-Session-Id"] = session
        lines = response.text.splitlines()
        data = [line[6:] for line in lines if line.startswith("data: {")] or [response.text]
        answer = json.loads(data[-1])
        assert "error" not in answer, answer
        return answer["result"]


@pytest.mark.parametrize("version", VERSIONS)
def test_raw_messages_of_every_version(client: TestClient, version: str) -> None:
    raw = Raw(client, version)
    listed = {tool["name"]: tool for tool in raw.send("tools/list")["tools"]}
    assert listed.keys() > READING and listed["search"]["annotations"]["readOnlyHint"] is True
    result = raw.send("tools/call", name="search", arguments={"question": QUESTION, "k": 1})
    found = result["structuredContent"]
    assert json.loads(result["content"][0]["text"]) == found and not result.get("isError")
    [passage] = found["results"]
    assert passage["text"] == LEASE[place(passage["id"])[1]]
    refused = raw.send("tools/call", name="fetch", arguments={"id": "mine", "colour": "red"})
    assert refused["isError"] and "no argument 'colour'" in refused["content"][0]["text"]
    [resource] = raw.send("resources/list")["resources"]
    assert raw.send("resources/read", uri=resource["uri"])["contents"][0]["text"] == LEASE


def post(client: TestClient, **headers: str) -> int:
    body = message(VERSIONS[-1], "tools/list")
    method = {"MCP-Protocol-Version": VERSIONS[-1], "Mcp-Method": "tools/list"}
    return client.post("/mcp", json=body, headers={**LOCAL, **method, **headers}).status_code


def test_a_key_and_a_known_host_and_origin_are_needed(
    client: TestClient, anonymous: TestClient
) -> None:
    assert post(client) == post(client, Origin="http://localhost:3000") == 200
    assert post(anonymous) == 401
    assert post(client, Host="evil.example") == 421
    assert post(client, Origin="http://evil.example") == 403


def test_behind_a_proxy_only_own_pages_may_call(make_client: Callable[..., TestClient]) -> None:
    client = make_client(host="0.0.0.0", cors=("https://app.example",))
    host = {"Host": "sedem.example"}
    assert post(client, **host) == post(client, **host, Origin="https://sedem.example") == 200
    assert post(client, **host, Origin="https://app.example") == 200
    assert post(client, **host, Origin="https://evil.example") == 403


def test_without_the_extra_there_is_no_route(
    make_client: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "find_spec", lambda name: None if name == "mcp" else find_spec(name))
    assert post(make_client()) == 404


def test_the_limits_of_the_server_hold(
    make_client: Callable[..., TestClient], banks: dict[str, Path]
) -> None:
    client = make_client(banks=banks, max_question_characters=20, max_k=2, max_tokens=4)
    raw = Raw(client, VERSIONS[-1])
    for tool, arguments, words in (
        ("search", {"question": "a" * 21}, "has 21 characters, at most 20"),
        ("ask", {"question": QUESTION, "k": 3}, "k is 3; it must be from 0 to 2"),
        ("ask", {"question": QUESTION, "max_tokens": 5}, "max_tokens is 5; it must be from 1 to 4"),
    ):
        told = raw.send("tools/call", name=tool, arguments=arguments)
        assert told["isError"] and words in told["content"][0]["text"]


def test_a_damaged_bank_is_told_without_the_servers_folders(
    client: TestClient, banks: dict[str, Path]
) -> None:
    raw = Raw(client, VERSIONS[-1])
    banks["lease"].unlink()
    banks["lease"].write_bytes(b"SQLite format 3\0" + bytes(8192))
    told = raw.send("tools/call", name="search", arguments={"question": QUESTION})
    assert told["isError"] and "cannot read the bank" in told["content"][0]["text"]
    assert str(banks["lease"].parent) not in str(told)


def test_notes_go_into_banks_that_clients_made(client: TestClient) -> None:
    raw = Raw(client, VERSIONS[-1])
    told = raw.send("tools/call", name="remember", arguments={"text": "A note."})
    assert told["isError"] and "there is no bank for notes" in told["content"][0]["text"]
    send(client, "mine", {"a.txt": "The first text."})
    read_all(client, "mine")
    noted = raw.send("tools/call", name="remember", arguments={"text": "A note.", "name": "n"})
    assert noted["structuredContent"] == {"document": "mine/n.note", "done": "remembered"}
    found = raw.send(
        "tools/call", name="search", arguments={"question": "note?", "scope": "*.note"}
    )
    assert [one["text"] for one in found["structuredContent"]["results"]] == ["A note."]
    gone = raw.send("tools/call", name="forget", arguments={"name": "n"})
    assert gone["structuredContent"]["done"] == "forgotten"


@asynccontextmanager
async def connected(served: Served, secret: str, mode: Any = "auto") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=bearer(secret), timeout=60) as http,
        Client(streamable_http_client(f"{served.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@in_a_loop
async def test_clients_of_several_keys_and_versions_share_one_process(
    model: SeDeM, banks: dict[str, Path], tmp_path: Path
) -> None:
    settings = ServerSettings(folder=tmp_path / "server", banks=banks)
    tools_of: dict[str, set[str]] = {}
    texts: list[str] = []

    async def use(served: Served, secret: str, mode: str) -> None:
        async with connected(served, secret, mode) as client:
            tools_of[secret] = {tool.name for tool in (await client.list_tools()).tools}
            for _ in range(3):
                found = await client.call_tool("search", {"question": QUESTION, "k": 1})
                asked = await client.call_tool("ask", {"question": QUESTION, "max_tokens": 2})
                assert not found.is_error and not asked.is_error, (found, asked)
                texts.append(str(found.structured_content))
            names = [one.name for one in (await client.list_resources()).resources]
            assert names == ([] if secret == SCOPED else ["lease/lease.txt"])

    with serving(settings, model) as served:
        async with anyio.create_task_group() as tasks:
            for secret in (SECRET, READER, SCOPED):
                for mode in ("auto", "legacy"):
                    tasks.start_soon(use, served, secret, mode)
    assert tools_of[READER] == READING and tools_of[SECRET] == READING | {"remember", "forget"}
    # The scoped key sees no bank.
    assert len(set(texts)) == 2 and sum("nothing found" in text for text in texts) == 6


@in_a_loop
async def test_a_client_that_leaves_stops_its_answer(
    model: SeDeM, banks: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sedem.answering.running.end_ids", lambda *a, **k: frozenset())
    settings = ServerSettings(folder=tmp_path / "server", banks=banks)
    with serving(settings, model) as served, anyio.fail_after(120):
        async with connected(served, SECRET) as client:
            async with anyio.create_task_group() as tasks:
                long = {"question": QUESTION, "k": 1, "max_tokens": 400}
                tasks.start_soon(client.call_tool, "ask", long)
                while not served.service.scheduler.running:
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
            while served.service.scheduler.running:
                await anyio.sleep(0.01)
            assert not (await client.call_tool("documents", {})).is_error


def test_a_session_belongs_to_the_key_that_made_it(client: TestClient) -> None:
    version = VERSIONS[0]
    body = message(version, "initialize", protocolVersion=version, **ABOUT)
    begun = client.post("/mcp", json=body, headers={**LOCAL, **bearer(SECRET)})
    session = {"Mcp-Session-Id": begun.headers["mcp-session-id"], **LOCAL}
    listing = message(version, "tools/list")
    for secret, status in ((SECRET, 200), (READER, 404), (SCOPED, 404)):
        answer = client.post("/mcp", json=listing, headers={**session, **bearer(secret)})
        assert answer.status_code == status


def test_the_number_of_sessions_is_bounded(
    make_client: Callable[..., TestClient],
    banks: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tools, "SESSIONS", 2)
    client = make_client(banks=banks)
    body = message(VERSIONS[0], "initialize", protocolVersion=VERSIONS[0], **ABOUT)
    codes = [client.post("/mcp", json=body, headers=LOCAL).status_code for _ in range(3)]
    assert codes == [200, 200, 503]

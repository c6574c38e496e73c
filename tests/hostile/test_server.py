"""Strangers cannot stall the server: every request is bounded before its key is checked."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from hostile.wire import connect, exchange, received
from servers import Served, serving
from serving import SECRET, bearer
from starlette.requests import Request

from sedem import SeDeM
from sedem_serve.server import body_limit, connections
from sedem_serve.server.settings import ServerSettings

HEAD = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
SECONDS = 60.0


@pytest.fixture
def served(tmp_path: Path, model: SeDeM) -> Iterator[Served]:
    with serving(ServerSettings(folder=tmp_path / "server"), model) as running:
        yield running


# Heads


def headers(count: int) -> bytes:
    return b"".join(b"X-%d: 1\r\n" % number for number in range(count)) + b"\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD, b"X-Long: ", *[b"a" * 2**20] * 8),
        (b"GET /", *[b"a" * 2**20] * 8),
        (HEAD, headers(100_000)),
        (HEAD, headers(100)),
        (HEAD, b"X-Long: " + b"a" * 2**16 + b"\r\n\r\n"),
    ],
    ids=["endless header", "endless path", "100,000 headers", "101 headers", "long header"],
)
def test_a_large_head_is_rejected_before_its_key_is_checked(
    pieces: tuple[bytes, ...], served: Served
) -> None:
    answer = exchange(served.url, *pieces[:-1], pieces[-1])
    assert answer.startswith(b"HTTP/1.1 431 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "too_large" and "at most 100 headers in 64 KiB" in error["message"]


def test_a_head_within_the_limits_is_read(served: Served) -> None:
    long = b"X-Long: " + b"a" * 60_000 + b"\r\n"
    assert exchange(served.url, HEAD, b"Connection: close\r\n", long, headers(90)).startswith(
        b"HTTP/1.1 401 "
    )


def test_what_is_not_http_is_one_sentence(served: Served) -> None:
    answer = exchange(served.url, b"\x16\x03\x01\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


# Half-sent requests


def test_a_request_that_does_not_arrive_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(body_limit, "HEAD_SECONDS", 0.2)
    assert exchange(served.url, HEAD) == b""
    assert exchange(served.url) == b""
    body = b"POST /%s HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nAuthorization: %s\r\n\r\n{"
    known = b"Bearer " + SECRET.encode()
    assert b" 408 " in exchange(served.url, body % (b"v1/responses", known))[:20]
    assert b" 408 " in exchange(served.url, body % (b"v1/banks/a/scores", known))[:20]
    with connect(served.url) as channel:  # the answer comes without the body
        channel.sendall(body % (b"v1/responses", b"none"))
        assert b" 401 " in channel.recv(2**16)
        channel.sendall(b"{")
        assert received(channel) == b""


def test_a_body_that_arrives_slowly_but_steadily_is_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_limit, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(body_limit, "BODY_RATE", 10)
    known = b"Authorization: Bearer %s\r\nConnection: close\r\n" % SECRET.encode()
    with connect(served.url) as channel:
        channel.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n")
        channel.sendall(known + b"\r\n")
        for _ in range(10):
            channel.sendall(b"{ ")
            time.sleep(0.05)
        assert b" 400 " in received(channel)[:20]


HALF = (HEAD, b"POST /login HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nOrigin: http://a\r\n\r\nk")


@contextmanager
def half_sent(url: str, count: int) -> Iterator[None]:
    """Hold connections whose requests never arrive."""
    with ExitStack() as stack:
        for number in range(count):
            channel = stack.enter_context(connect(url))
            with suppress(OSError):
                channel.sendall(HALF[number % 2])
        yield


def test_half_sent_requests_make_room_for_others(
    tmp_path: Path, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sedem_serve.server.run._allow_open_files", lambda: 64)
    with serving(ServerSettings(folder=tmp_path), model) as served, half_sent(served.url, 64):
        assert len(served.server.server_state.connections) <= 17
        for _ in range(20):
            assert httpx.get(f"{served.url}/health").is_success


# Bodies

MEBIBYTES = 8 * 2**20 - 100


def conversation(message: bytes) -> bytes:
    """A body of 8 MiB with as many messages as it has room for."""
    start, count = b'{"model": "sedem", "messages": [', (MEBIBYTES - 100) // (len(message) + 1)
    return start + b",".join([message] * count) + b"]}"


MANY = {
    "messages": conversation(b'{"role":"x"}'),
    "empty messages": conversation(b"{}"),
    "numbers": conversation(b"1"),
    "parts": b'{"model": "a", "input": [{"role": "user", "content": [%s{}]}]}' % (b"{}," * 10**6),
    "fields": b'{"model": "a", %s"z": 1}' % b"".join(b'"%d": 1,' % n for n in range(500_000)),
    "metadata": b'{"metadata": {%s"z": ""}}' % b"".join(b'"%d":"",' % n for n in range(500_000)),
    "depth": b"[" * MEBIBYTES,
    "backslashes": conversation(rb'"\\"'),
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY)
@pytest.mark.parametrize("path", ["chat/completions", "responses", "banks/a/scores"])
def test_a_body_of_many_values_is_rejected_before_it_is_parsed(
    body: bytes, path: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def parsed(request: Request) -> None:
        await request.body()
        raise AssertionError("the body was parsed")

    monkeypatch.setattr("starlette.requests.Request.json", parsed)
    headers = {**bearer(SECRET), "Content-Type": "application/json"}
    told = httpx.post(f"{served.api}/{path}", content=body, headers=headers, timeout=SECONDS)
    assert told.status_code == 400 and told.json()["error"]["code"] == "too_many_values"
    assert "at most 10,000 are read" in told.text


def test_a_body_of_many_values_is_rejected_before_its_rest_arrives(served: Served) -> None:
    head = b"POST /v1/responses HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % MEBIBYTES
    known = b"Authorization: Bearer %s\r\n\r\n" % SECRET.encode()
    with connect(served.url) as channel:
        channel.sendall(head + known + MANY["numbers"][: 2**16])
        assert b" 400 " in channel.recv(2**16)[:20]


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ({"a": [1, 2, {}]}, 5),
        ('a " [,{ \\" , b', 0),
        (["\\", "\\"], 2),
        ({"text": 'He said "one, [two], {three}" \\ ' * 5000}, 1),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 2**16])
def test_what_is_inside_of_a_string_does_not_count(value: object, most: int, size: int) -> None:
    body, values = json.dumps(value).encode(), body_limit.Values()
    for start in range(0, len(body), size):
        values.add(body[start : start + size])
    assert values.most == most


# What is logged, and what is quoted


@pytest.mark.parametrize("host", ["a/health?", "a/health#", "/health", "a\\health"])
def test_the_key_is_needed_whatever_the_host_says(host: str, served: Served) -> None:
    told = httpx.get(f"{served.api}/models", headers={"Host": host})
    assert told.status_code in (400, 401)


def test_a_message_quotes_little_of_what_was_sent(served: Served) -> None:
    long, known = "x" * 60_000, {"headers": bearer(SECRET), "timeout": SECONDS}
    for told in (
        httpx.get(f"{served.url}/{long}", **known),
        httpx.get(f"{served.api}/banks/{long}", **known),
        httpx.post(f"{served.api}/chat/completions", json={"model": "a", long: 1}, **known),
        httpx.post(f"{served.api}/banks/{long}/scores", json={"question": "a"}, **known),
    ):
        assert told.status_code in (400, 404) and len(told.text) < 900

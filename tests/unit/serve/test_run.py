from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import SECRET, bearer

from sedem import SeDeM
from sedem.engine.eager import EagerRows
from sedem.errors import ConfigError
from sedem.serve.app import create_app
from sedem.serve.keys import KeyRing, add_key
from sedem.serve.run import Server, _allow_open_files, address_of, listen
from sedem.serve.settings import Settings

STEP_SECONDS = 0.02
QUESTION = {"messages": [{"role": "user", "content": "The rent is 900 euros.\n\nWhat is due?"}]}


class Running:
    """A server in a thread, on a socket of its own."""

    def __init__(self, settings: Settings, model: SeDeM, keys: KeyRing) -> None:
        self.socket = listen("127.0.0.1", 0)
        self.server = Server(create_app(settings, model, keys=keys), settings, self._announced)
        self.announced = threading.Event()
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self.thread.start()
        assert self.announced.wait(180)
        self.client = httpx.Client(base_url=self.address, headers=bearer(SECRET), timeout=180)

    def _announced(self, address: str) -> None:
        self.address = address
        self.announced.set()

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def ended(self) -> bool:
        self.thread.join(180)
        return not self.thread.is_alive()

    def ask(self, tokens: int) -> Any:
        body = {"model": "sedem", **QUESTION, "max_tokens": tokens, "stream": True}
        return self.client.stream("POST", "/v1/chat/completions", json=body)


@pytest.fixture
def started(
    settings: Settings, model: SeDeM, keys: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a server whose every token takes a while."""
    each = EagerRows.step

    def slowly(self: EagerRows, ids_B: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return each(self, ids_B)

    monkeypatch.setattr(EagerRows, "step", slowly)
    # An answer that does not end by itself.
    monkeypatch.setattr("sedem.answering.running.end_ids", lambda *_, **__: frozenset())
    running: list[Running] = []

    def start(**changes: Any) -> Running:
        running.append(Running(settings.with_changes(**changes), model, keys))
        return running[-1]

    yield start
    for one in running:
        one.signal()
        one.signal()
        one.ended()
        one.client.close()


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def until_text(stream: Iterator[Any]) -> None:
    """Read until the answer has begun."""
    for event in stream:
        if event.get("choices") and event["choices"][0]["delta"].get("content"):
            return
    raise AssertionError("the answer never began")


def test_a_signal_lets_an_answer_end_and_refuses_others(started: Callable[..., Running]) -> None:
    server = started()
    with server.ask(60) as response:
        stream = events(response.iter_lines())
        until_text(stream)
        server.signal()
        time.sleep(5 * STEP_SECONDS)
        assert server.client.get("/health").is_success
        assert server.client.get("/ready").status_code == 503
        refused = server.client.post(
            "/v1/chat/completions", json={"model": "sedem", **QUESTION, "max_tokens": 1}
        )
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        rest = list(stream)
    assert [e for e in rest if e.get("choices") and e["choices"][0].get("finish_reason")]
    assert not [event for event in rest if "error" in event]
    assert server.ended()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.address)


def test_an_answer_that_takes_too_long_ends_with_an_error(started: Callable[..., Running]) -> None:
    server = started(drain_seconds=0.2)
    with server.ask(400) as response:
        stream = events(response.iter_lines())
        until_text(stream)
        began = time.monotonic()
        server.signal()
        rest = list(stream)
    assert time.monotonic() - began < 5
    assert rest[-1]["error"]["code"] == "unavailable"
    assert server.ended()


def test_a_question_that_waits_is_refused_at_once(started: Callable[..., Running]) -> None:
    server = started(rows=1)
    with server.ask(100) as response:
        stream = events(response.iter_lines())
        until_text(stream)
        outcome: list[httpx.Response] = []
        body = {"model": "sedem", **QUESTION, "max_tokens": 1}

        def ask() -> None:
            url = f"{server.address}v1/chat/completions"
            outcome.append(httpx.post(url, json=body, headers=bearer(SECRET), timeout=180))

        waiting = threading.Thread(target=ask)
        waiting.start()
        scheduler = server.server.app.state.lifecycle.service.scheduler
        end = time.monotonic() + 10
        while not scheduler.waiting:
            assert time.monotonic() < end
            time.sleep(0.005)
        server.signal()
        waiting.join(1)
        assert [one.status_code for one in outcome] == [503]
        assert not [event for event in stream if "error" in event]
    assert server.ended()


def test_a_second_signal_ends_at_once(started: Callable[..., Running]) -> None:
    server = started()
    with server.ask(400) as response:
        until_text(events(response.iter_lines()))
        began = time.monotonic()
        server.signal()
        server.signal()
        assert server.ended()
    assert time.monotonic() - began < 5


def test_keys_are_read_again(started: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add_key(path, "ann")
    settings = Settings(folder=tmp_path / "server", key_file=path)
    server = Server(create_app(settings), settings, lambda address: None)
    second = add_key(path, "ben")
    server.reload_keys()
    ring: KeyRing = server.app.state.keys
    assert ring.find(first) and ring.find(second)
    path.write_text("{")
    server.reload_keys()
    assert server.app.state.keys is ring


# Addresses


def test_an_address_that_cannot_be_used_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use.*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"host is 'no\.such\.host\.invalid'"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0 cannot be used"):
        listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("::1", "[::1]")]
)
def test_the_address_is_what_a_browser_needs(host: str, shown: str) -> None:
    try:
        with listen(host, 0) as listening:
            port = listening.getsockname()[1]
            assert address_of(listening) == f"http://{shown}:{port}/"
    except ConfigError:
        pytest.skip("this machine has no IPv6")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_limit_of_open_files_is_raised_for_many_banks() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        _allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 2**16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

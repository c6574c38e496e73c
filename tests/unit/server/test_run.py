from __future__ import annotations

import json
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import httpx
import pytest
from servers import Served, serving
from serving import SECRET, bearer

from sedem import SeDeM, SedemConfig
from sedem.engine.eager import EagerRows
from sedem.errors import ConfigError
from sedem_serve.server.app import create_app
from sedem_serve.server.keys import KeyRing, add_key
from sedem_serve.server.run import Server, _allow_open_files, address_of, listen
from sedem_serve.server.settings import ServerSettings

STEP_SECONDS = 0.02
QUESTION = {"messages": [{"role": "user", "content": "The rent is 900 euros.\n\nWhat is due?"}]}


class Running:
    """A server whose every token takes a while, and a client of it."""

    def __init__(self, served: Served) -> None:
        self.url, self.server = served.url, served.server
        self.scheduler = served.service.scheduler
        self.client = httpx.Client(base_url=served.url, headers=bearer(SECRET), timeout=180)

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def ask(self, tokens: int) -> Any:
        body = {"model": "sedem", **QUESTION, "max_tokens": tokens, "stream": True}
        return self.client.stream("POST", "/v1/chat/completions", json=body)


@pytest.fixture
def started(
    settings: ServerSettings, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractContextManager[Running]]:
    """Return a function that runs such a server; it must have ended when the block ends."""
    each = EagerRows.step

    def slowly(self: EagerRows, ids_B: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return each(self, ids_B)

    monkeypatch.setattr(EagerRows, "step", slowly)
    # An answer that does not end by itself.
    monkeypatch.setattr("sedem.answering.running.end_ids", lambda *_, **__: frozenset())

    @contextmanager
    def start(**changes: Any) -> Iterator[Running]:
        with serving(settings.with_changes(**changes), model) as served:
            running = Running(served)
            with running.client:
                yield running

    return start


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


Start = Callable[..., AbstractContextManager[Running]]


def test_a_signal_lets_an_answer_end_and_refuses_others(started: Start) -> None:
    with started(rows=1) as server, server.ask(60) as response:
        stream = events(response.iter_lines())
        until_text(stream)
        outcome: list[httpx.Response] = []
        body = {"model": "sedem", **QUESTION, "max_tokens": 1}
        waiting = threading.Thread(
            target=lambda: outcome.append(server.client.post("/v1/chat/completions", json=body))
        )
        waiting.start()
        end = time.monotonic() + 10
        while not server.scheduler.waiting:
            assert time.monotonic() < end
            time.sleep(0.005)
        server.signal()
        waiting.join(1)
        assert [one.status_code for one in outcome] == [503]
        assert "Retry-After" in outcome[0].headers
        assert server.client.get("/health").is_success
        assert server.client.get("/ready").status_code == 503
        assert server.client.post("/v1/chat/completions", json=body).status_code == 503
        rest = list(stream)
        assert [e for e in rest if e.get("choices") and e["choices"][0].get("finish_reason")]
        assert not [event for event in rest if "error" in event]
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.parametrize("signals", [1, 2])
def test_an_answer_that_takes_too_long_or_a_second_signal_ends_it(
    signals: int, started: Start
) -> None:
    seconds = 0.2 if signals == 1 else 60
    with started(drain_seconds=seconds) as server, server.ask(400) as response:
        stream = events(response.iter_lines())
        until_text(stream)
        began = time.monotonic()
        for _ in range(signals):
            server.signal()
        if signals == 1:
            assert [*stream][-1]["error"]["code"] == "unavailable"
    assert time.monotonic() - began < 8


STUCK = """
import pickle, sys, time
from answers import opened
from sedem.selecting import plan as plans
from sedem.engine.kept import BlockWalk
from sedem_serve.server import run, service
from sedem_serve.server.settings import ServerSettings

plans.WIDE = 20
config, folder, pause = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2], float(sys.argv[3])
compute = BlockWalk.compute

def slowly(*arguments):
    print("a block", flush=True)
    time.sleep(pause)
    return compute(*arguments)

BlockWalk.compute = slowly
model = opened(config, "static", block_context="independent")
service.open_model = lambda settings: model
settings = ServerSettings(folder=folder, port=0, drain_seconds=4)
run.run(settings, lambda url, key: print(url, key, flush=True))
"""
"""A server whose answers take so many seconds for each block."""


@pytest.mark.parametrize("pause", [0.2, 1000.0])
def test_a_signal_ends_the_process_in_time_whatever_is_running(
    pause: float, config: SedemConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent / 'src'}")
    monkeypatch.setenv("SEDEM_API_KEY", SECRET)
    arguments = pickle.dumps(config).hex(), str(tmp_path), str(pause)
    command = [sys.executable, "-c", STUCK, *arguments]
    with Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        with httpx.Client(base_url=url, headers=bearer(SECRET), timeout=180) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.05)
            text = " ".join(f"The rent of flat {number} is due." for number in range(40))
            body = {"model": "sedem", "k": "all", "stream": True}
            body["messages"] = [{"role": "user", "content": f"{text}\n\nWhat is due?"}]
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                assert process.stdout.readline() == "a block\n"
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                with suppress(httpx.TransportError):
                    response.read()
            process.wait(60)
            seconds = time.monotonic() - began
        assert process.returncode == 0
        # Of a loaded machine; without an end it would take minutes.
        assert seconds < 4 + 16
        listen("127.0.0.1", httpx.URL(url).port or 0).close()
        log = process.stderr.read() if process.stderr else ""
        # On a loaded machine, short pieces may need that, too.
        assert "ended before everything was closed" in log or pause < 1


def test_keys_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add_key(path, "ann")
    settings = ServerSettings(folder=tmp_path / "server", key_file=path)
    server = Server(create_app(settings), settings, lambda address: None)
    second = add_key(path, "ben")
    server.reload_keys()
    ring: KeyRing = server.app.state.keys
    assert ring.find(first) and ring.find(second)
    path.write_text("{")
    server.reload_keys()
    assert server.app.state.keys is ring


def test_memory_is_given_as_a_size(tmp_path: Path) -> None:
    def memory(size: Any) -> int | None:
        return ServerSettings(folder=tmp_path, memory=size).memory

    sizes = {"4GB": 4 * 10**9, "512MiB": 2**29, "1.5 GiB": 3 * 2**29, "700": 700}
    assert {size: memory(size) for size in sizes} == sizes
    for size in ("much", "0GB", "-1GB", "4XB", ""):
        with pytest.raises(ConfigError, match="memory is"):
            memory(size)


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

"""Which devices can be used; the lock of a GPU, with CUDA replaced by a record of its calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from sedem.engine import device as device_module
from sedem.engine.device import Clock, chosen_device, device_lock, synchronized_time
from sedem.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to CUDA in order; the current GPU is the first."""
    calls: list[str] = []

    @contextmanager
    def device(place: torch.device) -> Iterator[None]:
        calls.append(f"on {place}")
        yield
        calls.append(f"off {place}")

    def current_stream(place: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: calls.append(f"waited for {place}"))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(device_module, "_LOCKS", {})
    return calls


def waits(mine: str, other: str) -> bool:
    """Whether a thread that wants the lock of `other` waits while this one holds that of `mine`."""
    entered = Event()

    def enter() -> None:
        with device_lock(torch.device(other)):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with device_lock(torch.device(mine)):
            task = pool.submit(enter)
            went_in = entered.wait(0.2)
        task.result(10)
    return not went_in


def test_one_thread_at_a_time_has_a_gpu(gpus: list[str]) -> None:
    assert waits("cuda:0", "cuda:0")
    assert waits("cuda:0", "cuda")  # the current one, which is the first
    assert not waits("cuda:0", "cuda:1")


def test_the_lock_is_reentrant_and_makes_the_gpu_current(gpus: list[str]) -> None:
    first = torch.device("cuda:1")
    with device_lock(first), device_lock(first):
        assert gpus == ["on cuda:1", "on cuda:1"]
    assert gpus[2:] == ["off cuda:1", "off cuda:1"]


def test_an_error_releases_the_lock(gpus: list[str]) -> None:
    with pytest.raises(ValueError, match="inside"), device_lock(torch.device("cuda:0")):
        raise ValueError("inside")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(synchronized_time, torch.device("cuda:0")).result(10) > 0


def test_the_clock_is_read_under_the_lock_when_the_gpu_is_done(gpus: list[str]) -> None:
    place = torch.device("cuda:1")
    assert synchronized_time(place) <= synchronized_time(place)
    assert gpus == ["on cuda:1", "waited for cuda:1", "off cuda:1"] * 2


def test_laps_are_read_later_and_marks_never_wait(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorded:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = len(gpus)
            gpus.append("recorded")

        def synchronize(self) -> None:
            gpus.append("waited")

        def elapsed_time(self, later: Recorded) -> int:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    clock = Clock(torch.device("cuda:1"), since=time.perf_counter() - 5)
    clock.lap("first")
    clock.lap("second")
    clock.mark("read")
    assert gpus == ["on cuda:1", "recorded", "off cuda:1"] * 3
    assert clock.timings.pop("read") >= 5000
    assert clock.timings == {"first": 3, "second": 3}
    assert gpus[9:] == ["on cuda:1", "waited", "off cuda:1"] * 2


def test_the_laps_of_a_cpu_follow_one_another() -> None:
    clock = Clock(CPU, since=0.0)
    time.sleep(0.02)
    clock.lap("first")
    clock.lap("second")
    assert clock.timings["first"] >= 20 > clock.timings["second"] >= 0


def test_a_cpu_has_no_lock_and_nobody_waits(gpus: list[str]) -> None:
    assert not waits("cpu", "cpu")
    assert synchronized_time(CPU) <= synchronized_time(CPU)
    assert not gpus


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("toaster", "device is 'toaster'; it can be cpu or cuda"),
        ("mps", "device is 'mps'; it can be cpu or cuda"),
        ("meta", "device is 'meta'; it can be cpu or cuda"),
        ("cuda", "device is 'cuda'; this machine has no GPU, leave it out"),
    ],
)
def test_a_device_that_cannot_be_used_is_refused(
    name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        chosen_device(name)
    assert str(error.value) == sentence
    assert chosen_device(None) == chosen_device("cpu") == CPU


def test_a_gpu_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device(None) == torch.device("cuda")
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="the last GPU of this machine is cuda:1"):
        chosen_device("cuda:2")

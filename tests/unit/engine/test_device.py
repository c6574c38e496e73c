"""The lock of a GPU, with CUDA replaced by a record of its calls; a CPU needs no lock."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from sedem.engine import device as device_module
from sedem.engine.device import device_lock, synchronized_time

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


def test_a_cpu_has_no_lock_and_nobody_waits(gpus: list[str]) -> None:
    assert not waits("cpu", "cpu")
    assert synchronized_time(CPU) <= synchronized_time(CPU)
    assert not gpus

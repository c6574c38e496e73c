"""Which devices can be used; the lock of a GPU, with CUDA replaced by a record of its calls."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from threading import Event, Thread, get_native_id
from types import SimpleNamespace

import pytest
import torch

from sedem import Decoding, Document, MemoryBank, SeDeM
from sedem.engine import device as device_module
from sedem.engine.device import (
    NICE,
    PIECE,
    Clock,
    FairLock,
    between_pieces,
    chosen_device,
    device_lock,
    in_pieces,
    step_back,
    synchronized_time,
    watched,
)
from sedem.errors import ConfigError
from sedem.selecting.plan import Request

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


def test_the_clock_is_read_under_the_lock_when_the_gpu_is_done(gpus: list[str]) -> None:
    """The lock is reentrant and makes the GPU the current one."""
    place = torch.device("cuda:1")
    with device_lock(place):
        assert synchronized_time(place) <= synchronized_time(place)
    whole = ["on cuda:1", "waited for cuda:1", "off cuda:1"] * 2
    assert gpus == ["on cuda:1", *whole, "off cuda:1"]


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


def test_a_cpu_has_no_lock_and_nobody_waits(gpus: list[str]) -> None:
    assert not waits("cpu", "cpu")
    clock = Clock(CPU)
    time.sleep(0.02)
    clock.lap("first")
    clock.lap("second")
    assert clock.timings["first"] >= 20 > clock.timings["second"] >= 0
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


# Locks


def started(run: Callable[[], None]) -> Thread:
    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_one_thread_at_a_time_and_in_the_order_of_asking() -> None:
    lock, order = FairLock(), []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    threads = []
    with lock:
        for number in range(8):
            threads.append(started(lambda number=number: take(number)))
            wait_until(lambda number=number: len(lock._waiting) == number + 1)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == list(range(8))


def test_it_is_reentrant_and_let_go_once_also_by_an_error() -> None:
    lock, inside = FairLock(), Event()

    def take() -> None:
        with lock:
            inside.set()

    with pytest.raises(KeyError), lock:
        with lock, lock:
            pass
        thread = started(take)
        wait_until(lambda: lock._waiting)
        assert not inside.is_set()
        raise KeyError
    thread.join(10)
    assert inside.is_set()


def test_two_threads_that_ask_again_at_once_alternate() -> None:
    lock, turns = FairLock(), []

    def work(name: str) -> None:
        for _ in range(20):
            with lock:
                turns.append(name)
                wait_until(lambda: lock._waiting or len(turns) > 30)

    threads = [started(lambda name=name: work(name)) for name in "ab"]
    for thread in threads:
        thread.join(10)
    assert turns[:30] in (["a", "b"] * 15, ["b", "a"] * 15)


def test_long_pieces_leave_others_as_much_time_as_they_take() -> None:
    lock, steps, stop = FairLock(), [0], Event()

    def step() -> None:
        while not stop.is_set():
            with lock:
                time.sleep(0.001)
                steps[0] += 1

    thread = started(step)
    wait_until(lambda: steps[0])
    between = []
    for _ in range(5):
        with lock.in_turns():
            between.append(steps[0])
            with lock:
                time.sleep(0.05)
    stop.set()
    thread.join(10)
    # Strictly in turn, there would be one step after each piece of 50.
    assert all(after - before > 5 for before, after in pairwise(between))


def test_long_pieces_do_not_wait_for_others_that_do_nothing() -> None:
    lock = FairLock()
    began = time.perf_counter()
    for _ in range(4):
        with lock.in_turns(), lock:
            time.sleep(0.05)
            # Somebody asks once, and no more.
            thread = started(lambda: lock.__enter__() or lock.__exit__())
            wait_until(lambda: lock._waiting)
        thread.join(10)
    assert time.perf_counter() - began < 4 * 0.09


def test_a_waiter_that_is_interrupted_passes_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        """A lock whose second acquisition is interrupted, as by Ctrl-C."""

        def __init__(self) -> None:
            self.times = 0

        def acquire(self) -> None:
            self.times += 1
            if self.times == 2:
                raise KeyboardInterrupt

        def release(self) -> None:
            pass

    lock = FairLock()
    held, done = Event(), Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(10)

    thread = started(hold)
    held.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr("sedem.engine.device.Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.__enter__()
    assert not lock._waiting
    done.set()
    thread.join(10)
    with lock:
        pass


def test_reading_while_answering_changes_no_answer(
    model: SeDeM, bank: MemoryBank, documents: list[Document]
) -> None:
    """The reference engine reads with adapters off, in the modules that answer with them on."""
    model.decoder.add_lora(4, 64)
    for parameter in model.decoder.lora_parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    decoding, request = Decoding(24), Request(bank, "When is the rent due?")
    memory = model.read(documents).memory(range(len(bank)))
    expected = model.answer_requests([request], decoding)[0]
    stop, differing = Event(), []

    def read() -> None:
        while not stop.is_set():
            again = model.read(documents).memory(range(len(bank)))
            differing.append(not torch.equal(again, memory))

    thread = started(read)
    try:
        with model.scheduler(rows=2) as scheduler:
            replies = [scheduler.submit(request, decoding) for _ in range(6)]
            answers = [reply.result() for reply in replies]
    finally:
        stop.set()
        thread.join(30)
    assert {answer.text for answer in answers} == {expected.text}
    assert differing and not any(differing)


# Work that is watched between its pieces


def test_work_is_watched_between_pieces_unless_others_wait_for_its_lock() -> None:
    seen, lock = list[tuple[int, int]](), FairLock()
    between_pieces(1, 3)
    with watched(lambda done, total: seen.append((done, total))):
        between_pieces(2, 3)
        with lock, lock:
            between_pieces(9, 9)
        started(lambda: between_pieces(9, 9)).join(10)
        pieces = [*in_pieces(range(2 * PIECE + 1))]
        assert [one for piece in pieces for one in piece] == [*range(2 * PIECE + 1)]
        between_pieces()
    between_pieces(3, 3)
    assert seen == [(2, 3), (0, 0), (0, 0), (0, 0)]


def test_an_error_of_the_watch_ends_the_work() -> None:
    def watch(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), watched(watch):
        between_pieces()
    between_pieces()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority of each thread")
def test_a_thread_that_steps_back_leaves_the_priority_of_others() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, get_native_id())

    mine, theirs = priority(), list[int]()
    started(lambda: (step_back(), theirs.append(priority()))).join(10)
    assert theirs == [min(19, mine + NICE)]
    assert priority() == mine

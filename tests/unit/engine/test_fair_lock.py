from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from threading import Event, Thread

import pytest
import torch

from sedem import Decoding, Document, MemoryBank, SeDeM
from sedem.answering.requests import Request
from sedem.engine.fair_lock import FairLock


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


def test_it_is_reentrant_and_let_go_once() -> None:
    lock, inside = FairLock(), Event()

    def take() -> None:
        with lock:
            inside.set()

    with lock:
        with lock, lock:
            pass
        thread = started(take)
        wait_until(lambda: lock._waiting)
        assert not inside.is_set()
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


def test_an_error_lets_it_go() -> None:
    lock = FairLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    thread = started(lambda: lock.__enter__())
    thread.join(10)
    assert not thread.is_alive()


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
        patch.setattr("sedem.engine.fair_lock.Lock", Interrupted)
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

"""A lock that threads get in the order in which they requested it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

IDLE_SECONDS = 0.01
"""A lock that stays free for this long is not needed by others; answer steps follow faster."""
POLL_SECONDS = 0.001


class FairLock:
    """A reentrant lock that is handed over to the thread that has waited longest.

    Python's own locks go to any running thread. A thread that reads documents releases its lock and
    takes it again at once, so a thread that answers would get it late or never. With this lock they
    alternate: an answer waits for at most one batch of segments before each token.

    A batch takes as long as many tokens, so work in long pieces uses `in_turns`: after a piece that
    made others wait, they have the lock for as long as the piece took.
    """

    def __init__(self) -> None:
        # Held only for moments without allocation: the garbage collector could otherwise run there
        # and drop an answer, whose end takes this lock too.
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Lock]] = deque()
        # Total seconds the lock was held, and the times of the last acquire and release.
        self._held = 0.0
        self._since = self._free_since = time.perf_counter()
        self._owed: dict[int, float] = {}

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner == me:
            self._depth += 1
            return
        turn = Lock()
        turn.acquire()
        waiter = (me, turn)
        with self._guard:
            if self._owner is None:
                self._owner, self._depth = me, 1
                self._since = time.perf_counter()
                return
            self._waiting.append(waiter)
        try:
            turn.acquire()
        except BaseException:
            # For example Ctrl-C in the main thread; the lock may already be handed over.
            with self._guard:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                else:
                    self._hand_over()
            raise

    def __exit__(self, *error: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the lock to the thread that has waited longest; the caller holds the guard."""
        self._owner, self._depth = None, 0
        self._free_since = now = time.perf_counter()
        self._held += now - self._since
        self._since = now
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Surround one long piece of work, in which this lock is taken.

        It first waits until others have had the lock for as long as the last piece took, or do not
        need it.
        """
        me = get_ident()
        enough = self._held + self._owed.pop(me, 0.0)
        while self._held < enough and not self._is_idle():
            time.sleep(POLL_SECONDS)
        began = time.perf_counter()
        yield
        if self._owner is not None:
            self._owed[me] = time.perf_counter() - began

    def _is_idle(self) -> bool:
        return self._owner is None and time.perf_counter() - self._free_since > IDLE_SECONDS

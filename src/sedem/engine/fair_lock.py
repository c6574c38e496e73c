"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident


class FairLock:
    """A reentrant lock that is handed over: whoever waits longest has it next.

    Python's own locks go to whoever is awake. A thread that reads documents gives its lock back
    and takes it again at once, so a thread that answers would get it late or never. With this one
    they alternate: an answer waits for at most one batch of segments before each token.
    """

    def __init__(self) -> None:
        # Held for moments in which nothing is allocated: the garbage collector could otherwise
        # run there and drop an answer, whose end takes this lock too.
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Lock]] = deque()

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
                return
            self._waiting.append(waiter)
        try:
            turn.acquire()
        except BaseException:
            # Such as Ctrl-C in the main thread; the lock may have been handed over already.
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
        """Give the lock to the thread that waits longest; the guard is held."""
        self._owner, self._depth = None, 0
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()

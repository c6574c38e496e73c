"""An engine that fails in the middle of its work.

`python -m load.failures serve ...` is `sedem serve` whose engine fails when a signal says so.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from campaign import Result
from load.client import PATH, ask, bodies, clients
from load.target import SIGNALS, Target
from torch import Tensor

from sedem import SeDeM
from sedem.cli.main import app
from sedem.engine.interface import Engine, Rows

KINDS = ("step", "prefill")
AT_ONCE = 8


async def failures(target: Target, points: int, seed: int) -> Result:
    """Let the engine fail, in the steps and prefills of one question and of several at once."""
    result, questions, chance = Result("failures"), bodies(target, seed), random.Random(seed)
    # Sampled, so that its first token does not end it: a step always comes.
    sampled = {"temperature": 2.0, "seed": 1}
    async with clients(target) as client:
        for number in range(points):
            kind, together = KINDS[number % 2], number // 2 % 2 == 1
            name = f"{kind}, {f'{AT_ONCE} questions' if together else '1 question'}"
            with result.case(name, f"failure {number}"):
                if together:
                    # Each of several questions is answered, or told that the engine failed.
                    asking = [
                        asyncio.create_task(ask(client, next(questions))) for _ in range(AT_ONCE)
                    ]
                    await asyncio.sleep(chance.random())
                    target.fail(kind)
                    for reply in await asyncio.gather(*asking):
                        said = reply.status == 200 and "the engine failed" in (reply.error or "")
                        told = reply.status == 503 or said
                        assert reply.answered or told, f"{reply.status} {reply.error}"
                        result.count("answered beside it" if reply.answered else "told of it")
                    # The failure may still be to come, if all had been answered.
                    await ask(client, next(questions) | sampled)
                else:
                    # A question that is not streamed gets 503.
                    target.fail(kind)
                    body = next(questions) | sampled | {"stream": False}
                    answer = await client.post(PATH, json=body)
                    assert answer.status_code == 503, f"{answer.status_code}: {answer.text}"
                    assert answer.headers.get("retry-after"), "a 503 came without Retry-After"
                    error = answer.json()["error"]
                    assert error["code"] == "unavailable", f"the error says {error}"
                after = await ask(client, next(questions))
                assert after.answered, f"the next request failed: {after.status} {after.error}"
    return result


# The server's process


class Fuse:
    """What is to fail next, a "step" or a "prefill"; nothing at first."""

    def __init__(self) -> None:
        self.armed: set[str] = set()

    def fail(self, what: str) -> None:
        """Let the next one fail."""
        self.armed.add(what)

    def check(self, what: str) -> None:
        """Fail if this is what was to fail."""
        if what in self.armed:
            self.armed.remove(what)
            raise RuntimeError(f"this {what} was made to fail")


class FailingRows:
    """Rows of an engine that fail once the fuse is armed."""

    def __init__(self, rows: Rows, fuse: Fuse) -> None:
        self._rows, self._fuse = rows, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def join(self, *arguments: Any) -> Tensor:
        self._fuse.check("prefill")
        return self._rows.join(*arguments)

    def step(self, ids_B: Tensor) -> Tensor:
        self._fuse.check("step")
        return self._rows.step(ids_B)


def make_failing(engine: Engine, fuse: Fuse) -> None:
    """Let an engine fail as a fuse says."""
    opened = engine.open_rows

    @contextmanager
    def open_rows(count: int) -> Iterator[FailingRows]:
        with opened(count) as rows:
            yield FailingRows(rows, fuse)

    engine.open_rows = open_rows  # type: ignore[method-assign]


def main() -> None:
    """Run the command line; every model that it opens can fail."""
    fuse, opened = Fuse(), SeDeM.from_pretrained

    def open_failing(*arguments: Any, **settings: Any) -> SeDeM:
        model = opened(*arguments, **settings)
        make_failing(model.engine, fuse)
        return model

    SeDeM.from_pretrained = open_failing  # type: ignore[method-assign, assignment]
    for what, number in SIGNALS.items():
        signal.signal(number, lambda *_, what=what: fuse.fail(what))  # type: ignore[misc]
    app()


if __name__ == "__main__":
    main()

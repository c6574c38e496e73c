"""The classes whose replicas Ray Serve runs: the HTTP application, engines and selectors.

Errors are sent as values: Ray would send their stack trace instead of their message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from torch import Tensor

from sedem.answering.reply import Event, failure
from sedem.errors import SedemError
from sedem.scale.answering import Asked, EngineReplica
from sedem.scale.distributed import AskPart, Distributed, fetch
from sedem.scale.partitions import Found
from sedem.scale.selecting import PartSelector, Wanted
from sedem.scale.versions import Version
from sedem.serve import logs
from sedem.serve.app import create_app
from sedem.serve.keys import KeyRing
from sedem.serve.service import open_model
from sedem.serve.settings import Settings

if TYPE_CHECKING:
    from sedem.model import SeDeM

T = TypeVar("T")
POLL_SECONDS = 0.1


class SelectorReplica:
    """One part of each bank; see `PartSelector`.

    Args:
        settings: the server's settings, which name the model.
        part: index of the part, from 0.
        parts: number of parts.
    """

    def __init__(self, settings: Settings, part: int, parts: int) -> None:
        # Nothing else of the model is kept.
        self._selector = PartSelector(open_model(settings).selector, part, parts, fetch)

    async def prepare(self, version: Version) -> SedemError | None:
        """Make the keys of this part of a version; returns an error if it cannot."""
        return await _value(self._selector.prepare, version)

    async def find(self, wanted: Wanted) -> Found | SedemError:
        """Return the best blocks of this part, or an error."""
        return await _value(self._selector.find, wanted)


class EnginesReplica:
    """One engine; see `EngineReplica`.

    Args:
        settings: the server's settings.
        parts: handles of the selectors' deployments.
    """

    def __init__(self, settings: Settings, *parts: Any) -> None:
        self._engine = EngineReplica(
            open_model(settings),
            [AskPart(part) for part in parts],
            fetch,
            rows=settings.rows,
            waiting=settings.waiting,
        )

    async def prepare(self, version: Version) -> SedemError | None:
        """Open a version; returns an error if it cannot be opened."""
        return await _value(self._engine.prepare, version)

    async def events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """Answer a question; yields what `EngineReplica.events` does."""
        async for event in self._engine.events(asked):
            yield event

    async def scores(self, version: Version, question: str) -> Tensor | SedemError:
        """Return the score of every block `[N]`, or an error."""
        try:
            return await self._engine.scores(version, question)
        except Exception as error:
            return failure(error)


class Ingress:
    """The HTTP application, whose questions are answered by the other replicas.

    Args:
        settings: the server's settings.
        keys: the accepted API keys.
        engines: number of engines.
        handles: handles of the engines' deployment, then of the selectors' deployments.
    """

    def __init__(self, settings: Settings, keys: KeyRing, engines: int, *handles: Any) -> None:
        self._settings, self._keys = settings, keys
        self._engines, self._handles = engines, handles

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Make the application; the model is opened in the background."""
        logs.configure(self._settings.log_format, log_text=self._settings.log_text)
        self._app = create_app(self._settings, keys=self._keys, open_answerer=self._answerer)
        return self._app

    async def opened(self) -> SedemError | None:
        """Wait until questions can be answered; returns an error if they cannot."""
        lifecycle = self._app.state.lifecycle
        while lifecycle.service is None and lifecycle.failed is None:
            await asyncio.sleep(POLL_SECONDS)
        return None if lifecycle.failed is None else failure(lifecycle.failed)

    async def change_keys(self, keys: KeyRing) -> None:
        """Use other keys from now on."""
        self._app.state.keys = keys

    def _answerer(self, settings: Settings, model: SeDeM) -> Distributed:
        rows = (settings.rows or model.engine.batch_size) * self._engines
        engines, *parts = self._handles
        return Distributed(engines, parts, rows=rows, waiting=settings.waiting * self._engines)


async def _value(work: Callable[..., T], *arguments: Any) -> T | SedemError:
    """Return the result of a method, or its error."""
    try:
        return await asyncio.to_thread(partial(work, *arguments))
    except Exception as error:
        return failure(error)

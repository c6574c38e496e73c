"""What the routes share: the open model, its scheduler and its banks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from sedem.serve.errors import unavailable
from sedem.serve.metrics import Metrics
from sedem.serve.settings import Settings

if TYPE_CHECKING:
    from sedem.model import SeDeM
    from sedem.serve.answerer import Answerer
    from sedem.serve.building import Builder
    from sedem.serve.library import Library
    from sedem.serve.online import OnlineBanks


@dataclass
class Service:
    """Everything that answers require.

    Attributes:
        settings: the server's settings.
        model: the model.
        scheduler: answers questions, here or on other machines.
        library: banks and files on disk.
        online: temporary banks of texts that came with questions.
        metrics: the server's metrics.
        builder: reads uploaded files into banks.
    """

    settings: Settings
    model: SeDeM
    scheduler: Answerer
    library: Library
    online: OnlineBanks
    metrics: Metrics
    builder: Builder


@dataclass
class Lifecycle:
    """The stage of the server between its start and its end.

    Attributes:
        service: None until the model is open.
        draining: whether the server is shutting down: it finishes answers and starts none.
        in_flight: requests that change or answer something and are being served.
        failed: why the model could not be opened.
    """

    service: Service | None = None
    draining: bool = False
    in_flight: int = 0
    failed: Exception | None = None

    def reason(self) -> str | None:
        """Why the server cannot serve now; None if it can."""
        if self.draining:
            return "the server is shutting down; ask again in a moment"
        if self.service is None:
            return "the server is opening its model; ask again in a moment"
        return None


def lifecycle_of(connection: HTTPConnection) -> Lifecycle:
    """Return the state of the server of a request."""
    lifecycle: Lifecycle = connection.app.state.lifecycle
    return lifecycle


async def service_of(connection: HTTPConnection) -> Service:
    """Return the service of a request; a dependency of routes.

    It is a coroutine, like `key_of`: FastAPI runs plain functions in a thread, which costs more
    than refusing a request.

    Raises:
        ApiError: 503, the model is not open yet or the server is shutting down.
    """
    lifecycle = lifecycle_of(connection)
    reason = lifecycle.reason()
    if reason is not None or lifecycle.service is None:
        raise unavailable(reason or "the server is not ready", retry_after=5)
    return lifecycle.service

"""The HTTP application: routes behind a guard, errors in OpenAI's format, health and metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from sedem.errors import cut
from sedem_serve.server import banks, openai, pages, shapes
from sedem_serve.server.body_limit import BodyLimit
from sedem_serve.server.errors import ApiError, bad_request
from sedem_serve.server.guard import Guard, Owner
from sedem_serve.server.keys import KeyRing, keys_of
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.observe import Observe, OpenTelemetry
from sedem_serve.server.service import Lifecycle, OneMachine, OpenAnswerer, lifecycle_of, lifespan
from sedem_serve.server.settings import ServerSettings
from sedem_serve.server.tools import add_tools

if TYPE_CHECKING:
    from sedem.model import SeDeM

router = APIRouter(tags=["server"])


def create_app(
    settings: ServerSettings,
    model: SeDeM | None = None,
    *,
    keys: KeyRing | None = None,
    open_answerer: OpenAnswerer = OneMachine,
) -> FastAPI:
    """Make the application; the model is opened when the server starts.

    Args:
        model: the model, if it is open already.
        keys: the accepted API keys; None means those that `keys_of` finds.
        open_answerer: opens the answerer, on this machine or on others.

    Raises:
        ConfigError: the keys cannot be read, or telemetry is not installed.
    """
    tracer = OpenTelemetry() if settings.telemetry else None
    metrics = Metrics(tracer.answered if tracer else None)
    # FastAPI's documentation pages would load scripts from other sites.
    app = FastAPI(
        title="sedem", version=version("sedem"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.settings, app.state.model = settings, model
    app.state.on_failure = lambda: None  # called if the model cannot be opened; lifecycle has why
    app.state.metrics, app.state.tracer = metrics, tracer
    app.state.open_answerer = open_answerer
    app.state.keys = keys or keys_of(settings.key_file)[0]
    app.state.lifecycle = Lifecycle()
    for routes in (router, openai.router, banks.router, pages.router):
        app.include_router(routes)
    add_tools(app, settings)
    # The middleware that is added last sees a request first.
    app.add_middleware(
        BodyLimit, metrics=metrics, body=settings.max_body_bytes, upload=settings.max_file_bytes
    )
    app.add_middleware(Guard, metrics=metrics)
    app.add_middleware(Observe, metrics=metrics, lifecycle=app.state.lifecycle, tracer=tracer)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _rejected)
    return app


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the process serves requests; the only route that needs no key."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """200 if questions are answered now; 503 while the model opens or the server shuts down."""
    lifecycle_of(request).ready()
    return {"status": "ready"}


@router.get("/metrics")
def metrics(request: Request, key: Owner) -> Response:
    """Figures of the server in Prometheus' text format; they cover the requests of all keys."""
    if not key.metrics:
        raise ApiError(
            403,
            f"key '{key.name}' may not read metrics; use a key with \"metrics\": true",
            code="no_metrics",
        )
    figures: Metrics = request.app.state.metrics
    return Response(figures.text(), media_type=CONTENT_TYPE_LATEST)


def _invalid(request: Request, error: Exception) -> Response:
    """Answer a request whose fields are invalid, without quoting their values."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(step) for step in first["loc"][1:] if not isinstance(step, int)) or None
    problem = str(first["msg"])
    match first["type"]:
        case "json_invalid":
            told = bad_request("the body is not JSON")
        case "extra_forbidden":
            message = f"'{place}' is not a field of this request; leave it out"
            told = bad_request(message, place, "unknown_field")
        case shapes.UNSUPPORTED:
            told = bad_request(f"'{place}' {problem}", place, shapes.UNSUPPORTED)
        case _:
            problem = problem[:1].lower() + problem[1:]
            told = bad_request(f"'{place or 'the body'}' is not valid: {problem}", place)
    return told.response()


def _rejected(request: Request, error: Exception) -> Response:
    """Answer a request that no route handles."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = cut(request.scope["path"])
        return ApiError(404, f"there is no route {request.method} {path}").response()
    headers = dict(error.headers or {})
    return ApiError(error.status_code, str(error.detail).lower(), headers=headers).response()

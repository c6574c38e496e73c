"""Health, readiness and metrics of the server."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sedem.serve.errors import forbidden, unavailable
from sedem.serve.guard import key_of
from sedem.serve.keys import Key
from sedem.serve.metrics import Metrics
from sedem.serve.service import lifecycle_of

router = APIRouter(tags=["server"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether the process serves requests; the only route that needs no key."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 if questions are answered now; 503 while the model opens or the server shuts down."""
    if (reason := lifecycle_of(request).reason()) is not None:
        raise unavailable(reason)
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
def metrics(request: Request, key: Annotated[Key, Depends(key_of)]) -> Response:
    """Figures of the server in Prometheus' text format; they cover the requests of all keys."""
    if not key.metrics:
        raise forbidden(
            f"key '{key.name}' may not read metrics; use a key with \"metrics\": true",
            "no_metrics",
        )
    figures: Metrics = request.app.state.metrics
    return Response(figures.text(), media_type=CONTENT_TYPE_LATEST)

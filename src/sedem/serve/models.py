"""GET /v1/models: the model, and the model with each bank."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from sedem.serve.asking import SEPARATOR
from sedem.serve.errors import not_found
from sedem.serve.guard import key_of
from sedem.serve.keys import Key
from sedem.serve.service import Service, service_of

router = APIRouter()
UNKNOWN_TIME = 0
"""Creation time of the model, which no checkpoint records."""


@router.get("/v1/models")
def list_models(
    service: Annotated[Service, Depends(service_of)], key: Annotated[Key, Depends(key_of)]
) -> dict[str, Any]:
    """List the model, and the model with each bank that the key knows."""
    return {"object": "list", "data": _models(service, key)}


@router.get("/v1/models/{model:path}")
def get_model(
    model: str,
    service: Annotated[Service, Depends(service_of)],
    key: Annotated[Key, Depends(key_of)],
) -> dict[str, Any]:
    """Return one of them."""
    for entry in _models(service, key):
        if entry["id"] == model:
            return entry
    raise not_found(f"there is no model '{model[:100]}'", "model", "model_not_found")


def _models(service: Service, key: Key) -> list[dict[str, Any]]:
    name, config = service.model.name, service.model.config
    defaults = {
        "k": config.k,
        "condition": config.condition,
        "confidence": service.model.confidence is not None,
    }
    entries = [(name, UNKNOWN_TIME, None)] + [
        (f"{name}{SEPARATOR}{bank}", service.library.get(bank).created_at, bank)
        for bank in service.library.names(key)
    ]
    return [
        {
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "sedem",
            "sedem": {**defaults, "bank": bank},
        }
        for id, created, bank in entries
    ]

"""Uploads, and waiting for what the server does with them in the background."""

from __future__ import annotations

import time
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from fastapi.testclient import TestClient

from sedem.serve.building import Builder
from sedem.serve.library import Library

SECONDS = 240.0


def read_all(client: TestClient, bank: str) -> dict[str, Any]:
    """Wait until all files of a bank were read; its progress then."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        progress: dict[str, Any] = client.get(f"/v1/banks/{bank}/progress").json()
        if progress["status"] != "building":
            return progress
        time.sleep(0.02)
    raise AssertionError(f"{bank} is still being read: {progress}")


def upload(library: Library, bank: str, texts: Mapping[str, str]) -> None:
    """What the route does with files, given by their names."""
    with library.uploads.stored([BytesIO(text.encode()) for text in texts.values()]) as paths:
        library.upload(bank, dict(zip(texts, paths, strict=True)))


def finish(builder: Builder) -> None:
    """Do all the work that there is."""
    while builder.turn():
        pass

"""Waiting for what the server does in the background."""

from __future__ import annotations

import time
from typing import Any

from fastapi.testclient import TestClient

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

"""Secrets of the servers that tests start."""

from __future__ import annotations

SECRET = "sedem-secret-of-the-tests"
READER = "sedem-secret-of-a-reader"
SCOPED = "sedem-secret-of-one-bank"
"""Secrets of a key that may do everything, one that may only ask, and one of banks `mine-*`."""


def bearer(secret: str) -> dict[str, str]:
    """Headers with a key."""
    return {"Authorization": f"Bearer {secret}"}

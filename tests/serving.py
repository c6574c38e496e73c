"""Secrets and keys of the servers that tests start."""

from __future__ import annotations

from sedem_serve.server.keys import Key, KeyRing, digest_of

SECRET = "sedem-secret-of-the-tests"
READER = "sedem-secret-of-a-reader"
SCOPED = "sedem-secret-of-one-bank"
"""Secrets of a key that may do everything, one that may only ask, and one of banks `mine-*`."""
KEYS = KeyRing(
    [
        Key(name="admin", sha256=digest_of(SECRET), write=True, metrics=True),
        Key(name="reader", sha256=digest_of(READER)),
        Key(name="scoped", sha256=digest_of(SCOPED), banks=("mine-*",), write=True),
    ]
)


def bearer(secret: str) -> dict[str, str]:
    """Headers with a key."""
    return {"Authorization": f"Bearer {secret}"}

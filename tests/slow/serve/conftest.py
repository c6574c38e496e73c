"""The fixtures of tests/unit/server."""

from unit.server.conftest import settings

__all__ = ["settings"]

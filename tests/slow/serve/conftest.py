"""The fixtures of tests/unit/serve."""

from unit.serve.conftest import settings

__all__ = ["settings"]

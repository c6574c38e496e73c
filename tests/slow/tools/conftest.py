"""The fixtures of tests/unit/tools."""

from unit.tools.conftest import lease

__all__ = ["lease"]

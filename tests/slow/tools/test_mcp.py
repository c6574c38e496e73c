"""No call, whatever its arguments, puts a traceback on the wire."""

from __future__ import annotations

import pytest
from unit.tools.test_mcp import backend, fuzz, in_a_loop

from sedem_serve.tools.mcp import LocalBackend

pytestmark = pytest.mark.slow
__all__ = ["backend"]


@in_a_loop
async def test_ten_thousand_arbitrary_calls(backend: LocalBackend) -> None:
    await fuzz(backend, 1, 10_000)

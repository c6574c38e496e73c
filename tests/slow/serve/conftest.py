"""The fixtures of tests/unit/serve."""

from unit.serve.conftest import anonymous, app, client, make_client, settings

__all__ = ["anonymous", "app", "client", "make_client", "settings"]

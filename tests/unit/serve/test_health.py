from __future__ import annotations

from fastapi.testclient import TestClient


def test_health_needs_no_key_and_ready_does(client: TestClient, anonymous: TestClient) -> None:
    assert anonymous.get("/health").json() == {"status": "ok"}
    assert anonymous.get("/ready").status_code == 401
    assert client.get("/ready").json() == {"status": "ready"}

"""The list of models: the model, and the model with each bank that a key knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serving import SCOPED, SECRET, bearer

from sedem import MemoryBank


@pytest.fixture
def client(make_client: Callable[..., TestClient], bank: MemoryBank, tmp_path: Path) -> TestClient:
    paths = {name: tmp_path / f"{name}.bank" for name in ("lease", "mine-1")}
    for path in paths.values():
        bank.save(path)
    return make_client(banks=paths)


def test_a_key_sees_the_model_with_its_banks(client: TestClient) -> None:
    for secret, banks in ((SECRET, ["lease", "mine-1"]), (SCOPED, ["mine-1"])):
        body = client.get("/v1/models", headers=bearer(secret)).json()
        assert body["object"] == "list"
        ids = [model["id"] for model in body["data"]]
        assert ids == ["sedem", *(f"sedem@{bank}" for bank in banks)]
        assert [model["sedem"]["bank"] for model in body["data"]] == [None, *banks]
        assert body["data"][0]["sedem"]["k"] == 2 and not body["data"][0]["sedem"]["confidence"]


def test_one_model_is_described_and_others_do_not_exist(client: TestClient) -> None:
    assert client.get("/v1/models/sedem@lease").json()["id"] == "sedem@lease"
    for name, secret in (("gpt-4", SECRET), ("sedem@lease", SCOPED), ("a/b", SECRET)):
        response = client.get(f"/v1/models/{name}", headers=bearer(secret))
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_a_bank_out_of_scope_is_as_one_that_is_not_there(client: TestClient) -> None:
    def ask(bank: str) -> tuple[int, str]:
        body = {"model": f"sedem@{bank}", "messages": [{"role": "user", "content": "Who?"}]}
        response = client.post("/v1/chat/completions", json=body, headers=bearer(SCOPED))
        return response.status_code, response.text.replace(bank, "NAME")

    assert ask("lease") == ask("other") and ask("lease")[0] == 404
    assert ask("mine-1")[0] == 200

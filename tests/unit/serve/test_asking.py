"""Banks that clients made: what can be asked, by which names, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from answers import RENT
from conftest import LEASE, RECIPE
from fastapi.testclient import TestClient
from unit.serve.waiting import read_all

from sedem import SeDeM
from sedem.serve.asking import decoding_of
from sedem.serve.settings import Settings
from sedem.serve.shapes import ChatBody


def asked(client: TestClient, **fields: Any) -> tuple[int, dict[str, Any]]:
    messages = [{"role": "user", "content": RENT}]
    body = {"model": "sedem@mine", "messages": messages, "max_tokens": 4, **fields}
    response = client.post("/v1/chat/completions", json=body)
    return response.status_code, response.json()


def test_a_bank_is_asked_once_something_was_read(client: TestClient) -> None:
    empty = {"file": ("empty.txt", b" ")}
    assert client.post("/v1/banks/mine/documents", files=empty).status_code == 202
    assert read_all(client, "mine")["status"] == "failed"
    status, body = asked(client)
    assert (status, body["error"]["code"]) == (409, "bank_empty")
    files = [("file", ("lease.txt", LEASE)), ("file", ("recipe.txt", RECIPE))]
    assert client.post("/v1/banks/mine/documents", files=files).status_code == 202
    assert read_all(client, "mine")["status"] == "ready"
    status, body = asked(client, k=3)
    assert status == 200 and len(body["sedem"]["citations"]) == 3
    _, body = asked(client, k=9, documents=["lease.txt"])
    annotation = body["choices"][0]["message"]["annotations"][0]["file_citation"]
    assert annotation == {"file_id": "lease.txt", "filename": "lease.txt", "index": 0}


def test_sampling_differs_unless_a_seed_is_given(settings: Settings) -> None:
    def seed(**fields: Any) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "Who?"}], **fields}
        return decoding_of(ChatBody.model_validate(body), settings).seed

    assert seed() != seed()
    assert seed(seed=5) == 5
    assert 0 <= seed(seed=-5) == 2**63 - 5


def test_the_default_limit_is_within_the_servers(settings: Settings, model: SeDeM) -> None:
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "?"}]})
    assert decoding_of(body, settings).max_new_tokens == 64
    assert decoding_of(body, settings.with_changes(max_tokens=9)).max_new_tokens == 9


@pytest.mark.parametrize("log_text", [True, False])
def test_questions_and_answers_are_logged_if_asked_for(
    log_text: bool, make_client: Callable[..., TestClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(log_text=log_text)
    content = f"{LEASE}\n\n{RENT}"
    with caplog.at_level("INFO", "sedem.serve"):
        status, _ = asked(client, model="sedem", messages=[{"role": "user", "content": content}])
    assert status == 200
    logged = [record.fields for record in caplog.records if record.message == "answered"]  # type: ignore[attr-defined]
    assert [fields["question"] for fields in logged] == ([RENT] if log_text else [])

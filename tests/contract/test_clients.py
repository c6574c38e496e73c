"""What usual clients send by default gets an answer, or one sentence that says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import RENT
from conftest import LEASE, RECIPE
from fastapi.testclient import TestClient
from serving import KEYS, SECRET, bearer

from sedem import Document, SeDeM
from sedem_serve.server.app import create_app
from sedem_serve.server.settings import ServerSettings

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = json.loads((FIXTURES / "client-requests.json").read_text())
ANSWERED = [one for one in RECORDED if "refused" not in one]
REFUSED = [one for one in RECORDED if "refused" in one]


def name(one: dict[str, Any]) -> str:
    return f"{one['client']}: {one['case']}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("server")
    model = SeDeM.from_pretrained("sedem-nano")
    # A quotation ignores more options.
    model.config = model.config.model_copy(update={"answer": "free"})
    bank = model.read([Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)])
    bank.save(folder / "lease.bank")
    banks = {"lease": folder / "lease.bank"}
    settings = ServerSettings(
        folder=folder / "own", banks=banks, max_tokens=8
    )  # answers are cut short
    app = create_app(settings, model, keys=KEYS)
    with TestClient(app, headers=bearer(SECRET)) as one:
        yield one


def chunks_of(client: TestClient, one: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    response = client.post(one["route"], json={**one["body"], "stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts_of(one: dict[str, Any], chunks: list[dict[str, Any]]) -> list[str]:
    """The text of each choice of a stream, whose every chunk has the form that clients expect."""
    if one["route"] == "/v1/responses":
        return ["".join(c["delta"] for c in chunks if c["type"] == "response.output_text.delta")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [""] * one["body"].get("n", 1)
    for choice in choices:
        if one["route"] == "/v1/completions":
            texts[choice["index"]] += choice["text"]
        else:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert [c["index"] for c in choices if c["finish_reason"]] == [*range(len(texts))]
    wants_usage = one["body"].get("stream_options", {}).get("include_usage", False)
    assert [not chunk["choices"] for chunk in chunks if "usage" in chunk] == [True] * wants_usage
    return texts


@pytest.mark.parametrize("one", ANSWERED, ids=name)
def test_what_clients_send_is_answered_streamed_or_not(
    client: TestClient, one: dict[str, Any]
) -> None:
    response = client.post(one["route"], json={**one["body"], "stream": False})
    assert response.status_code == 200, response.text
    body, chunks = response.json(), chunks_of(client, one)
    if one["route"] == "/v1/responses":
        texts, last = [body["output"][0]["content"][0]["text"]], chunks[-1]["response"]
    else:
        texts = [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]
        (last,) = [c for c in chunks if "ignored" in c.get("sedem", {})][-1:]
    assert len(texts) == one["body"].get("n", 1) and all(texts)
    for details in (body["sedem"], last["sedem"]):
        assert details["ignored"] == one["ignored"]
        assert details["question"] == one.get("question", "")
    streamed = texts_of(one, chunks)
    assert all(streamed)
    greedy = not one["body"].get("temperature")
    if greedy or one["body"].get("seed") is not None:
        assert streamed == texts
    if "reply" in one:
        assert texts == streamed == [one["reply"]]
        assert body["sedem"]["citations"] == [] and body["usage"]["completion_tokens"] == 0
    else:
        assert any("The rent is 900 euros" in c["text"] for c in body["sedem"]["citations"])
        assert "900" in texts[0] or not greedy or one["question"] != RENT


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("one", REFUSED, ids=name)
def test_what_would_be_another_answer_is_rejected_in_one_sentence(
    client: TestClient, one: dict[str, Any], streamed: bool
) -> None:
    response = client.post(one["route"], json={**one["body"], "stream": streamed})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, one["refused"])
    assert error["code"] == "unsupported_field" and "leave" in error["message"]
    assert ". " not in error["message"]

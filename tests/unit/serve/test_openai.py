"""Chat completions: the same answer and citations in one piece and streamed, within limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import RENT
from conftest import LEASE, RECIPE
from fastapi.testclient import TestClient

from sedem import Decoding, MemoryBank, SeDeM

CHAT = "/v1/chat/completions"
LONG_LEASE = f"{LEASE} {LEASE}"


def asks(question: str = RENT, **fields: Any) -> dict[str, Any]:
    """The body of a question to the bank `lease`."""
    messages = [{"role": "user", "content": question}]
    return {"model": "sedem@lease", "messages": messages, "max_tokens": 8, **fields}


def error_of(client: TestClient, body: Any, status: int) -> dict[str, Any]:
    response = client.post(CHAT, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return dict(error)


def events_of(client: TestClient, body: Any) -> list[dict[str, Any]]:
    response = client.post(CHAT, json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, empty = response.text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture
def lease(bank: MemoryBank, tmp_path: Path) -> Path:
    """A bank of two documents on disk."""
    bank.save(tmp_path / "lease.bank")
    return tmp_path / "lease.bank"


@pytest.fixture
def client(make_client: Callable[..., TestClient], lease: Path) -> TestClient:
    return make_client(banks={"lease": lease}, max_question_characters=450)


def test_an_answer_is_that_of_the_model_with_its_citations(
    client: TestClient, model: SeDeM, bank: MemoryBank
) -> None:
    body = client.post(CHAT, json=asks(k=3)).json()
    expected = model.answer(bank, RENT, k=3, decoding=Decoding(8))
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == expected.text
    assert choice["finish_reason"] == "length"
    assert (body["object"], body["model"]) == ("chat.completion", "sedem@lease")
    details = body["sedem"]
    assert details["k"] == 3 and details["bank"] == "lease" and details["blocks"] == len(bank)
    for one, citation in zip(details["citations"], expected.citations, strict=True):
        assert one["text"] == citation.text
        assert (one["start"], one["end"], one["page"]) == (citation.start, citation.end, None)
        assert one["document"] == bank.documents.names[one["document_index"]] == citation.document
        assert one["score"] == pytest.approx(citation.score, abs=1e-4)
    names = [a["file_citation"]["filename"] for a in choice["message"]["annotations"]]
    assert names == [citation.document for citation in expected.citations]
    tokens = bank.tokens + len(model.encoder.token_ids(RENT))
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 8,
        "total_tokens": tokens + 8,
        "prompt_tokens_details": {"cached_tokens": bank.tokens},
    }


def test_a_stream_has_the_same_answer_and_its_citations_first(client: TestClient) -> None:
    body = asks(k=4, stream_options={"include_usage": True}, ranking=True)
    whole = client.post(CHAT, json=asks(k=4, ranking=True)).json()
    role, first, *deltas, last, usage = events_of(client, body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(first["sedem"]) == {"citations", "confidence", "k"}
    assert first["sedem"]["citations"] == whole["sedem"]["citations"]
    text = "".join(event["choices"][0]["delta"]["content"] for event in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "length"
    annotations = last["choices"][0]["delta"]["annotations"]
    assert annotations == whole["choices"][0]["message"]["annotations"]
    assert {**last["sedem"], "timings": None} == {**whole["sedem"], "timings": None}
    assert len(last["sedem"]["ranking"]) == whole["sedem"]["blocks"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {event["id"] for event in (role, first, *deltas, last, usage)} == {role["id"]}


def test_without_asking_there_is_no_usage(client: TestClient) -> None:
    assert all("usage" not in event for event in events_of(client, asks()))


def test_the_bank_may_be_a_field_of_its_own(client: TestClient) -> None:
    same = client.post(CHAT, json=asks(model="sedem", bank="lease")).json()
    assert same["sedem"]["bank"] == "lease"
    error = error_of(client, asks(bank="other"), 400)
    assert error["param"] == "bank" and "different banks" in error["message"]


def test_documents_are_chosen_by_name_or_index(client: TestClient) -> None:
    for documents in (["recipe.txt"], [1]):
        details = client.post(CHAT, json=asks(documents=documents, k=5)).json()["sedem"]
        assert {c["document"] for c in details["citations"]} == {"recipe.txt"}
    assert error_of(client, asks(documents=["x"]), 404)["param"] == "documents"
    assert "document 2 was asked for" in error_of(client, asks(documents=[2]), 400)["message"]


def test_messages_that_are_not_used_are_reported(client: TestClient) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": RENT}]},
    ]
    details = client.post(CHAT, json=asks(messages=messages)).json()["sedem"]
    assert details["question"] == RENT
    unused = details["cut"][:3]
    assert [one.split(" was")[0] for one in unused] == [
        "message 1 (system)",
        "message 2 (user)",
        "message 3 (assistant)",
    ]


def test_what_cannot_be_done_is_refused_in_one_sentence(client: TestClient) -> None:
    for fields, param, words in [
        ({"n": 2}, "n", "'n' can only be 1"),
        ({"n": True}, "n", "'n' can only be 1"),
        ({"tools": [{"type": "function"}]}, "tools", "'tools' can only be"),
        ({"response_format": {"type": "json_object"}}, "response_format", "can only be"),
        ({"logprobs": True}, "logprobs", "can only be"),
        ({"colour": 1}, "colour", "'colour' is not a field"),
        ({"k": 0}, "k", "it must be a whole number of at least 1, 'all' or 'auto'"),
        ({"k": "many"}, "k", "it must be a whole number of at least 1, 'all' or 'auto'"),
        ({"k": True}, "k", "it must be a whole number of at least 1"),
        ({"k": 65}, "k", "'k' is 65; this server allows at most 64"),
        ({"k": "auto"}, None, "without guidance"),
        ({"condition": "x"}, "condition", "memory, text, both"),
        ({"documents": [1.5]}, "documents", "names or numbers"),
        ({"documents": []}, None, "documents is empty"),
        ({"min_confidence": 2}, "min_confidence", "from 0 to 1"),
        ({"min_confidence": 0.5}, None, "this model gives no confidence"),
        ({"max_tokens": 513}, "max_tokens", "allows at most 512"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than 0"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"stop": ["a"] * 17}, "stop", "more than 16"),
        ({"stop": [""]}, None, "a stop string is empty"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "no user message asks"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "no user message asks"),
        ({"messages": [{"role": "user", "content": "x" * 451}]}, "messages", "451 characters"),
    ]:
        for stream in (False, True):
            error = error_of(client, asks(**fields, stream=stream), 400)
            assert error["param"] == param
            assert words in error["message"]


def test_neutral_values_of_other_fields_are_accepted(client: TestClient) -> None:
    neutral = {
        "n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
        "presence_penalty": 0.0, "logit_bias": None, "logprobs": False, "user": "ann",
        "metadata": {"a": "b"}, "store": False, "seed": -3, "top_p": 1, "temperature": 0,
    }  # fmt: skip
    assert client.post(CHAT, json=asks(**neutral)).status_code == 200


def test_models_and_banks_that_are_not_there(client: TestClient) -> None:
    assert error_of(client, asks(model="gpt-4"), 404)["code"] == "model_not_found"
    assert error_of(client, asks(model="sedem@none"), 404)["code"] == "bank_not_found"


def test_a_plain_client_with_a_long_document_is_answered(client: TestClient, model: SeDeM) -> None:
    messages = [{"role": "user", "content": f"{LONG_LEASE}\n\n{RENT}"}]
    body = {"model": "sedem", "messages": messages, "max_tokens": 8, "k": 2}
    first = client.post(CHAT, json=body).json()
    assert first["sedem"]["question"] == RENT and first["sedem"]["bank"] is None
    for citation in first["sedem"]["citations"]:
        assert LONG_LEASE[citation["start"] : citation["end"]] == citation["text"]
        assert citation["document"] == "message 1"
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = client.post(CHAT, json=body).json()
    context = first["sedem"]["context_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == context
    assert again["choices"] == first["choices"]
    assert events_of(client, body)[-1]["choices"][0]["delta"]["annotations"]


def test_a_conversation_that_goes_on_reads_only_what_is_new(client: TestClient) -> None:
    def ask(*texts: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": text} for text in texts]
        body = {"model": "sedem", "messages": messages, "max_tokens": 4, "k": 2}
        return dict(client.post(CHAT, json=body).json())

    first = ask(LONG_LEASE, RENT)
    second = ask(LONG_LEASE, RECIPE * 3, RENT)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == first["sedem"]["context_tokens"] < second["sedem"]["context_tokens"]
    assert {c["document"] for c in second["sedem"]["citations"]} <= {"message 1", "message 2"}


def test_too_much_text_and_no_text_are_refused(make_client: Callable[..., TestClient]) -> None:
    client = make_client(max_online_characters=500, max_documents=1)
    body = {"model": "sedem", "messages": [{"role": "user", "content": RENT}]}
    assert error_of(client, body, 400)["code"] == "no_documents"
    text = {"role": "user", "content": f"{LONG_LEASE}\n\n{RENT}"}
    assert "allows at most" not in error_of(client, {**body, "messages": [text]}, 413)["message"]
    two = [{"role": "user", "content": "x " * 201}] * 2
    error = error_of(client, {**body, "messages": [*two, *body["messages"]]}, 400)
    assert "hold 2 documents, this server allows at most 1" in error["message"]


def test_every_block_of_a_large_bank_cannot_be_asked_for(
    make_client: Callable[..., TestClient], lease: Path
) -> None:
    client = make_client(banks={"lease": lease}, max_all_blocks=28)
    for fields in ({"k": "all"}, {"ranking": True}):
        assert "every block; the bank has 29" in error_of(client, asks(**fields), 400)["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_refuses_before_anything_is_prepared(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    scheduler = client.app.state.lifecycle.service.scheduler  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler, "limit", 0)
    monkeypatch.setattr(scheduler._pace, "seconds", lambda count: 7 + count)
    monkeypatch.setattr("sedem.serve.asking.bank_of", None)  # cannot be called
    response = client.post(CHAT, json=asks(stream=streamed))
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert response.json()["error"]["code"] == "queue_full"

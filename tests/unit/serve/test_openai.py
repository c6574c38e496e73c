"""Chat completions and models: the same answer in one piece and streamed, within limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import RENT, build
from conftest import LEASE, RECIPE
from fastapi.testclient import TestClient
from serving import KEYS, READER, SCOPED, SECRET, bearer
from unit.serve.conftest import read_all, send

from sedem import Decoding, MemoryBank, SeDeM, SedemConfig
from sedem.answering.conversation import conversation_request
from sedem.backbone.decoder import Backbone
from sedem.serve.app import create_app
from sedem.serve.asking import decoding_of
from sedem.serve.settings import Settings
from sedem.serve.shapes import ChatBody, Message, ResponsesBody

CHAT, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
LONG_LEASE = f"{LEASE} {LEASE}"


def asks(question: str = RENT, **fields: Any) -> dict[str, Any]:
    """The body of a question to the bank `lease`."""
    messages = [{"role": "user", "content": question}]
    return {"model": "sedem@lease", "messages": messages, "max_tokens": 8, **fields}


def error_of(client: TestClient, body: Any, status: int) -> dict[str, Any]:
    # httpx itself would refuse to send NaN.
    response = client.post(CHAT, content=json.dumps(body), headers=JSON)
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
    assert all("usage" not in event for event in events_of(client, asks()))


def test_documents_are_chosen_by_name_or_index(client: TestClient) -> None:
    for documents in (["recipe.txt"], [1]):
        details = client.post(CHAT, json=asks(documents=documents, k=5)).json()["sedem"]
        assert {c["document"] for c in details["citations"]} == {"recipe.txt"}
    assert error_of(client, asks(documents=["x"]), 404)["param"] == "documents"
    # The bank may be a field of its own.
    details = client.post(CHAT, json=asks(model="sedem", bank="lease")).json()["sedem"]
    assert details["bank"] == "lease"


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


MESSAGES = [{"role": "user", "content": "Who?"}]
ANSWER = {"role": "assistant", "content": "Ann.", "refusal": None, "annotations": [{}],
          "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"n": 2}, "n", "'n' can only be 1"),
    ({"n": True}, "n", "'n' can only be 1"),
    ({"tools": [{"type": "function"}]}, "tools", "'tools' can only be"),
    ({"tool_choice": 7}, "tool_choice", "can only be"),
    ({"response_format": {"type": "json_object"}}, "response_format", "can only be"),
    ({"logprobs": True}, "logprobs", "can only be"),
    ({"store": "x"}, "store", "can only be"),
    ({"colour": 1}, "colour", "'colour' is not a field"),
    ({"k": 0}, "k", "it must be a whole number of at least 1, 'all' or 'auto'"),
    ({"k": "many"}, "k", "it must be a whole number of at least 1, 'all' or 'auto'"),
    ({"k": True}, "k", "it must be a whole number of at least 1"),
    ({"k": [1]}, "k", "it must be a whole number of at least 1"),
    ({"k": {}}, "k", "it must be a whole number of at least 1"),
    ({"k": 65}, "k", "'k' is 65; this server allows at most 64"),
    ({"k": "auto"}, None, "without guidance"),
    ({"condition": "x"}, "condition", "memory, text, both"),
    ({"condition": []}, "condition", "memory, text, both"),
    ({"documents": [1.5]}, "documents", "names or numbers"),
    ({"documents": [True]}, "documents", "names or numbers"),
    ({"documents": [-1]}, "documents", "names or numbers"),
    ({"documents": "lease.txt"}, "documents", "names or numbers"),
    ({"documents": ["\ud800"]}, "documents", "not Unicode"),
    ({"documents": []}, None, "documents is empty"),
    ({"documents": [2]}, None, "document 2 was asked for"),
    ({"documents": [0] * 1001}, "documents", "1,001 entries"),
    ({"min_confidence": 2}, "min_confidence", "from 0 to 1"),
    ({"min_confidence": True}, "min_confidence", "a number"),
    ({"min_confidence": 0.5}, None, "this model gives no confidence"),
    ({"max_tokens": 513}, "max_tokens", "allows at most 512"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than 0"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"seed": 2**63}, "seed", "less than or equal"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"ranking": "yes"}, "ranking", "boolean"),
    ({"stop": ["a"] * 17}, "stop", "more than 16"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"stop": [""]}, None, "a stop string is empty"),
    ({"bank": "other"}, "bank", "different banks"),
    ({"bank": "\ud800"}, "bank", "not Unicode"),
    ({"model": ""}, "model", "at least 1 item"),
    ({"model": "m" * 201}, "model", "at most 200 items"),
    ({"model": "\ud800"}, "model", "not Unicode"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a", "not Unicode"),
    ({"metadata": {"a": float("inf")}}, "metadata.a", "string"),
    ({"messages": []}, "messages", "at least 1 item"),
    (said("x", "system"), "messages", "no user message asks"),
    (said(" "), "messages", "no user message asks"),
    (said("x" * 451), "messages", "451 characters"),
    (said("\ud800"), "messages.content", "not Unicode"),
    (said(1), "messages.content", "it must be text, or a list of parts"),
    (said(["text"]), "messages.content", "it must be text, or a list of parts"),
    (said([{"type": "image_url", "image_url": {}}]), "messages.content", "it must be text"),
    (said([{"type": "text"}]), "messages.content", "it must be text"),
    (
        {"messages": [*MESSAGES, {**ANSWER, "tool_calls": [{"id": "1"}]}]},
        "messages.tool_calls",
        "at most 0",
    ),
]


def test_what_cannot_be_done_is_refused_in_one_sentence(client: TestClient) -> None:
    for fields, param, words in REFUSED:
        for stream in (False, True):
            error = error_of(client, asks(**fields, stream=stream), 400)
            assert error["param"] == param
            assert words in error["message"]


def test_values_that_change_nothing_are_accepted() -> None:
    for fields in (
        {"n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"presence_penalty": 0.0, "logit_bias": None, "logprobs": False, "user": "ann"},
        {"metadata": {"a": "b"}, "store": False, "top_p": 1, "temperature": 0, "n": None},
        {"messages": [*MESSAGES, ANSWER]},
    ):
        ChatBody.model_validate(asks(**fields))


def test_parts_of_a_message_are_paragraphs_and_limits_have_their_names() -> None:
    parts: Any = [{"type": "text", "text": "A lease."}, {"type": "input_text", "text": "Who?"}]
    assert Message(role="user", content=parts).content == "A lease.\n\nWho?"
    assert Message.model_validate({"role": "assistant", "content": None}).content == ""

    def chat(**fields: Any) -> ChatBody:
        return ChatBody.model_validate(asks(**{"max_tokens": None, **fields}))

    assert chat(max_tokens=3).limit == ("max_tokens", 3)
    assert chat(max_tokens=3, max_completion_tokens=4).limit == ("max_completion_tokens", 4)
    assert (chat(stop="a").stops, chat(stop=None).stops) == (("a",), ())
    body = ResponsesBody.model_validate({"model": "m", "input": "Who?", "max_output_tokens": 5})
    assert (body.limit, body.stops) == (("max_output_tokens", 5), ())
    assert [(m.role, m.content) for m in body.messages] == [("user", "Who?")]
    told = body.model_copy(update={"instructions": "Be brief."})
    assert told.messages[0].role == "system"


def test_sampling_differs_unless_a_seed_is_given(settings: Settings) -> None:
    def decoding(**fields: Any) -> Decoding:
        return decoding_of(ChatBody.model_validate(asks(**fields)), settings)

    assert decoding().seed != decoding().seed
    assert decoding(seed=5).seed == 5
    assert 0 <= decoding(seed=-5).seed == 2**63 - 5
    assert decoding(max_tokens=None).max_new_tokens == 64
    settings = settings.with_changes(max_tokens=9)
    assert decoding(max_tokens=None).max_new_tokens == 9


def test_a_key_sees_the_model_with_its_banks(
    make_client: Callable[..., TestClient], lease: Path
) -> None:
    client = make_client(banks={"lease": lease, "mine-1": lease})
    for secret, banks in ((SECRET, ["lease", "mine-1"]), (SCOPED, ["mine-1"])):
        body = client.get("/v1/models", headers=bearer(secret)).json()
        assert body["object"] == "list"
        ids = [model["id"] for model in body["data"]]
        assert ids == ["sedem", *(f"sedem@{bank}" for bank in banks)]
        assert [model["sedem"]["bank"] for model in body["data"]] == [None, *banks]
        assert body["data"][0]["sedem"]["k"] == 2 and not body["data"][0]["sedem"]["confidence"]
    assert client.get("/v1/models/sedem@lease").json()["id"] == "sedem@lease"
    for name, secret in (("gpt-4", SECRET), ("sedem@lease", SCOPED), ("a/b", SECRET)):
        response = client.get(f"/v1/models/{name}", headers=bearer(secret))
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"

    def ask(bank: str) -> tuple[int, str]:
        response = client.post(CHAT, json=asks(model=f"sedem@{bank}"), headers=bearer(SCOPED))
        return response.status_code, response.text.replace(bank, "NAME")

    assert ask("lease") == ask("other") and ask("lease")[0] == 404
    assert ask("mine-1")[0] == 200
    assert error_of(client, asks(model="gpt-4"), 404)["code"] == "model_not_found"


def test_a_bank_of_a_client_is_asked_once_something_was_read(client: TestClient) -> None:
    assert send(client, "mine", {"empty.txt": " "}).status_code == 202
    assert read_all(client, "mine")["status"] == "failed"
    assert error_of(client, asks(model="sedem@mine"), 409)["code"] == "bank_empty"
    assert send(client, "mine", {"lease.txt": LEASE}).status_code == 202
    assert read_all(client, "mine")["status"] == "ready"
    body = client.post(CHAT, json=asks(model="sedem@mine", documents=["lease.txt"])).json()
    annotation = body["choices"][0]["message"]["annotations"][0]["file_citation"]
    assert annotation == {"file_id": "lease.txt", "filename": "lease.txt", "index": 0}


@pytest.mark.parametrize("log_text", [True, False])
def test_questions_and_answers_are_logged_if_asked_for(
    log_text: bool, make_client: Callable[..., TestClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(log_text=log_text)
    body = asks(model="sedem", **said(f"{LEASE}\n\n{RENT}"))
    with caplog.at_level("INFO", "sedem.serve"):
        assert client.post(CHAT, json=body).status_code == 200
    logged = [record.fields for record in caplog.records if record.message == "answered"]  # type: ignore[attr-defined]
    assert [fields["question"] for fields in logged] == ([RENT] if log_text else [])


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
    # Keys share no texts.
    other = client.post(CHAT, json=body, headers=bearer(READER)).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
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


@pytest.fixture
def chatty(
    settings: Settings, config: SedemConfig, chat_backbone: Backbone
) -> Iterator[tuple[TestClient, SeDeM]]:
    """A client of a server whose model has a chat template, and the model."""
    model = build(config, chat_backbone)
    with TestClient(create_app(settings, model, keys=KEYS), headers=bearer(SECRET)) as client:
        yield client, model


def message(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_without_documents_a_model_with_a_chat_template_replies(
    chatty: tuple[TestClient, SeDeM],
) -> None:
    client, model = chatty
    expected = model.answer(None, "Hello!", decoding=Decoding(8))
    body = {"model": "sedem", "messages": [message(" Hello! ")], "max_tokens": 8}
    whole = client.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"]["content"] == expected.text
    assert whole["choices"][0]["message"]["annotations"] == []
    details = whole["sedem"]
    assert (details["k"], details["citations"], details["confidence"]) == (0, [], None)
    assert (details["bank"], details["blocks"], details["context_tokens"]) == (None, 0, 0)
    assert details["question"] == "Hello!"
    assert whole["usage"]["prompt_tokens"] == expected.conditioning == details["conditioning"]
    _, first, *deltas, last = events_of(client, body)
    assert first["sedem"] == {"citations": [], "confidence": None, "k": 0}
    texts = [event["choices"][0]["delta"]["content"] for event in deltas]
    assert "".join(texts) == expected.text
    assert {**last["sedem"], "timings": None} == {**details, "timings": None}
    body = {"model": "sedem", "input": "Hello!", "max_output_tokens": 8}
    response = client.post("/v1/responses", json=body).json()
    assert response["output"][0]["content"][0]["text"] == expected.text


def test_a_reply_sees_the_whole_conversation_and_says_what_it_does_not_see(
    chatty: tuple[TestClient, SeDeM],
) -> None:
    client, model = chatty
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Who?")]
    request, _ = conversation_request(model, turns, 8)
    (expected,) = model.answer_requests([request], Decoding(8))
    messages = [message(words, role) for role, words in turns]
    messages[0]["role"] = "developer"
    messages[2:2] = [message("1 + 1 = 2", "tool"), message(" ", "assistant")]
    body = {"model": "sedem", "messages": [*messages, message("Bo", "assistant")], "max_tokens": 8}
    whole = client.post(CHAT, json=body).json()
    assert whole["choices"][0]["message"]["content"] == expected.text
    why = "was not used: it comes from a tool, or after the last question"
    unused = whole["sedem"]["cut"][:2]
    assert unused == [f"message 3 (tool) {why}", f"message 7 (assistant) {why}"]
    old = [message("Hi " * 60), message("Yes. " * 60, "assistant")]
    body["messages"] = [*messages[:1], *old, *messages[1:]]
    details = client.post(CHAT, json=body).json()["sedem"]
    why = "was not used: newer ones fill the decoder's 512 positions"
    assert details["cut"][:2] == [f"message 2 (user) {why}", f"message 3 (assistant) {why}"]
    assert details["cut"][2].startswith("message 5 (tool)")


def test_what_asks_for_documents_is_not_answered_without(
    chatty: tuple[TestClient, SeDeM],
) -> None:
    client, model = chatty
    body = {"model": "sedem", "messages": [message("Hello!")], "max_tokens": 8}
    for fields in ({"documents": [0]}, {"min_confidence": 0.5}):
        assert error_of(client, {**body, **fields}, 400)["code"] == "no_documents"
    body["messages"] = [message(LONG_LEASE), message("Hello!")]
    assert client.post(CHAT, json=body).json()["sedem"]["k"] > 0
    reject = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    model.decoder.tokenizer.chat_template = reject + str(model.decoder.tokenizer.chat_template)
    body["messages"] = [message("Be brief.", "system"), message("Hello!")]
    assert "(no system); ask a bank, or send turns" in error_of(client, body, 400)["message"]


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

"""Chat completions and models: the same answer in one piece and streamed, within limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import RENT, build
from conftest import LEASE
from fastapi.testclient import TestClient
from serving import KEYS, READER, SCOPED, SECRET, bearer
from unit.server.conftest import read_all, send

from sedem import Decoding, MemoryBank, SeDeM, SedemConfig
from sedem.answering import running
from sedem.answering.conversation import conversation_request
from sedem.backbone.decoder import Backbone
from sedem.engine.device import between_pieces
from sedem.engine.eager import EagerRows
from sedem.selecting import plan as plans
from sedem.selecting.plan import Options, Request
from sedem_serve.server.app import create_app
from sedem_serve.server.asking import decoding_of
from sedem_serve.server.settings import ServerSettings
from sedem_serve.server.shapes import IN_JSON, ChatBody, Message, ResponsesBody

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


MESSAGES = [{"role": "user", "content": "Who?"}]
ANSWER = {"role": "assistant", "content": "Ann.", "refusal": None, "annotations": [{}],
          "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def schema(properties: Any) -> dict[str, Any]:
    return {"name": "n", "schema": {"type": "object", "properties": properties}}


TEXT = {"type": "string"}
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    *(
        ({"response_format": {"type": "json_schema", "json_schema": schema(properties)}},
         "response_format", "several fields")
        for properties in ({}, {"a": {"type": "integer"}}, {"a": TEXT, "b": TEXT}, [], None,
                           {"a": {**TEXT, "enum": ["yes", "no"]}}, {"a": "string"})
    ),
    ({"tool_choice": "required"}, "tool_choice", "requires a tool, and sedem calls none"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "requires a tool"),
    ({"function_call": {"name": "add"}}, "function_call", "requires a tool"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "asks for JSON"),
    ({"response_format": {"type": "grammar"}}, "response_format", "asks for JSON"),
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
    ({"min_confidence": 2}, "min_confidence", "less than or equal to 1"),
    ({"min_confidence": True}, "min_confidence", "a valid number"),
    ({"min_confidence": 0.5}, None, "this model gives no confidence"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"ranking": "yes"}, "ranking", "boolean"),
    ({"stop": ["a"] * 17}, "stop", "more than 16"),
    ({"stop": [1]}, "stop", "list of strings"),
    ({"\ud800": 1}, None, "parse raw data as a unicode string"),
    ({"bank": "other"}, "bank", "different banks"),
    ({"bank": "\ud800"}, "bank", "not Unicode"),
    ({"model": ""}, "model", "at least 1 item"),
    ({"model": "m" * 201}, "model", "at most 200 items"),
    ({"model": "\ud800"}, "model", "not Unicode"),
    ({"messages": []}, "messages", "at least 1 item"),
    (said(" "), "messages", "the messages have no text"),
    (said("Hello", "assistant"), "messages", "the messages have no text"),
    (said("x" * 451), "messages", "451 characters"),
    (said("\ud800"), "messages.content", "not Unicode"),
    (said(1), "messages.content", "it must be text, or a list of parts"),
    (said(["text"]), "messages.content", "it must be text, or a list of parts"),
    (said([{"type": "image_url", "image_url": {}}]), "messages.content", "parts that are not text"),
    (said([{"type": "text"}]), "messages.content", "sedem reads text alone"),
]  # fmt: skip


def test_what_cannot_be_done_is_refused_in_one_sentence(client: TestClient) -> None:
    for fields, param, words in REFUSED:
        for stream in (False, True):
            error = error_of(client, asks(**fields, stream=stream), 400)
            assert error["param"] == param
            assert words in error["message"]


def test_fields_without_effect_are_named_once_and_change_nothing(client: TestClient) -> None:
    plain = client.post(CHAT, json=asks()).json()
    neutral = {"tools": [], "store": False, "frequency_penalty": 0.0, "n": None, "metadata": None}
    odd = {
        "colour": {"a": [float("nan")]}, "x" * 200: 1, "frequency_penalty": -2, "logit_bias": 7,
        "tools": [{"type": "function"}], "tool_choice": "auto", "options": {"num_ctx": 1},
    }  # fmt: skip
    assert client.post(CHAT, json=asks(**neutral)).json()["sedem"]["ignored"] == []
    for body in (asks(**odd), asks(**odd, **{f"f{n}": 1 for n in range(1000)})):
        told = client.post(CHAT, content=json.dumps(body), headers=JSON).json()
        names = told["sedem"]["ignored"]
        assert names[:3] == ["colour", "x" * 100, "frequency_penalty"]
        assert names[3:6] == ["logit_bias", "tools", "options"] and len(names) <= 100
        assert told["choices"] == plain["choices"]
    details = [event["sedem"] for event in events_of(client, asks(colour=1)) if "sedem" in event]
    assert [one.get("ignored") for one in details] == [None, ["colour"]]


def test_messages_keep_their_text_and_limits_their_names() -> None:
    parts: Any = [{"type": "text", "text": "A lease."}, {"type": "input_text", "text": "Who?"}]
    assert Message(role="user", content=parts).content == "A lease.\n\nWho?"
    refused: Any = [{"type": "refusal", "refusal": "No."}]
    assert Message(role="assistant", content=refused).content == "No."
    answer = {**ANSWER, "tool_calls": [{"id": "1"}], "reasoning_content": "Hm."}
    assert Message.model_validate({**answer, "content": None}).content == ""

    def chat(**fields: Any) -> ChatBody:
        return ChatBody.model_validate(asks(**{"max_tokens": None, **fields}))

    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4
    assert (chat(stop="a").stop, chat(stop=None).stop, chat(stop=[""]).stop) == (("a",), (), ())
    output = {"type": "function_call_output", "call_id": "1", "output": "2"}
    body = ResponsesBody.model_validate(
        {"model": "m", "input": [output, *MESSAGES], "max_output_tokens": 5}
    )
    assert (body.max_tokens, body.turns) == (5, [("tool", "2"), ("user", "Who?")])
    told = body.model_copy(update={"instructions": "Be brief."})
    assert told.turns[0] == ("system", "Be brief.")


def test_every_option_of_a_question_can_be_given_but_what_the_server_sets() -> None:
    assert {*IN_JSON, "blocks", "context", "reader"} == Options.__annotations__.keys()
    options = ChatBody.model_validate(asks()).options
    assert options == {
        one.name: one.default for one in dataclasses.fields(Request) if one.name in IN_JSON
    }


def test_limits_are_met_and_sampling_differs_unless_a_seed_is_given(
    settings: ServerSettings,
) -> None:
    def decoding(positions: int = 10**4, **fields: Any) -> Decoding:
        return decoding_of(ChatBody.model_validate(asks(**fields)), settings, positions)

    assert decoding().seed != decoding().seed
    assert decoding(seed=5).seed == 5
    assert 0 <= decoding(seed=-5).seed == 2**63 - 5
    limits = {None: 64, 3: 3, 512: 512, 10**30: 512, 0: 512, -1: 512}
    assert {n: decoding(max_tokens=n).max_new_tokens for n in limits} == limits
    # The question and its memory need positions, too.
    assert decoding(400, max_tokens=-1).max_new_tokens == 100
    for given, meant in ((-1, 0), (1e-9, 0), (0.5, 0.5), (9, 2)):
        assert decoding(temperature=given).temperature == meant
    assert [decoding(top_p=p).top_p for p in (0, 0.5, 3)] == [1e-6, 0.5, 1]
    assert [decoding(top_k=k).top_k for k in (None, -1, 0, 40)] == [0, 0, 0, 40]
    settings = settings.with_changes(max_tokens=9)
    assert decoding(max_tokens=None).max_new_tokens == 9


def test_several_answers(client: TestClient) -> None:
    def texts(**fields: Any) -> list[str]:
        body = client.post(CHAT, json=asks(**fields)).json()
        assert [choice["index"] for choice in body["choices"]] == [*range(len(body["choices"]))]
        assert body["usage"]["completion_tokens"] > 8 * (len(body["choices"]) - 1)
        return [choice["message"]["content"] for choice in body["choices"]]

    (one,) = texts()
    assert texts(n=3) == [one] * 3
    sampled = texts(n=3, temperature=2, seed=3)
    assert len({*sampled}) == 3 and sampled[:1] == texts(temperature=2, seed=3)
    assert len(texts(n=50)) == 8
    pieces = ["", "", ""]
    for event in events_of(client, asks(n=3, temperature=2, seed=3)):
        (choice,) = event["choices"]
        pieces[choice["index"]] += choice["delta"].get("content", "")
    assert pieces == sampled


def test_log_probabilities_are_those_of_the_tokens(client: TestClient, model: SeDeM) -> None:
    whole = client.post(CHAT, json=asks(logprobs=True, top_logprobs=3)).json()
    (choice,) = whole["choices"]
    places = choice["logprobs"]["content"]
    assert len(places) == whole["usage"]["completion_tokens"] == 8
    for place in places:
        # Greedy: the chosen token is the likeliest one.
        best, *others = place["top_logprobs"]
        assert len(others) == 2 and best == {k: place[k] for k in ("token", "logprob", "bytes")}
        assert 0 >= best["logprob"] >= others[0]["logprob"] >= others[1]["logprob"]
        assert place["bytes"] in (None, [*place["token"].encode()])
    assert whole["sedem"]["ignored"] == []
    streamed = [e["choices"][0]["logprobs"] for e in events_of(client, asks(logprobs=True))]
    bare = [{**place, "top_logprobs": []} for place in places]
    assert [one for one in streamed if one] == [{"content": bare, "refusal": None}]
    plain = {"model": "sedem@lease", "prompt": RENT, "max_tokens": 8, "logprobs": 1}
    told = client.post("/v1/completions", json=plain).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [place["logprob"] for place in places]
    assert told["top_logprobs"][0] == {places[0]["token"]: places[0]["logprob"]}
    assert told["text_offset"][:2] == [0, len(told["tokens"][0])]
    # A quotation has no tokens.
    quoted = client.post(CHAT, json=asks(logprobs=True, answer="span")).json()
    assert quoted["choices"][0]["logprobs"] is None
    assert quoted["sedem"]["ignored"] == ["logprobs"]


def test_a_plain_completion_is_the_same_answer(client: TestClient) -> None:
    chat = client.post(CHAT, json=asks()).json()
    body = {"model": "sedem@lease", "prompt": [RENT], "max_tokens": 8}
    whole = client.post("/v1/completions", json=body).json()
    (choice,) = whole["choices"]
    assert (whole["object"], choice["text"]) == (
        "text_completion",
        chat["choices"][0]["message"]["content"],
    )
    assert whole["usage"] == chat["usage"] and whole["sedem"]["question"] == RENT
    for prompt in (["a", "b"], [1, 2], "", None):
        assert client.post("/v1/completions", json={**body, "prompt": prompt}).status_code == 400


def test_tasks_of_clients_are_answered_at_once_and_without_a_bank(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = client.app.state.lifecycle.service.scheduler  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler, "stream", None)  # cannot be called
    title = {"messages": [message(f"Write a title for this chat.\n\nUser: {RENT}\nAI: 900")]}
    bare = {"messages": [message(LONG_LEASE)], "model": "sedem"}
    asks_nothing = (
        f"The last message is a text of {len(LONG_LEASE):,} characters that asks nothing."
    )
    for body, reply in (
        (asks(**title), "What is the rent"),
        (asks(**bare), f"{asks_nothing} Send it again with a blank line and a question after it."),
    ):
        whole = client.post(CHAT, json=body).json()
        assert whole["choices"][0]["message"]["content"] == reply
        assert (whole["choices"][0]["finish_reason"], whole["sedem"]["question"]) == ("stop", "")
        assert whole["usage"]["total_tokens"] == 0 and whole["sedem"]["citations"] == []
        texts = [e["choices"][0]["delta"].get("content", "") for e in events_of(client, body)]
        assert "".join(texts) == reply


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
    assert body["data"][0]["context_length"] == body["data"][0]["max_model_len"] == 500_000
    assert client.get("/v1/models/sedem@lease").json()["id"] == "sedem@lease"
    # A bank's name alone is enough.
    assert client.get("/v1/models/lease").json()["sedem"]["bank"] == "lease"
    bare = client.post(CHAT, json=asks(model="lease")).json()
    assert (bare["model"], bare["sedem"]["bank"]) == ("lease", "lease")
    assert error_of(client, asks(model="lease", bank="mine-1"), 400)["param"] == "bank"
    hidden = (("gpt-4", SECRET), ("sedem@lease", SCOPED), ("lease", SCOPED), ("a/b", SECRET))
    for name, secret in hidden:
        response = client.get(f"/v1/models/{name}", headers=bearer(secret))
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"

    def ask(bank: str) -> tuple[int, str]:
        response = client.post(CHAT, json=asks(model=bank), headers=bearer(SCOPED))
        return response.status_code, response.text.replace(bank.split("@")[-1], "NAME")

    for prefix in ("sedem@", ""):
        assert ask(f"{prefix}lease") == ask(f"{prefix}other")
        assert ask(f"{prefix}lease")[0] == 404 and ask(f"{prefix}mine-1")[0] == 200
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
    with caplog.at_level("INFO", "sedem_serve.server"):
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
    settings: ServerSettings, config: SedemConfig, chat_backbone: Backbone
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
    request, _, _ = conversation_request(model, turns, 8)
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
    body["messages"] = [message(LONG_LEASE), message(RENT)]
    assert client.post(CHAT, json=body).json()["sedem"]["k"] > 0
    reject = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    model.decoder.tokenizer.chat_template = reject + str(model.decoder.tokenizer.chat_template)
    body["messages"] = [message("Be brief.", "system"), message("Hello!")]
    reply = client.post(CHAT, json=body)
    assert (
        reply.is_success and "message 1 (system) was put before" in reply.json()["sedem"]["cut"][0]
    )


def test_every_block_of_a_large_bank_cannot_be_asked_for(
    make_client: Callable[..., TestClient], lease: Path, model: SeDeM, monkeypatch: Any
) -> None:
    client = make_client(banks={"lease": lease})
    monkeypatch.setattr(model.engine, "most_blocks", lambda: 28)
    scores = client.post("/v1/banks/lease/scores", json={"question": "What is due?"})
    assert "29 blocks, and the memory of this server" in scores.json()["error"]["message"]
    for fields in ({"k": "all"}, {"ranking": True}):
        assert (
            "the bank has 29, and the memory of this server is enough for 28"
            in error_of(client, asks(**fields), 400)["message"]
        )


def test_a_stream_tells_how_long_it_takes(
    make_client: Callable[..., TestClient], lease: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (
        (plans, "WIDE", 20), (running, "TELL", 0.0), (running, "MEASURED", 0.0)
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(EagerRows, "join", _told_first)
    client = make_client(banks={"lease": lease})
    lines = client.post(CHAT, json=asks(k="all", stream=True)).text.split("\n\n")
    found = [json.loads(line[6:]).get("sedem", {}) for line in lines if line.startswith("data: {")]
    (place,) = [number for number, one in enumerate(found) if "estimate" in one]
    assert found[place]["estimate"] == {"seconds": pytest.approx(0, abs=60), "blocks": 29}
    assert "citations" in found[place - 1]
    body = {"model": "sedem@lease", "input": "What is due?", "k": "all", "stream": True}
    body["max_output_tokens"] = 8
    assert " s for 29 blocks" in client.post("/v1/responses", json=body).text


def _told_first(*given: Any, join: Any = EagerRows.join) -> Any:
    """The reference engine loads no blocks one by one."""
    for done in (1, 2):
        between_pieces(done, 29)
    return join(*given)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_object"}, "answer"),
    ({"type": "json_schema", "json_schema": schema({"rent": {"type": "string"}})}, "rent"),
    ({"type": "json_schema", "json_schema": schema({"x": {"type": ["string", "null"]}})}, "x"),
]


@pytest.mark.parametrize(("form", "field"), FORMS)
def test_an_answer_is_json_if_that_is_asked_for(
    client: TestClient, form: dict[str, Any], field: str
) -> None:
    plain = client.post(CHAT, json=asks()).json()["choices"][0]["message"]["content"]
    given = asks(response_format=form)
    said = client.post(CHAT, json=given).json()["choices"][0]["message"]["content"]
    assert json.loads(said) == {field: plain}
    lines = client.post(CHAT, json={**given, "stream": True}).text.splitlines()
    chunks = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    deltas = [one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"]]
    assert "".join(deltas) == said
    spec = {"type": form["type"], **form.get("json_schema", {})}
    body = {"model": given["model"], "input": given["messages"], "text": {"format": spec}}
    kept = {key: given[key] for key in given.keys() - {"messages", "response_format", "model"}}
    output = client.post("/v1/responses", json={**body, **kept}).json()["output"]
    assert json.loads(output[0]["content"][0]["text"]) == {field: plain}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_refuses_before_anything_is_prepared(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    scheduler = client.app.state.lifecycle.service.scheduler  # type: ignore[attr-defined]
    monkeypatch.setattr(scheduler, "limit", 0)
    monkeypatch.setattr(scheduler.short.pace, "seconds", lambda count: 7 + count)
    monkeypatch.setattr("sedem_serve.server.asking.read_conversation", None)  # cannot be called
    response = client.post(CHAT, json=asks(stream=streamed))
    assert (response.status_code, response.headers["Retry-After"]) == (429, "7")
    assert response.json()["error"]["code"] == "queue_full"

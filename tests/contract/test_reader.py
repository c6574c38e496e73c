"""Your own model answers: in the command, over HTTP, and as a tool; from a folder of files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import prints_json, refused, sedem, succeeds
from conftest import LEASE
from fastapi.testclient import TestClient
from mcp.client import Client
from openai import BadRequestError, OpenAI
from readers import Told, called, reader_server
from servers import SECONDS, serving
from serving import SECRET
from unit.server.conftest import make_client, settings  # noqa: F401
from unit.tools.conftest import place

from sedem import MemoryBank, SeDeM
from sedem.endpoint import Reader
from sedem.reading.followed import OpenBank
from sedem_serve.server.settings import ServerSettings
from sedem_serve.tools.mcp import LocalBackend, ToolServer

QUESTION, SAID = "What is the rent?", "It is 900 euros [1]."


@pytest.fixture
def reader() -> Iterator[Told]:
    with reader_server(lambda body: ["<think>Rent?</think>", SAID[:6], SAID[6:]]) as server:
        server.models = ["qwen3:4b"]
        yield server


@pytest.fixture
def papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 25 files, one of which cannot be read, and a home of its own for its bank."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "papers"
    (folder / "letters").mkdir(parents=True)
    for number in range(23):
        (folder / f"{number}.txt").write_text(f"Shelf {number} holds jars of plums and salt.")
    (folder / "letters" / "lease.md").write_text("The rent is 900 euros a month.")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    return folder


def test_a_folder_is_asked_with_ones_own_model(
    papers: Path, tiny_checkpoint: str, reader: Told, tmp_path: Path
) -> None:
    asked = ("ask", papers, QUESTION, "-m", tiny_checkpoint, "--reader", reader.url)
    answer = prints_json(*asked, "--json", "-k", "25")
    assert (answer["answer"], answer["model"], answer["reasoning"]) == (SAID, "qwen3:4b", "Rent?")
    first = answer["citations"][0]
    (start, end), *_ = first["answer_spans"]
    text = (papers / first["document"]).read_text()
    assert 0 <= start < end <= len(text) and text[first["start"] : first["end"]] == first["text"]
    assert "letters/lease.md" in {one["document"] for one in answer["citations"]}
    prompt = reader.bodies[-1]["messages"][-1]["content"]
    assert "[24]" in prompt and prompt.endswith(f"Question: {QUESTION}")
    # What is new is read, what is gone is forgotten.
    (papers / "0.txt").unlink()
    (papers / "new.txt").write_text("The plumber is Anna Berg.")
    names = {one["document"] for one in prints_json(*asked, "--json", "-k", "25")["citations"]}
    assert "new.txt" in names and "0.txt" not in names
    shown = succeeds(*asked)
    assert shown.startswith(f"{SAID}\n  written by qwen3:4b from 8 passages")
    # Without a reader, the model answers from the same bank.
    own = prints_json("ask", papers, QUESTION, "-m", tiny_checkpoint, "--json")
    assert own["model"] == "tiny" and len(own["citations"]) == own["k"]


def test_what_cannot_be_read_is_named_when_it_is_new(papers: Path, tiny_checkpoint: str) -> None:
    def notes() -> list[str]:
        asked = sedem("ask", papers, QUESTION, "-m", tiny_checkpoint).stderr
        return [line for line in asked.splitlines() if line.startswith("note: ")]

    (named,) = notes()
    (counted,) = notes()
    assert "broken.pdf" in named and "note: 1 note on what was not read: see '" in counted
    assert named.endswith(Path(counted.split("'")[1]).read_text())
    (papers / "bad.pdf").write_bytes(b"%PDF-1.4 nothing")
    (new,) = notes()
    assert "bad.pdf" in new and notes() == [counted.replace("1 note ", "2 notes ")]
    # So is a file of a type that nothing reads, which no other note would tell.
    (papers / "photo.heic").write_bytes(b"\0ftypheic")
    (unknown,) = notes()
    assert "left out 1 (of an unknown type: " in unknown and "photo.heic" in unknown


def test_what_cannot_be_a_reader_is_refused(papers: Path) -> None:
    asked = ("ask", papers, QUESTION)
    refused(*asked, "--reader", "localhost:11434", words="the reader's address is 'localhost")
    refused(*asked, "--reader-model", "qwen3:4b", words="--reader-model names a model of --reader")
    serve = ("serve", "--reader", "http://localhost:1/v1", "--ray", "local")
    refused(*serve, words="--reader answers on this machine; leave --ray out")
    (papers.parent / "empty").mkdir()
    refused("ask", papers.parent / "empty", QUESTION, words="the folder of 'empty' is empty")


@pytest.fixture
def client(
    make_client: Callable[..., TestClient],  # noqa: F811
    bank: MemoryBank,
    tmp_path: Path,
    reader: Told,
) -> TestClient:
    bank.save(tmp_path / "lease.bank")
    return make_client(banks={"lease": tmp_path / "lease.bank"}, reader=reader.url)


def chat(client: TestClient, *messages: tuple[str, str], **fields: Any) -> Any:
    told = [{"role": role, "content": words} for role, words in messages]
    body = {"model": "sedem@lease", "messages": told, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    *events, _, _ = response.text.split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_openais_api_answers_with_ones_own_model(client: TestClient, reader: Told) -> None:
    said = ("system", "Be brief."), ("user", "Hello."), ("assistant", "Hi."), ("user", QUESTION)
    found = chat(client, *said)
    message = found["choices"][0]["message"]
    assert message["content"] == SAID
    assert any("answer_start" in one["file_citation"] for one in message["annotations"])
    details = found["sedem"]
    assert (details["answered_by"], details["reasoning"]) == ("qwen3:4b", "Rent?")
    assert details["cut"] == []
    system, *before, asked = reader.bodies[-1]["messages"]
    assert system["content"].endswith("Be brief.") and QUESTION in asked["content"]
    assert [one["content"] for one in before] == ["Hello.", "Hi."]
    # The same streamed; a way to answer that is named is the model's own.
    pieces = chat(client, ("user", QUESTION), stream=True)
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces)
    assert text == SAID
    own = chat(client, ("user", QUESTION), answer="free", max_tokens=4)
    assert own["sedem"]["answered_by"] == "sedem"


def test_a_reader_is_given_the_json_that_is_wanted(client: TestClient, reader: Told) -> None:
    fields = {"type": "object", "properties": {"rent": {}, "due": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "lease", "schema": fields}}
    reader.reply = lambda body: ['{"rent": 900, ', '"due": "the third"}']
    found = chat(client, ("user", QUESTION), response_format=form, max_tokens=64)
    assert json.loads(found["choices"][0]["message"]["content"])["due"] == "the third"
    assert reader.bodies[-1]["response_format"] == form
    assert reader.bodies[-1]["max_tokens"] == 64
    text = {"format": {"type": "json_schema", **form["json_schema"]}}
    body = {"model": "sedem@lease", "input": QUESTION, "text": text}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert reader.bodies[-1]["response_format"] == form
    # The server's own model gives one text alone.
    body = {"model": "sedem@lease", "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"answer": "free", "response_format": form}
    refused_form = client.post("/v1/chat/completions", json=body)
    assert refused_form.status_code == 400 and "several fields" in refused_form.text


@pytest.fixture
def api(
    settings: ServerSettings,  # noqa: F811
    model: SeDeM,
    bank: MemoryBank,
    tmp_path: Path,
    reader: Told,
) -> Iterator[OpenAI]:
    """OpenAI's own client of a server that has a reader."""
    bank.save(tmp_path / "lease.bank")
    changes: dict[str, Any] = {"banks": {"lease": tmp_path / "lease.bank"}, "reader": reader.url}
    with (
        serving(settings.with_changes(**changes), model) as served,
        OpenAI(base_url=served.api, api_key=SECRET, max_retries=0, timeout=SECONDS) as client,
    ):
        yield client


FUNCTIONS = [
    {"name": name, "parameters": {"type": "object", "properties": {"of": {"type": "string"}}}}
    for name in ("weather", "rates")
]
TOOLS: Any = [{"type": "function", "function": one} for one in FUNCTIONS]
ASKED: Any = {"role": "user", "content": QUESTION}
OSLO, EURO = '{"of": "Oslo"}', '{"of": "euro"}'
CALLS = [
    {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    for id, name, arguments in (("a", "weather", OSLO), ("b", "rates", EURO))
]
ROUND: Any = [
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "17 degrees"},
    {"role": "tool", "tool_call_id": "b", "content": "1 euro is 25 crowns. " * 30},
]


def test_a_reader_calls_a_tool_of_the_client(api: OpenAI, reader: Told) -> None:
    reader.reply = lambda body: [called(OSLO, id="a", name="weather")]  # as Ollama sends it
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    create = api.chat.completions.create
    found = create(model="sedem@lease", messages=[ASKED], **fields)
    (choice,) = found.choices
    assert [one.to_dict() for one in choice.message.tool_calls or ()] == CALLS[:1]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "")
    asked = reader.bodies[-1]
    assert {name: asked[name] for name in fields} == fields
    assert "[1] lease.txt" in asked["messages"][-1]["content"]
    assert "call the tools that help" in asked["messages"][0]["content"]
    details = found.model_extra["sedem"] if found.model_extra else {}
    assert details["citations"] and details["finish_reason"] == "tool_calls"
    assert details["ignored"] == details["unsupported"] == details["cut"] == []
    # A reader without tools, and a question that wants the server's own model
    reader.reply = lambda body: (400, "tiny does not support tools")
    found = create(model="sedem@lease", messages=[ASKED], max_tokens=4, **fields)
    assert found.choices[0].message.content and found.choices[0].finish_reason == "length"
    assert "does not support tools" in str(found.model_extra)
    own: Any = {"model": "sedem@lease", "messages": [ASKED], "extra_body": {"answer": "free"}}
    with pytest.raises(BadRequestError, match="requires a tool, and sedem calls none"):
        create(**own, **fields)
    with pytest.raises(BadRequestError, match="requires a tool"):
        create(model="sedem@lease", messages=[ASKED], tool_choice="required")
    found = create(**own, max_tokens=4, **fields | {"tool_choice": "auto"})
    assert found.model_extra and found.model_extra["sedem"]["ignored"] == ["tools"]


def test_calls_of_tools_are_streamed_in_pieces(api: OpenAI, reader: Told) -> None:
    reader.reply = lambda body: [
        {"reasoning": "Both?"}, "Let me see.",
        called(id="a", name="weather"), called(OSLO[:5]), called(OSLO[5:]),
        called(id="b", index=1, name="rates"), called(EURO, index=1),
    ]  # fmt: skip
    chunks = [*api.chat.completions.create(
        model="sedem@lease", messages=[ASKED], tools=TOOLS, stream=True
    )]  # fmt: skip
    deltas = [one.choices[0].delta for one in chunks]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [one.index for one in pieces] == [0, 0, 0, 1, 1]
    assert [one.id for one in pieces] == ["a", None, None, "b", None]
    assert [one.choices[0].finish_reason for one in chunks[-2:]] == [None, "tool_calls"]
    # What OpenAI's client makes of them.
    with api.chat.completions.stream(model="sedem@lease", messages=[ASKED], tools=TOOLS) as stream:
        (choice,) = stream.get_final_completion().choices
    told = [one.function.to_dict() for one in choice.message.tool_calls or ()]
    assert [(one["name"], one["arguments"]) for one in told] == [("weather", OSLO), ("rates", EURO)]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")


@pytest.mark.parametrize("name", ["sedem@lease", "sedem"])
def test_results_of_tools_reach_the_reader_in_order(api: OpenAI, reader: Told, name: str) -> None:
    reader.reply = lambda body: ["It is 17 degrees, and 1 euro is 25 crowns, not 26."]
    before: Any = [ASKED, *ROUND, {"role": "assistant", "content": "Mild."}]
    messages: Any = [*before, {"role": "user", "content": "And now?"}, *ROUND]
    if name == "sedem":  # the results are no documents of a question without a bank
        messages = [{"role": "user", "content": "And now?"}, *ROUND]
    found = api.chat.completions.create(model=name, messages=messages, tools=TOOLS)
    *told, asked, calls, one, other = reader.bodies[-1]["messages"]
    assert [calls, one, other] == ROUND and asked["content"].endswith("And now?")
    assert asked["role"] == "user" and found.choices[0].finish_reason == "stop"
    details = found.model_extra["sedem"] if found.model_extra else {}
    assert details["question"] == "And now?" and details["unsupported"] == ["26"]
    # What is no call and no result is told as before.
    odd: Any = [{"role": "system", "content": "Hi.", "tool_calls": [{}]},
                {"role": "assistant", "content": "Ho.", "tool_calls": 7},
                {"role": "user", "content": "So?", "tool_call_id": "a"},
                {"role": "tool", "content": "1", "tool_call_id": None}]  # fmt: skip
    assert api.chat.completions.create(model=name, messages=odd).choices[0].message.content
    *_, last = reader.bodies[-1]["messages"]
    assert last["role"] == "user" and last["content"].endswith("So?")
    assert bool(details["citations"]) == (name != "sedem")
    if name != "sedem":
        assert told[1:] == before and "quotations" in told[0]["content"]


def test_responses_call_tools_of_the_client(api: OpenAI, reader: Told) -> None:
    reader.reply = lambda body: [
        called(id="a", name="weather"), called(OSLO), called(EURO, id="b", index=1, name="rates")
    ]  # fmt: skip
    fields: Any = {"model": "sedem@lease", "tool_choice": {"type": "function", "name": "rates"}}
    # Tools of OpenAI's own server are left out.
    fields["tools"] = [{"type": "function", **one} for one in FUNCTIONS] + [{"type": "web_search"}]
    whole = api.responses.create(input=QUESTION, **fields)
    events = [*api.responses.create(input=QUESTION, stream=True, **fields)]
    assert reader.bodies[-1]["tools"] == TOOLS
    assert reader.bodies[-1]["tool_choice"]["function"] == {"name": "rates"}
    streamed: Any = events[-1]
    for response in (whole, streamed.response):
        calls = [one for one in response.output if one.type == "function_call"]
        told = [(one.call_id, one.name, one.arguments) for one in calls]
        assert told == [("a", "weather", OSLO), ("b", "rates", EURO)]
    kinds = [one.type for one in events if "function_call" in one.type]
    assert kinds == ["response.function_call_arguments." + kind for kind in
                     ("delta", "delta", "delta", "done", "done")]  # fmt: skip
    added = [one for one in events if one.type == "response.output_item.added"]
    assert [(one.output_index, one.item.id) for one in added[1:]] == [(1, "fc_a"), (2, "fc_b")]
    # The round after it, as a client sends the output back
    reader.reply = lambda body: ["It is mild."]
    given: Any = [ASKED, *(one.to_dict() for one in whole.output)]
    for one in ROUND[1:]:
        id, output = one["tool_call_id"], one["content"]
        given.append({"type": "function_call_output", "call_id": id, "output": output})
    assert api.responses.create(input=given, **fields).output_text == "It is mild."
    asked, *rest = reader.bodies[-1]["messages"][-4:]
    assert rest == ROUND and QUESTION in asked["content"]


def test_a_conversation_without_documents_is_the_readers(client: TestClient, reader: Told) -> None:
    body = {"model": "sedem", "messages": [{"role": "user", "content": "How are you?"}]}
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["choices"][0]["message"]["content"] == SAID
    (asked,) = reader.bodies[-1]["messages"]
    assert asked == {"role": "user", "content": "How are you?"}


def test_a_reader_that_is_away_costs_no_answer(client: TestClient, reader: Told) -> None:
    reader.reply = lambda body: (503, "loading")
    details = chat(client, ("user", QUESTION), max_tokens=4)["sedem"]
    assert details["answered_by"] == "sedem" and "refuses with 503" in details["cut"][-1]


def test_a_tool_answers_with_ones_own_model(
    model: SeDeM, bank: MemoryBank, reader: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("lease.bank")

    async def asked() -> Any:
        own = Reader(reader.url)
        backend = LocalBackend([OpenBank(file, "lease")], lambda: model, reader=own)
        async with Client(ToolServer(backend, backend.lifespan)) as client:
            return await client.call_tool("ask", {"question": QUESTION})

    bank.save(file)
    found = asyncio.run(asked()).structured_content
    assert found["answer"] == SAID and LEASE[place(found["quoted"][0])[1]].strip()

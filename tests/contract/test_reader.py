"""Your own model answers: in the command, over HTTP, and as a tool; from a folder of files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import prints_json, refused, succeeds
from conftest import LEASE
from fastapi.testclient import TestClient
from mcp.client import Client
from readers import Told, reader_server
from unit.server.conftest import make_client, settings  # noqa: F401

from sedem import MemoryBank, SeDeM
from sedem.endpoint import Reader
from sedem.reading.followed import OpenBank
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


def test_a_tool_answers_with_ones_own_model(model: SeDeM, bank: MemoryBank, reader: Told) -> None:
    place = Path("lease.bank")

    async def asked() -> Any:
        own = Reader(reader.url)
        backend = LocalBackend([OpenBank(place, "lease")], lambda: model, reader=own)
        async with Client(ToolServer(backend, backend.lifespan)) as client:
            return await client.call_tool("ask", {"question": QUESTION})

    bank.save(place)
    try:
        found = asyncio.run(asked()).structured_content
    finally:
        place.unlink()
    assert found["answer"] == SAID and found["quoted"]
    assert LEASE[found["quoted"][0]["start"] : found["quoted"][0]["end"]].strip()

"""The official client of OpenAI, and LangChain's, against a server on a loopback port."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import httpx
import openai
import pytest
from answers import RENT
from conftest import LEASE, RECIPE
from langchain_openai import ChatOpenAI
from openai import OpenAI
from servers import SECONDS, Served, serving
from serving import SECRET

from sedem import Document, SeDeM
from sedem.answering.running import RunningAnswers
from sedem_serve.server.settings import ServerSettings

MODEL = "sedem-nano@lease"
QUESTION = {"role": "user", "content": RENT}


@pytest.fixture(scope="module")
def model() -> SeDeM:
    model = SeDeM.from_pretrained("sedem-nano")
    # A quotation comes as a whole.
    model.config = model.config.model_copy(update={"answer": "free"})
    return model


@pytest.fixture(scope="module")
def served(model: SeDeM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    bank = model.read([Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)])
    bank.save(folder / "lease.bank")
    settings = ServerSettings(folder=folder / "own", banks={"lease": folder / "lease.bank"}, rows=2,
                        waiting=2, log_text=False)  # fmt: skip
    with serving(settings, model) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.api, api_key=SECRET, max_retries=0, timeout=SECONDS) as one:
        yield one


def until(condition: Any) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_errors_are_those_of_the_client(client: OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="sedem-nano@none", messages=[QUESTION])
    assert missing.value.code == "bank_not_found"
    for fields in ({"tool_choice": "required"}, {"extra_body": {"k": "x"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            create(model=MODEL, messages=[QUESTION], **fields)
        assert refused.value.param in ("tool_choice", "k")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(
    stream: bool, client: OpenAI, served: Served, turns: Event
) -> None:
    scheduler = served.service.scheduler
    body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 512, "stream": stream}
    headers = {"Authorization": f"Bearer {SECRET}"}
    if stream:
        with httpx.stream(
            "POST", f"{served.api}/chat/completions", json=body, headers=headers
        ) as response:
            assert next(response.iter_lines()).startswith("data: ")
            until(lambda: scheduler.running == 1)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.api}/chat/completions", json=body, headers=headers, timeout=2)
    live = scheduler.short._answers.live
    until(lambda: all(running.question.ended for running in live.values()))
    turns.set()
    until(lambda: scheduler.running == 0)
    answer = client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=4)
    assert answer.choices[0].message.content


def test_an_engine_that_fails_ends_what_runs_and_the_next_question_works(
    client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RunningAnswers) -> None:
        raise RuntimeError("out of memory at 0x1234")

    create = client.chat.completions.create
    with monkeypatch.context() as patch:
        patch.setattr(RunningAnswers, "step", fail)
        with pytest.raises(openai.InternalServerError) as failed:
            create(model=MODEL, messages=[QUESTION], max_tokens=8)
        assert failed.value.status_code == 503
        assert failed.value.response.headers["retry-after"]
        assert "0x1234" not in str(failed.value)
        chunks = create(model=MODEL, messages=[QUESTION], max_tokens=8, stream=True)
        with pytest.raises(openai.APIError, match="engine failed"):
            list(chunks)
    assert create(model=MODEL, messages=[QUESTION], max_tokens=8).choices


def test_langchain(served: Served) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=served.api, api_key=SECRET, max_tokens=16, temperature=0,
        extra_body={"k": 1},
    )  # fmt: skip
    answer = chat.invoke([("system", "Answer from the lease."), ("human", RENT)])
    assert "900" in str(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = [str(piece.content) for piece in chat.stream(RENT)]
    assert "".join(pieces) == answer.content


def test_the_responses_interface(client: OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=16)
    answer = client.responses.create(
        model=MODEL, input=RENT, instructions="Be brief.", max_output_tokens=16
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    annotations = answer.output[0].content[0].annotations
    expected = chat.model_extra["sedem"]["citations"]
    assert [(a.type, a.filename) for a in annotations] == [
        ("file_citation", citation["document"]) for citation in expected
    ]
    assert answer.model_extra["sedem"]["citations"] == expected
    assert "message 1 (system) was not used" in answer.model_extra["sedem"]["cut"][0]


def test_a_quoted_answer_says_where_it_stands_streamed_or_not(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": [QUESTION], "extra_body": {"k": 2, "answer": "span"}}
    answer = client.chat.completions.create(**asked).model_dump()
    message, sedem = answer["choices"][0]["message"], answer["sedem"]
    [source] = [one for one in sedem["citations"] if one["answer_spans"]]
    [(start, end)] = source["answer_spans"]
    quoted = source["text"][start - source["start"] : end - source["start"]]
    assert quoted == message["content"] != ""
    assert (sedem["answer"], sedem["finish_reason"], sedem["unsupported"]) == ("span", "end", [])
    files = [one["file_citation"] for one in message["annotations"]]
    [place] = [file for file in files if "answer_start" in file]
    assert place == {
        "file_id": source["document"], "filename": source["document"],
        "index": source["document_index"],
        "answer_start": start, "answer_end": end,
    }  # fmt: skip
    chunks = [one.model_dump() for one in client.chat.completions.create(**asked, stream=True)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] or "" for delta in deltas) == message["content"]
    assert [one["file_citation"] for one in deltas[-1]["annotations"]] == files
    assert chunks[-1]["sedem"]["citations"] == sedem["citations"]
    with client.responses.stream(
        model=MODEL, input=RENT, extra_body={"k": 2, "answer": "span"}
    ) as stream:
        added = [e for e in stream if e.type == "response.output_text.annotation.added"]
    places = [dict(event.annotation) for event in added]
    assert [one.get("answer_start") for one in places] == [f.get("answer_start") for f in files]


def test_the_responses_interface_streams(client: OpenAI) -> None:
    texts = [{"role": "user", "content": [{"type": "input_text", "text": RENT}]}]
    with client.responses.stream(model=MODEL, input=texts, max_output_tokens=16) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    done = next(e for e in events if e.type == "response.output_text.done")
    assert deltas == done.text
    assert kinds[-1] == "response.incomplete"
    last = events[-1].response
    assert last.output_text == deltas
    assert (
        last.model_extra["sedem"]["citations"]
        == (events[0].response.model_extra["sedem"]["citations"])
    )
    assert kinds.count("response.output_text.annotation.added") == len(
        last.output[0].content[0].annotations
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))

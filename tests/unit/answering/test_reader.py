"""Answers that somebody's own model writes: what it is told, and what becomes of its reply."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from conftest import LEASE
from readers import called, chunk, reader_server

from sedem import Answer, Decoding, Document, MemoryBank, SeDeM
from sedem.answering import reader as reader_module
from sedem.answering.reader import CUT, NOTES, RULES, cited, invented, windows
from sedem.endpoint import SAID, THOUGHT, Reader, apart
from sedem.errors import ConfigError, ReaderError
from sedem.selecting.plan import Request
from sedem.types import Citation

QUESTION = "What does the flat cost a month?"


@pytest.fixture
def bank(model: SeDeM) -> MemoryBank:
    return model.read([Document("lease.txt", LEASE)])


def test_a_reader_is_given_numbered_quotations_and_what_was_said(
    model: SeDeM, bank: MemoryBank
) -> None:
    said = [("system", "Be polite."), ("user", "Hello."), ("assistant", "Hi.")]
    turns = [{"role": role, "content": words} for role, words in said]
    with reader_server(lambda body: ["It costs ", "9876 euros [1]."]) as server:
        reader = Reader(server.url, "tiny", key="secret")
        request = Request(bank, QUESTION, reader=reader, turns=turns)
        answer = model.answer_requests([request], Decoding(max_new_tokens=9, stop=("END",)))[0]
    (body,) = server.bodies
    system, hello, hi, asked = body["messages"]
    assert server.keys == ["Bearer secret"]
    assert system["content"] == f"{RULES}\n\nBe polite."
    assert [hello["content"], hi["content"]] == ["Hello.", "Hi."]
    quotations = "\n\n".join(f"[{one.rank}] lease.txt\n{one.text}" for one in answer.citations)
    assert asked["content"] == f"{quotations}\n\nQuestion: {QUESTION}"
    assert (body["max_tokens"], body["stop"], body["temperature"]) == (9, ["END"], 0.0)
    assert answer.text == "It costs 9876 euros [1]." and answer.model == "tiny"
    assert answer.unsupported == ("9876",)
    for one in answer.citations:
        assert LEASE[one.start : one.end] == one.text


@pytest.mark.parametrize(
    ("pieces", "text", "thought"),
    [
        (["<think>Hm", "m.</th", "ink>Yes."], "Yes.", "Hmm."),
        (["a < b, ", "<thin", "king"], "a < b, <thinking", ""),
        # vLLM, before and since it renamed the field
        ([{"reasoning_content": "Hmm."}, "Yes.", {"finish_reason": "stop", "stop_reason": 2}],
         "Yes.", "Hmm."),
        ([{"reasoning": "Hmm."}, {"reasoning": None, "content": "Yes."}], "Yes.", "Hmm."),
        # Ollama: a role and a content in every delta
        ([{"role": "assistant", "reasoning": "Hmm.", "content": ""},
          {"role": "assistant", "content": "Yes."},
          {"role": "assistant", "content": "", "finish_reason": "stop"}], "Yes.", "Hmm."),
        # A server that sends both names; llama.cpp's null, its pings, and a chunk of times alone
        ([{"reasoning_content": "Hmm.", "reasoning": "Hmm."}, {"content": None}, b":\n\n",
          b": ping\n\n", "Yes.", {"finish_reason": "stop"}, chunk(choices=[], timings={})],
         "Yes.", "Hmm."),
        # A chunk without choices, one whose choice has no delta, and content that is no text
        ([b'data: {"choices": null}\n\n', b'data: {"choices": [{"index": 0}]}\n\n',
          {"content": [{"type": "thinking"}]}, "Yes."], "Yes.", ""),
    ],
)  # fmt: skip
def test_streams_of_many_servers_are_read(
    model: SeDeM, bank: MemoryBank, pieces: Any, text: str, thought: str
) -> None:
    with reader_server(lambda body: pieces) as server:
        stream = model.stream(bank, QUESTION, reader=Reader(server.url, "tiny"))
        shown = "".join(stream)
    assert stream.answer is not None and stream.answer.finish_reason == "end"
    assert (shown, stream.answer.text, stream.answer.reasoning) == (text, text, thought)
    assert stream.answer.cut == ()


def test_reasoning_that_is_only_closed_is_none_of_the_answer(
    model: SeDeM, bank: MemoryBank
) -> None:
    # vLLM without a parser of reasoning, if the template opens it in the prompt
    with reader_server(lambda body: ["Hm, 9876?", "\n</think>\n\n", "Yes."]) as server:
        answer = model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))
    assert (answer.text, answer.reasoning, answer.unsupported) == ("Yes.", "Hm, 9876?", ())


FIND, SEND = '{"name": "Ann"}', '{"to": "Ann"}'


@pytest.mark.parametrize(
    ("pieces", "ids"),
    [
        # Ollama: whole calls, all with the number 0, or numbered
        ([called(FIND, id="a", name="find"), called(SEND, id="b", name="send")], "ab"),
        ([called(FIND, id="a", name="find"), called(SEND, id="b", index=1, name="send")], "ab"),
        # vLLM: a name, then arguments in pieces; ids in every piece, names that are empty
        ([called(id="a", name="find"), called(FIND[:6]), called(FIND[6:]),
          called(id="b", index=1, name="send"), called(SEND, index=1)], "ab"),
        ([called("", id="a", name="find"), called(FIND[:6], id="a", name=""),
          called(FIND[6:], id="a"), called("", id="b", name="send"),
          called(SEND, id="", name=None)], "ab"),
        # Interleaved, and with an id that changes within a call
        ([called(id="a", name="find"), called(id="b", index=1, name="send"),
          called(FIND[:6], id="x"), called(SEND, index=1, id="y"), called(FIND[6:], id="z")],
         "ab"),
        # Gemini: no numbers; others: no ids, or arguments that are no text
        ([called(FIND, id="a", index=None, name="find"),
          called(SEND, id="b", index=None, name="send")], "ab"),
        ([called(FIND, name="find"), called({"to": "Ann"}, index=1, name="send")], None),
    ],
)  # fmt: skip
def test_calls_of_tools_are_told_apart(
    model: SeDeM, bank: MemoryBank, pieces: Any, ids: str | None
) -> None:
    # Some servers end them as they end an answer.
    with reader_server(lambda body: [*pieces, {"finish_reason": "stop"}]) as server:
        answer = model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))
    functions = [one["function"] for one in answer.calls]
    assert functions == [
        {"name": "find", "arguments": FIND}, {"name": "send", "arguments": SEND}
    ]  # fmt: skip
    given = [one["id"] for one in answer.calls]
    assert given == [*ids] if ids else len({*filter(None, given)}) == 2
    assert (answer.text, answer.finish_reason, answer.cut) == ("", "tool_calls", ())
    assert answer.citations and "calls" not in answer.to_dict()


def test_what_is_cut_off_or_left_out_is_told(model: SeDeM, bank: MemoryBank) -> None:
    said = [("user", "Hello. " * 400), ("assistant", "Hi."), ("user", "Good.")]
    turns = [{"role": role, "content": words} for role, words in said]
    cut_off = ["It is", {"finish_reason": "length"}]
    with reader_server(lambda body: cut_off) as server:
        request = Request(bank, QUESTION, reader=Reader(server.url, context=2048), turns=turns)
        (answer,) = model.answer_requests([request])
    assert answer.finish_reason == "length"
    assert answer.cut == (
        "the conversation is too long; its oldest messages (1) were left out",
        "the answer was cut off at the reader's limit",
    )
    assert [one["content"] for one in server.bodies[0]["messages"][1:-1]] == ["Hi.", "Good."]


def test_tags_may_be_cut_anywhere() -> None:
    whole = "a<think>b<c</think>d<think>e</think>"
    for size in range(1, len(whole)):
        pieces = [(SAID, whole[at : at + size]) for at in range(0, len(whole), size)]
        parts = {THOUGHT: "", SAID: ""}
        for kind, text in apart(pieces):
            parts[kind] += text
        assert parts == {THOUGHT: "b<ce", SAID: "ad"}


def test_numbers_and_words_of_an_answer_become_places() -> None:
    first = Citation(1, "a.txt", 100, 130, 1.0, "Anna Berg pays 35 euros a day.")
    second = Citation(2, "b.txt", 7, 20, 0.5, "The cat slept.")
    marked = list(cited('Anna Berg pays "35 euros" [1].', [first, second]))
    assert marked[0].answer_spans == ((100, 123),) and marked[1] == second
    # A passage that is named, and shares no words with the answer, is cited as a whole.
    assert list(cited("Ja [2, 1].", [first, second]))[1].answer_spans == ((7, 20),)
    # If none is named, all may be the source: names, numbers, and words side by side.
    # Numbers of items are none of the answer's, and a digit alone stands everywhere.
    third = Citation(1, "c.txt", 0, 26, 1.0, "Pump 1 and pump 2 hold 7 l.")
    assert not next(cited("1. Yes.\n2. No, 7.", [third])).answer_spans
    both = [one.answer_spans for one in cited("She slept; so did Berg.", [first, second])]
    assert both == [((105, 109),), ()]


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((404, "model 'tiny' not found"), "refuses with 404: .*not found"),
        ((401, "no"), "refuses the key; set SEDEM_READER_KEY"),
        ((400, "the prompt exceeds the context"), "refuses with 400: .*exceeds the context"),
        # Within a stream: vLLM's error and llama.cpp's, an older one of each, and Ollama's, which
        # only ends
        ([b'data: {"error": {"message": "too long", "code": 400}}\n\n'], "failed: too long"),
        ([b'data: {"object": "error", "message": "x", "code": 400}\n\ndata: [DONE]\n\n'],
         "broke off before it said"),
        ([{"reasoning": "Hm."}, b'error: {"code": 400}\n\ndata: [DONE]\n\n'], "broke off before"),
        ([{"content": ""}, b""], "broke off before it said anything"),
        # JSON in place of a stream, and an event that is none
        ((200, "not found"), "broke off before it said anything"),
        ([b"data: {\n\n"], "sends no OpenAI protocol"),
    ],
)  # fmt: skip
def test_a_reader_that_fails_costs_only_its_words(
    model: SeDeM, bank: MemoryBank, reply: Any, sentence: str
) -> None:
    own = model.answer(bank, QUESTION)
    with reader_server(lambda body: reply) as server:
        answer = model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))
    assert (answer.text, answer.citations) == (own.text, own.citations)
    assert re.search(sentence, answer.cut[-1])


def test_a_reply_that_breaks_off_says_so(model: SeDeM, bank: MemoryBank) -> None:
    with reader_server(lambda body: ["It is", b""]) as server:
        answer = model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))
        assert (answer.text, answer.cut[-1]) == ("It is", CUT[None])
        server.reply = lambda body: ["It is", {"finish_reason": "content_filter"}]
        answer = model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))
        assert (answer.text, answer.cut[-1]) == ("It is", CUT["content_filter"])
        # An error after words is one.
        for piece in ("It is", called(FIND, id="a", name="find")):
            error = b'data: {"error": {"message": "out of memory"}}\n\n'
            server.reply = lambda body, piece=piece, error=error: [piece, error]
            with pytest.raises(ReaderError, match="failed: out of memory"):
                model.answer(bank, QUESTION, reader=Reader(server.url, "tiny"))


def test_a_proxy_is_not_asked_for_this_machine_nor_keys_of_others_sent(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "of OpenAI alone")
    with reader_server(lambda body: ["Yes."]) as server:
        assert model.answer(bank, QUESTION, reader=Reader(server.url)).text == "Yes."
        monkeypatch.setenv("SEDEM_READER_KEY", "own")
        model.answer(bank, QUESTION, reader=Reader(server.url))
    assert server.keys == ["Bearer none", "Bearer own"]


def test_a_reader_that_is_away(model: SeDeM, bank: MemoryBank) -> None:
    answer = model.answer(bank, QUESTION, reader=Reader("http://127.0.0.1:9/v1", "tiny"))
    assert "http://127.0.0.1:9/v1 cannot be reached" in answer.cut[-1]


def test_the_only_model_needs_no_name() -> None:
    with reader_server(lambda body: []) as server:
        assert Reader(server.url).name == "tiny"
        server.models = ["b", "a"]
        with pytest.raises(ReaderError, match=r"no model is named, and .* has a, b; name one"):
            _ = Reader(server.url).name
        server.models = None  # a page
        with pytest.raises(ReaderError, match="its address may lack /v1"):
            _ = Reader(server.url).name


@pytest.mark.parametrize("url", ["127.0.0.1:11434", "file:///etc", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="the reader's address is"):
        Reader(url)


def test_a_reader_of_this_machine_is_told_apart() -> None:
    local = ["http://localhost:1/v1", "http://127.0.0.2/v1", "http://[::1]:8/v1"]
    assert all(Reader(url).is_local for url in local)
    assert not any(Reader(f"https://{host}/v1").is_local for host in ("api.openai.com", "10.0.0.1"))


def test_everything_is_read_part_by_part(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MOST", len(LEASE) - 10)
    noted: list[str] = []

    def reply(body: dict[str, Any]) -> list[str]:
        system, asked = (one["content"] for one in body["messages"])
        if system == NOTES:
            noted.append(asked)
            return ["nothing."] if len(noted) == 2 else [f"Note {len(noted)} [1]."]
        return [asked]

    with reader_server(reply) as server:
        reader = Reader(server.url, "tiny", context=2048)
        monkeypatch.setattr(Reader, "room", 160)
        estimates: list[Any] = []
        asked: dict[str, Any] = {"reader": reader, "estimated": estimates.append}
        answer = model.stream(bank, "Summarize the lease.", k="all", **asked).result()
        noted_for_all = len(noted)
        monkeypatch.setattr(reader_module, "FEW", 1)
        few = model.answer(bank, "Summarize the lease.", reader=reader)
    # All of its text but the end that is over the limit, which is told, in order.
    assert "".join(one.text for one in answer.citations) == LEASE[:-10]
    assert len(estimates) == 1 and noted_for_all == estimates[0].blocks > 2
    assert "10 characters were not read" in answer.cut[0]
    # By its words alone, a question reads whole documents only if they are short.
    assert few.k < answer.k and "-k all reads whole documents" in few.cut[0]
    notes = [f"Note {n} [1]." for n in range(1, noted_for_all + 1) if n != 2]
    assert answer.text == "\n\n".join(notes) + "\n\nQuestion: Summarize the lease."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("According to [1], Anna Berg pays 35 euros.", ()),
        ("She pays 36 euros. However, Anna Novak pays Richardson.", ("36", "Novak", "Richardson")),
        ("The quotations do not say so [1][2].", ()),
        ("1. Anna Berg pays 35 euros.\n 2) She pays daily.", ()),
    ],
)
def test_names_and_numbers_of_no_source_are_told(text: str, words: tuple[str, ...]) -> None:
    assert invented(text, ["Anna Berg pays 35 euros."]) == words


def test_windows_cover_a_text() -> None:
    assert list(windows([0, 4, 9, 30, 31], 10)) == [(0, 9), (9, 19), (19, 29), (29, 31)]
    assert list(windows([0, 3], 10)) == [(0, 3)]


def test_a_server_shares_its_reader(model: SeDeM, bank: MemoryBank) -> None:
    async def both(reader: Reader) -> list[Answer]:
        with model.scheduler() as scheduler:
            requests = [Request(bank, QUESTION, reader=one) for one in (reader, None)]
            return [*await asyncio.gather(*map(scheduler.answer, requests))]

    with reader_server(lambda body: ["By the reader [2]."]) as server:
        by_reader, own = asyncio.run(both(Reader(server.url, "tiny")))
    assert by_reader.text == "By the reader [2]." and own.model != "tiny"

"""Fields of requests: what is accepted, what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sedem.serve.shapes import AskBody, ChatBody, Message, ResponsesBody

QUESTION = {"role": "user", "content": "Who?"}


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [QUESTION], **fields})


def test_parts_of_a_message_are_paragraphs() -> None:
    parts = [{"type": "text", "text": "A lease."}, {"type": "input_text", "text": "Who?"}]
    assert Message(role="user", content=parts).content == "A lease.\n\nWho?"  # type: ignore[arg-type]
    assert Message(role="assistant", content=None).content == ""  # type: ignore[arg-type]


def test_other_content_is_refused() -> None:
    for content in [
        1,
        [1],
        ["text"],
        [{"type": "image_url", "image_url": {}}],
        [{"type": "text"}],
        {"text": "a"},
    ]:
        with pytest.raises(ValidationError, match="it must be text, or a list of parts"):
            Message(role="user", content=content)


def test_halves_of_surrogate_pairs_are_refused() -> None:
    for content in ("\ud800", [{"type": "text", "text": "\ud800"}]):
        with pytest.raises(ValidationError, match="it is not Unicode text"):
            Message(role="user", content=content)  # type: ignore[arg-type]


def test_an_answer_that_is_sent_back_is_a_message() -> None:
    answer = {"role": "assistant", "content": "Ann.", "refusal": None, "annotations": [{}],
              "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip
    assert chat(messages=[QUESTION, answer]).messages[1].content == "Ann."
    with pytest.raises(ValidationError, match="tool_calls"):
        chat(messages=[QUESTION, {**answer, "tool_calls": [{"id": "1"}]}])


@pytest.mark.parametrize(
    ("field", "neutral"),
    [
        ("n", [1]),
        ("tools", [[]]),
        ("tool_choice", ["none", "auto"]),
        ("response_format", [{"type": "text"}]),
        ("logprobs", [False]),
        ("store", [False]),
    ],
)
def test_values_that_change_nothing_are_accepted_and_others_are_refused(
    field: str, neutral: list[Any]
) -> None:
    for value in (*neutral, None):
        chat(**{field: value})
    for value in ("x", 7, [1], {"type": "x"}):
        with pytest.raises(ValidationError, match=f"{field}\n  can only be"):
            chat(**{field: value})


def test_values_out_of_range_are_refused() -> None:
    for field, value in [
        ("seed", 2**63),
        ("seed", 1.5),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("stream", 1),
        ("ranking", "yes"),
        ("documents", "lease.txt"),
        ("documents", [-1]),
        ("documents", [True]),
        ("documents", ["\ud800"]),
        ("bank", "\ud800"),
        ("min_confidence", True),
        ("model", ""),
        ("model", "m" * 201),
        ("stop", [1]),
        ("k", [1]),
        ("k", {}),
        ("condition", []),
        ("model", "\ud800"),
        ("metadata", {"a": "\ud800"}),
        ("metadata", {"\ud800": "a"}),
        ("metadata", {"a": float("inf")}),
    ]:
        with pytest.raises(ValidationError) as refused:
            chat(**{field: value})
        assert refused.value.errors()[0]["loc"][0] == field


def test_limits_and_stops_have_the_names_that_were_used() -> None:
    assert chat(max_tokens=3).limit == ("max_tokens", 3)
    assert chat(max_tokens=3, max_completion_tokens=4).limit == ("max_completion_tokens", 4)
    assert chat(stop="a").stops == ("a",)
    assert chat(stop=None).stops == ()
    body = ResponsesBody(model="m", input="Who?", max_output_tokens=5)  # type: ignore[arg-type]
    assert (body.limit, body.stops) == (("max_output_tokens", 5), ())
    assert [(m.role, m.content) for m in body.messages] == [("user", "Who?")]
    told = body.model_copy(update={"instructions": "Be brief."})
    assert told.messages[0].role == "system"
    with pytest.raises(ValidationError, match="not Unicode text"):
        ResponsesBody(model="m", input="Who?", instructions="\ud800")  # type: ignore[arg-type]
    assert issubclass(ResponsesBody, AskBody)

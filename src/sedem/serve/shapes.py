"""Bodies of requests: the fields of OpenAI's API that make sense here, and sedem's own.

Fields that would change an answer in a way that sedem does not support are refused unless they are
neutral, such as `n: 1`. No field is ignored silently, except notes such as `user`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from sedem.config import AnswerBy, Condition, Hops, SelectBy
from sedem.validation import Flag, Share, Whole, WholeAbove0

MAX_STOPS = 16
"""Maximum number of stop strings of a request."""
UNSUPPORTED = "unsupported_field"
"""Type of the error about a field that asks for what sedem cannot do."""
TEXT_PARTS = ("text", "input_text", "output_text")


def _only(*neutral: Any) -> AfterValidator:
    """Return a check that accepts only null and values that change nothing."""

    def check(value: Any) -> Any:
        # In Python, True equals 1.
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral
        ):
            usual = ", ".join(map(repr, neutral))
            raise PydanticCustomError(UNSUPPORTED, f"can only be {usual} here; leave it out")
        return value

    return AfterValidator(check)


def _budget(value: Any) -> Any:
    if value not in (None, "all", "auto") and not _is_whole(value, 1):
        raise PydanticCustomError("k", "it must be a whole number of at least 1, 'all' or 'auto'")
    return value


def _documents(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        isinstance(one, str) or _is_whole(one, 0) for one in value
    ):
        raise PydanticCustomError("documents", "it must be a list of names or numbers of documents")
    return tuple(_unicode(one) if isinstance(one, str) else one for one in value)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise PydanticCustomError("stop", "it must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", f"it has more than {MAX_STOPS} strings")
    return tuple(stops)


def _text(value: Any) -> Any:
    """Return the text of a message, whose parts become paragraphs."""
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        parts = [part.get("text") for part in value if part.get("type") in TEXT_PARTS]
        if len(parts) == len(value) and all(isinstance(part, str) for part in parts):
            return "\n\n".join(parts)
    elif isinstance(value, str):
        return value
    raise PydanticCustomError("content", "it must be text, or a list of parts of type 'text'")


def _one_of(kind: Any) -> BeforeValidator:
    """Reject values outside of a Literal with the values that it can have."""

    def check(value: Any) -> Any:
        if value is not None and value not in get_args(kind):
            raise PydanticCustomError("choice", f"it can be {', '.join(map(str, get_args(kind)))}")
        return value

    return BeforeValidator(check)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "it is not Unicode text") from None
    return value


Echoed = Annotated[str, AfterValidator(_unicode)]
"""Text that is returned in the answer."""
Text = Annotated[
    str,
    BeforeValidator(_text, json_schema_input_type=str | list[dict[str, Any]]),
    AfterValidator(_unicode),
]
Notes = Any
"""A client's own note; it has no effect."""


class Body(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(Body):
    """One message; an answer that is sent back has fields of its own, which change nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    type: Literal["message"] = "message"
    name: Notes = None
    id: Notes = None
    status: Notes = None
    annotations: Notes = None
    refusal: Notes = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    tool_call_id: Notes = None


class AskBody(Body, ABC):
    """What every question may say.

    Attributes:
        bank: the bank to ask; without one, what the messages say is read.
        documents: names, indexes or file ids of the documents to answer from; None means all.
        k: blocks to use; None means the model's default.
        condition: form in which blocks are read; None means the model's default.
        selection: what blocks are selected by; None means the model's default.
        hops: 1, 2 or "auto", as in `Request`; None means the model's default.
        answer: "free", "span" or "auto", as in `Request`; None means the model's default.
        min_confidence: below it the answer is that the documents do not say.
        ranking: whether to return every block by score.
        stream: whether to send the answer as it is generated.
        temperature: 0 is greedy, which is the default here.
        seed: of sampling; without one, every answer is sampled anew.
    """

    model: Annotated[Echoed, Field(min_length=1, max_length=200)]
    bank: Annotated[Echoed, Field(max_length=200)] | None = None
    documents: Annotated[
        tuple[int | str, ...] | None,
        BeforeValidator(_documents, json_schema_input_type=list[int | str] | None),
    ] = None
    k: Annotated[int | Literal["all", "auto"] | None, BeforeValidator(_budget)] = None
    condition: Annotated[Condition | None, _one_of(Condition)] = None
    selection: Annotated[SelectBy | None, _one_of(SelectBy)] = None
    hops: Annotated[Hops | None, _one_of(Hops)] = None
    answer: Annotated[AnswerBy | None, _one_of(AnswerBy)] = None
    min_confidence: Share | None = None
    ranking: Flag = False
    stream: Flag | None = False
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Whole | None = None
    # Notes
    user: Notes = None
    metadata: dict[Echoed, Echoed] | None = None
    safety_identifier: Notes = None
    prompt_cache_key: Notes = None
    parallel_tool_calls: Notes = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    top_logprobs: Annotated[Any, _only(0)] = None
    store: Annotated[Any, _only(False)] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None

    @property
    @abstractmethod
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer's tokens."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return ()


class StreamOptions(Body):
    """What a stream has besides the answer."""

    include_usage: Flag | None = False
    include_obfuscation: Literal[False] | None = None


class ChatBody(AskBody):
    """POST /v1/chat/completions."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    stream_options: StreamOptions | None = None
    max_tokens: WholeAbove0 | None = None
    max_completion_tokens: WholeAbove0 | None = None
    stop: Annotated[
        tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)
    ] = ()
    n: Annotated[Any, _only(1)] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    frequency_penalty: Annotated[Any, _only(0)] = None
    logprobs: Annotated[Any, _only(False)] = None
    logit_bias: Annotated[Any, _only({})] = None
    modalities: Annotated[Any, _only(["text"])] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer's tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the answer."""
        return self.stop


def _messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesBody(AskBody):
    """POST /v1/responses."""

    input: Annotated[
        tuple[Message, ...],
        Field(min_length=1),
        BeforeValidator(_messages, json_schema_input_type=str | list[Message]),
    ]
    instructions: Echoed | None = None
    max_output_tokens: WholeAbove0 | None = None
    text: Annotated[Any, _only({}, {"format": {"type": "text"}})] = None
    truncation: Annotated[Any, _only("disabled", "auto")] = None
    include: Annotated[Any, _only([])] = None
    background: Annotated[Any, _only(False)] = None
    reasoning: Annotated[Any, _only({})] = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The instructions and the input as messages."""
        first = (Message(role="system", content=self.instructions),) if self.instructions else ()
        return (*first, *self.input)

    @property
    def limit(self) -> tuple[str, int | None]:
        """Name and value of the field that limits the answer's tokens."""
        return "max_output_tokens", self.max_output_tokens

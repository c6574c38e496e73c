"""Bodies of requests: the fields of OpenAI's API that have an effect here, and sedem's own.

Clients send many more fields. Those are taken, and the answer names them. A field is rejected only
if the answer could not be what it asks for, such as JSON.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
)
from pydantic_core import PydanticCustomError

from sedem.backbone.prompts import Turn
from sedem.config import WAYS, Flag, Number, Share
from sedem.guidance import AUTO
from sedem.method.selector import ALL, is_count
from sedem.selecting.plan import Options, Request

MAX_STOPS = 16
"""Maximum number of stop strings of a request."""
UNSUPPORTED = "unsupported_field"
"""Type of the error about a field that asks for what sedem cannot do."""
LIMITS = AliasChoices("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the limit of an answer's tokens; the first one counts."""
MAX_CHOICES = 8
"""Maximum number of answers to a request; more are not given."""
MAX_ALTERNATIVES = 20
"""Maximum number of tokens that are listed at one place of an answer."""
MAX_IGNORED, NAME_LENGTH = 100, 100
"""How many ignored fields are named, and how many characters of a name: they are sent back."""


def _refuse(asks: Callable[[Any], bool], problem: str) -> BeforeValidator:
    """Return a check that rejects values that ask for what sedem cannot do."""

    def check(value: Any) -> None:
        if asks(value):
            raise PydanticCustomError(UNSUPPORTED, problem)

    return BeforeValidator(check)


def requires_tool(choice: Any) -> bool:
    """Whether a choice of tools does not leave it to the model whether it calls one."""
    if isinstance(choice, dict):
        choice = choice.get("mode", choice.get("type", "required"))
    return choice not in (None, "none", "auto")


@dataclass(frozen=True)
class AnswerForm:
    """The JSON that an answer is wanted in.

    Attributes:
        field: the field that an answer is put into; None if one text is not enough.
        given: `response_format` of chat completions, for a reader.
    """

    field: str | None
    given: dict[str, Any]


def _answer_form(form: Any) -> AnswerForm | None:
    """Return the JSON that an answer is wanted in; None for plain text."""
    if isinstance(form, dict) and isinstance(form.get("format"), dict):
        form = form["format"]
    if not isinstance(form, dict) or form.get("type", "text") == "text":
        return None
    if form["type"] == "json_object":
        return AnswerForm("answer", form)
    schema = form.get("json_schema", form)
    if schema is form:  # as responses name it
        inner = {name: value for name, value in form.items() if name != "type"}
        form = {"type": form["type"], "json_schema": inner}
    schema = schema.get("schema") if isinstance(schema, dict) else None
    fields = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(fields, dict) and len(fields) == 1:
        ((name, field),) = fields.items()
        kind = field.get("type") if isinstance(field, dict) else None
        if kind in ("string", ["string", "null"]) and not _NARROWED.intersection(field):
            return AnswerForm(_unicode(name), form)
    return AnswerForm(None, form)


SEVERAL = (
    "asks for JSON of several fields, and sedem gives one text; ask for json_object or for a "
    "schema with one field of type string, or leave it out"
)
"""What a client is told of a form that only a reader can give."""
_NARROWED = frozenset(("enum", "const", "pattern", "format", "maxLength", "minLength"))
"""What a schema says of a text that not every answer is."""
NO_TOOL = "requires a tool, and sedem calls none; give 'auto' or leave it out"
"""What a client is told of a choice of tools that only a reader can follow."""
NoTool = Annotated[None, _refuse(requires_tool, NO_TOOL)]
AnswerJson = Annotated[
    AnswerForm | None, BeforeValidator(_answer_form, json_schema_input_type=dict[str, Any] | None)
]
Absent = Annotated[None, _refuse(bool, "cannot be used here; leave it out")]
"""A field that would make the answer another one, and that sedem does not have."""


def _budget(value: Any) -> Any:
    if value not in (None, ALL, AUTO) and not is_count(value):
        raise PydanticCustomError("k", "it must be a whole number of at least 1, 'all' or 'auto'")
    return value


def _documents(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not all(
        isinstance(one, str) or (type(one) is int and one >= 0) for one in value
    ):
        raise PydanticCustomError("documents", "it must be a list of names or numbers of documents")
    return tuple(_unicode(one) if isinstance(one, str) else one for one in value)


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value or []
    stops = [one for one in stops if one != ""] if isinstance(stops, list) else stops
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise PydanticCustomError("stop", "it must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", f"it has more than {MAX_STOPS} strings")
    return tuple(stops)


def _text(value: Any) -> Any:
    """Return the text of a message, whose parts become paragraphs."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise PydanticCustomError("content", "it must be text, or a list of parts of type 'text'")
    parts = [part.get("text", part.get("refusal")) for part in value]
    if not all(isinstance(part, str) for part in parts):
        problem = "has parts that are not text, and sedem reads text alone; leave them out"
        raise PydanticCustomError(UNSUPPORTED, problem)
    return "\n\n".join(parts)


def _one_of(kind: Any) -> BeforeValidator:
    """Reject values outside of a Literal with the values that it can have."""

    def check(value: Any) -> Any:
        if value is not None and value not in get_args(kind):
            raise PydanticCustomError("choice", f"it can be {', '.join(map(str, get_args(kind)))}")
        return value

    return BeforeValidator(check)


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


class Body(BaseModel):
    """A body that may have fields that nobody here knows."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Message(Body):
    """One message; of its other fields, those about tools count for a reader."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text = ""
    tool_calls: Any = None
    tool_call_id: Any = None

    @property
    def told(self) -> dict[str, Any]:
        """The message as a reader is told it."""
        told = {"role": self.role.replace("developer", "system"), "content": self.content}
        if self.role == "assistant" and isinstance(self.tool_calls, list) and self.tool_calls:
            return {**told, "content": self.content or None, "tool_calls": self.tool_calls}
        is_result = self.role == "tool" and self.tool_call_id
        return {**told, "tool_call_id": self.tool_call_id} if is_result else told


IN_JSON: dict[str, Any] = {
    "k": Annotated[int | Literal["all", "auto"] | None, BeforeValidator(_budget)],
    "documents": Annotated[
        tuple[int | str, ...] | None,
        BeforeValidator(_documents, json_schema_input_type=list[int | str] | None),
    ],
    "min_confidence": Share | None,
    "ranking": Flag,
    **{name: Annotated[kind | None, _one_of(kind)] for name, kind in WAYS.items()},
}
"""The options of a question that a client may give, and what each is in JSON."""

# Type checkers see no fields that are made, so these are read as `AskBody.options`.
if TYPE_CHECKING:

    class WithOptions(Body):
        """Every body has this field, each under a name of its own."""

        answer_form: AnswerForm | None
else:
    usual = {one.name: one.default for one in fields(Request)}
    WithOptions = create_model(
        "WithOptions",
        __base__=Body,
        **{name: (kind, usual[name]) for name, kind in IN_JSON.items()},
    )


class AskBody(WithOptions, ABC):
    """What every question may say; its options are those of `Request`.

    Attributes:
        bank: the bank to ask; without one, what the messages say is read.
        stream: whether to send the answer as it is generated.
        temperature: 0 is greedy, which is the default here.
        top_k: sample from this many of the likeliest tokens; 0 or less means from all.
        seed: of sampling; without one, every answer is sampled anew.
        max_tokens: of an answer; below 1, as many as the server allows.
    """

    model: Annotated[Echoed, Field(min_length=1, max_length=200)]
    bank: Annotated[Echoed, Field(max_length=200)] | None = None
    stream: Flag | None = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: Annotated[int | None, Field(validation_alias=LIMITS)] = None
    stop: Annotated[
        tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)
    ] = ()
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None

    @property
    @abstractmethod
    def said(self) -> Sequence[Message]:
        """The conversation."""

    @property
    def turns(self) -> list[Turn]:
        """Its roles and words."""
        return [(one.role, one.content) for one in self.said]

    @property
    def tool_fields(self) -> dict[str, Any]:
        """The fields about tools as a reader is told them; empty if there are no functions."""
        extra = self.model_extra or {}
        given = extra["tools"] if isinstance(extra.get("tools"), list) else []
        tools = [
            one for one in map(_function, given) if isinstance(one, dict) and "function" in one
        ]
        if not tools:
            return {}
        choice, parallel = _function(self.tool_choice), extra.get("parallel_tool_calls")
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}

    @property
    def options(self) -> Options:
        """The options of the question, without its context."""
        options: Any = {name: getattr(self, name) for name in IN_JSON}
        return options

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return 1

    @property
    def alternatives(self) -> int | None:
        """How many tokens to list at each place of the answer; None if none are asked for."""
        if self.logprobs is None or self.logprobs is False:
            return None
        # Chat says whether, and plain completions how many.
        count = self.top_logprobs if self.logprobs is True else self.logprobs
        return min(max(count or 0, 0), MAX_ALTERNATIVES)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that have a value and no effect."""
        names = [name for name, value in (self.model_extra or {}).items() if value]
        return tuple(name[:NAME_LENGTH] for name in names[:MAX_IGNORED])


class StreamOptions(Body):
    """What a stream has besides the answer."""

    include_usage: Flag | None = False


class ChoicesBody(AskBody):
    """What chat and plain completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    answer_form: Annotated[AnswerJson, Field(validation_alias="response_format")] = None

    @property
    def choices(self) -> int:
        """How many answers are asked for."""
        return min(max(self.n or 1, 1), MAX_CHOICES)


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    function_call: NoTool = None

    @property
    def said(self) -> Sequence[Message]:
        """The messages."""
        return self.messages


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if not isinstance(value, str):
        raise PydanticCustomError("prompt", "it must be text, or a list with one text")
    return value


class CompletionBody(ChoicesBody):
    """POST /v1/completions."""

    prompt: Annotated[
        str,
        BeforeValidator(_prompt, json_schema_input_type=str | list[str]),
        AfterValidator(_unicode),
    ]
    suffix: Absent = None
    echo: Absent = None
    tool_choice: NoTool = None

    @property
    def said(self) -> Sequence[Message]:
        """The prompt as the user's message."""
        return [Message(role="user", content=self.prompt)]

    @property
    def tool_fields(self) -> dict[str, Any]:
        """Nothing: such an answer is text alone."""
        return {}


def _function(tool: Any) -> Any:
    """Return a tool, or the choice of one, as chat completions name it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    inner = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": inner}


def _messages(value: Any) -> Any:
    """Return input as messages; calls and results of tools are those of a tool."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        _of_tool(item)
        if isinstance(item, dict) and item.get("type", "message") != "message"
        else item
        for item in value
    ]


def _of_tool(item: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool, its result, or anything else that is no message as a message."""
    if item["type"] == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "content": item.get("output")}
    is_called = item["type"] == "function_call_output"
    return {**result, "tool_call_id": item.get("call_id")} if is_called else result


class ResponsesBody(AskBody):
    """POST /v1/responses."""

    input: Annotated[
        tuple[Message, ...],
        Field(min_length=1),
        BeforeValidator(_messages, json_schema_input_type=str | list[Message]),
    ]
    instructions: Echoed | None = None
    answer_form: Annotated[AnswerJson, Field(validation_alias="text")] = None
    previous_response_id: Absent = None
    conversation: Absent = None
    prompt: Absent = None

    @property
    def said(self) -> Sequence[Message]:
        """The instructions and the input."""
        told = [Message(role="system", content=self.instructions)] if self.instructions else []
        return [*told, *self.input]

"""Settings checked by pydantic, and validation errors turned into one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sedem.errors import ConfigError


def _not_a_bool(value: Any) -> Any:
    # A bool is a number in Python, but not a valid number here.
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "a number is needed")
    return value


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        raise PydanticCustomError("share", "it must be from 0 to 1")
    return value


Flag = Annotated[bool, Strict()]
"""true or false; neither 1 nor "yes"."""

LARGEST = 2**63 - 1
"""The largest whole number of a setting: that of 64 bits."""
WIDEST = 2**16
"""The largest width, rank or number of heads; modules are allocated before weights are read."""

Whole = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]
WholeAbove0 = Annotated[int, Strict(), Field(gt=0, le=LARGEST)]
WholeFrom0 = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
WidthAbove0 = Annotated[int, Strict(), Field(gt=0, le=WIDEST)]
WidthFrom0 = Annotated[int, Strict(), Field(ge=0, le=WIDEST)]
"""Whole numbers; true, 2.0 and "2" are refused."""

_finite = Field(allow_inf_nan=False)
Number = Annotated[float, BeforeValidator(_not_a_bool), _finite]
NumberAbove0 = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(gt=0)]
NumberFrom0 = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(ge=0)]
Share = Annotated[float, BeforeValidator(_not_a_bool), AfterValidator(_share)]
"""Finite numbers; a string that spells one is accepted, because YAML reads 1e-4 as a string."""


class Settings(BaseModel):
    """Base class of settings: frozen, no unknown keys, every value checked.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self).__name__, type(self))) from None

    # With this mark pydantic builds nested settings without calling __init__, so an error of a
    # nested setting reaches the outermost one and is reported with its whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def from_entries(cls, entries: Any, source: str) -> Self:
        """Build settings from the contents of a file.

        Args:
            entries: a mapping from keys to values, nested as the settings are.
            source: the file, for the message.

        Raises:
            ConfigError: a key is unknown or missing, or a value is not allowed.
        """
        try:
            return cls.model_validate(entries)
        except ValidationError as error:
            raise ConfigError(explain(error, source, cls)) from None

    def with_changes(self, **changes: Any) -> Self:
        """A copy with some settings changed; all settings are validated again.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        return type(self)(**{**dict(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON types: nested dicts and lists."""
        return self.model_dump(mode="json")

    def without_defaults(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as JSON types."""
        return self.model_dump(mode="json", exclude_defaults=True)


def explain(error: ValidationError, source: str, kind: Any) -> str:
    """Turn a validation error into one sentence: what was given, where, and what is needed.

    The sentence reports the first problem and counts the others. Unknown keys come first, because a
    missing key is often one that was misspelled.

    Args:
        error: the error that pydantic raised.
        source: where the values come from, such as a file.
        kind: the model or other type that they were validated against.

    Returns:
        Such as "recipe.yaml: optimization.steps is 'many'; a whole number is needed".
    """
    problems: dict[str, list[ErrorDetails]] = {}
    for detail in sorted(error.errors(), key=lambda detail: detail["type"] not in _UNKNOWN):
        # A union reports one error for each of its members.
        problems.setdefault(_place(kind, detail["loc"])[0], []).append(detail)
    (place, first), *others = problems.items()
    parent, within = _place(kind, first[0]["loc"][:-1])
    # pydantic does not count wrong entries, so it also reports their list as too short.
    others = [one for one in others if not place.startswith((f"{one[0]}.", f"{one[0]}["))]
    if first[0]["type"] in _UNKNOWN:
        near = nearest(str(first[0]["loc"][-1]), _names(within))
        others = [one for one in others if one[0] != (f"{parent}.{near}" if parent else near)]
    more = f" (and {len(others)} more problem{'s' * (len(others) > 1)})" if others else ""
    return f"{source}: {_sentence(place, parent, within, first)}{more}"


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_EMPTY = ("too_short", "string_too_short")
_KEYS = ("model_type", "model_attributes_type", "dataclass_type", "dict_type", "mapping_type")

_NEEDED = {
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "string_type": "text is needed",
    "tuple_type": "a list is needed",
    "list_type": "a list is needed",
    "set_type": "a list is needed",
    "none_required": "null is needed",
    "greater_than": "it must be above {gt:g}",
    "greater_than_equal": "it must be {ge:g} or more",
    "less_than": "it must be below {lt:g}",
    "less_than_equal": "it must be {le:g} or less",
    "literal_error": "it can be {expected}",
    "enum": "it can be {expected}",
    "too_long": "at most {max_length} can be given",
    "string_too_long": "at most {max_length} characters can be given",
}
"""What is needed, by pydantic's error type."""


def _sentence(place: str, parent: str, within: Any, details: Sequence[ErrorDetails]) -> str:
    """The sentence about the problem at one path, without the source."""
    detail = details[0]
    kind, given = detail["type"], _shown(detail["input"])
    before = f"{parent}: " if parent else ""
    if kind in _UNKNOWN:
        name, known = str(detail["loc"][-1]), _names(within)
        near = nearest(name, known)
        hint = f"did you mean '{near}'?" if near else f"known are {', '.join(known)}"
        return f"{before}unknown key '{name}'; {hint}"
    if kind in ("missing", "missing_argument"):
        return f"{before}missing key '{detail['loc'][-1]}'; add it"
    here = f"{place}: " if place else ""
    if kind == "value_error":
        return f"{here}{detail['ctx']['error']}"
    if kind in _KEYS:
        return f"{here}keys are needed here, got {given}"
    if kind in _EMPTY and not detail["input"]:
        return f"{place or 'it'} is empty; give at least one"
    needed = dict.fromkeys(map(_needed, details))
    return f"{place or 'it'} is {given}; {', or '.join(needed)}"


def _needed(detail: ErrorDetails) -> str:
    known, context = _NEEDED.get(detail["type"]), dict(detail.get("ctx", {}))
    if "expected" in context:
        context["expected"] = context["expected"].replace("'", "")
    return known.format(**context) if known else detail["msg"]


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits.
        return "a number of too many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_choice(name: str, value: object, known: Any) -> None:
    """Check that a value is one of a Literal's.

    Raises:
        ConfigError: it is not; the message has those that are.
    """
    if value not in get_args(known):
        raise ConfigError(f"{name} is '{value}'; it can be {', '.join(map(str, get_args(known)))}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to a wrong one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def _place(kind: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """A location as a dotted path such as `data.training[1].path`, and the type expected there."""
    place, at = "", _bare(kind)
    for step in loc:
        if get_origin(at) in (Union, UnionType):
            # This step names the union member that was tried; it is not a key.
            members = (member for member in map(_bare, get_args(at)))
            at = next((m for m in members if getattr(m, "__name__", None) == step), Any)
            continue
        if step == "[key]":
            continue
        if isinstance(step, int):
            place += f"[{step}]"
        else:
            place = f"{place}.{step}" if place else step
        at = _bare(_names(at).get(str(step), _entry(at, step)))
    return place, at


def _bare(kind: Any) -> Any:
    """A type without its annotations, and without None if it is optional."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        return _bare(members[0]) if len(members) == 1 else Union[tuple(members)]  # noqa: UP007
    return kind


def _names(kind: Any) -> Mapping[str, Any]:
    """The fields of a model and their types; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {f.alias or name: f.annotation for name, f in kind.model_fields.items()}
    return {}


def _entry(kind: Any, step: int | str) -> Any:
    """The type of an entry of a list, tuple or mapping."""
    parts = get_args(kind)
    if not parts or get_origin(kind) not in (list, tuple, dict):
        return Any
    if isinstance(step, str):
        return parts[-1]
    return parts[step] if len(parts) > step and Ellipsis not in parts else parts[0]

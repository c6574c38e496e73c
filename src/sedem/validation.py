"""Settings checked by pydantic, and its validation errors in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from sedem.errors import ConfigError, cut


def _not_a_bool(value: Any) -> Any:
    # A bool is a number in Python, but not a valid number here.
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
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
Share = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(ge=0, le=1)]
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
            raise ConfigError(explain(error, type(self).__name__)) from None

    # With this mark pydantic builds nested settings without calling __init__, so an error of a
    # nested setting reaches the outermost one and is reported with its whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, entries: Any) -> Any:
        """Refuse an unknown key first: a missing one is often misspelled."""
        known = [*cls.model_fields]
        unknown = (
            [key for key in entries if key not in known] if isinstance(entries, Mapping) else []
        )
        if unknown:
            near = nearest(str(unknown[0]), known)
            hint = f"did you mean '{near}'?" if near else f"known are {', '.join(known)}"
            context = {"key": str(unknown[0]), "hint": hint}
            raise PydanticCustomError("unknown_key", "unknown key '{key}'; {hint}", context)
        return entries

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
            raise ConfigError(explain(error, source)) from None

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


def explain(error: ValidationError, source: str) -> str:
    """Turn a validation error into a sentence: the place, what was given, and pydantic's words.

    The sentence is about the first problem.

    Args:
        error: the error that pydantic raised.
        source: where the values come from, such as a file.

    Returns:
        Such as "a.yaml: optimization.steps is 'many'; input should be a valid integer".
    """
    told: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # Members of a union, such as "literal['all']", are no keys.
        steps = [one for one in detail["loc"] if isinstance(one, int) or one.isidentifier()]
        place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in steps)
        told.setdefault(place.removeprefix("."), []).append(detail)
    place, (first, *others) = next(iter(told.items()))
    if first["type"] in ("missing", "value_error", "unknown_key"):
        words = first["msg"].removeprefix("Value error, ")
        words = words if first["type"] == "value_error" else words[:1].lower() + words[1:]
        return ": ".join(filter(None, (source, place, words)))
    # A union reports an error for each of its members.
    every = (one["msg"][:1].lower() + one["msg"][1:] for one in (first, *others))
    try:
        given = cut(repr(first["input"]), 77)
    except ValueError:  # Python writes no number of more than 4,300 digits.
        given = "a number of too many digits"
    return f"{source}: {place or 'it'} is {given}; {', or '.join(dict.fromkeys(every))}"


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

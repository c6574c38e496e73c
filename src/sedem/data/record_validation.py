"""Pydantic models of records; errors name the record, the field, and what is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from sedem.data.records import Record
from sedem.errors import DataError
from sedem.validation import explain


def _unicode(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "unicode",
            "Unicode text is needed ({half} at character {place} is half a surrogate pair)",
            {"half": ascii(value[error.start]), "place": error.start},
        ) from None
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "text with more than white space is needed")
    return value


def _id_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _objects(table: Any) -> Any:
    """Objects of a table of columns, as the hub stores lists of objects; others unchanged."""
    if not isinstance(table, dict) or not all(isinstance(c, list) for c in table.values()):
        return table
    if len({len(column) for column in table.values()}) > 1:
        raise ValueError(f"the columns {', '.join(table)} differ in length")
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


Text = Annotated[str, Strict(), AfterValidator(_unicode)]
FilledText = Annotated[Text, AfterValidator(_not_blank)]
"""Text that is not only white space."""
Id = Annotated[Text, BeforeValidator(_id_text)]
"""Text, or an integer as text."""
FromColumns = BeforeValidator(_objects)
"""Accepts a list of objects also as a table of columns."""


class RecordModel(BaseModel):
    """Base class of records; fields that a model does not declare are ignored."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def from_record(cls, record: Record, place: str) -> Self:
        """Validate a record.

        Raises:
            DataError: a field is missing or has another type.
        """
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            raise DataError(explain(error, place, cls)) from None


def with_id(place: str, record: Record) -> str:
    """The place of a record with its id, if it has one."""
    given = record.get("_id") or record.get("id")
    return place if given is None else f"{place} (id {str(given)!r})"


@contextmanager
def within(place: str) -> Iterator[None]:
    """Prefix every `DataError` that a record causes with the record's place."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from None

"""Fields of a record: taken out with their type checked; errors name the record and the field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sedem.errors import ConfigError, DataError
from sedem.types import check_unicode

SHOWN = 60
"""Characters of a wrong value that an error shows."""


def text(record: Any, field: str, place: str, *, blank: bool = False) -> str:
    """A string.

    Args:
        record: the object that has the field.
        field: its name.
        place: of the record, for errors.
        blank: whether white space alone will do.

    Raises:
        DataError: it is missing, something else or no Unicode text.
    """
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str) or not (blank or value.strip()):
        needed = "a string" if blank else "a non-empty string"
        raise DataError(
            f"{place}, field '{field}': {needed} is needed, got {_given(record, field)}"
        )
    check_unicode(value, f"{place}, field '{field}'")
    return value


def number(record: Any, field: str, place: str) -> int:
    """A whole number.

    Raises:
        DataError: it is missing or something else.
    """
    value = record.get(field) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(
            f"{place}, field '{field}': a whole number is needed, got {_given(record, field)}"
        )
    return value


def entries(record: Any, field: str, place: str) -> list[Any]:
    """A list, empty or not.

    Raises:
        DataError: it is missing or something else.
    """
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, list):
        raise DataError(f"{place}, field '{field}': a list is needed, got {_given(record, field)}")
    return value


def at_least(least: int, **options: int) -> None:
    """Check numbers that a set is made with.

    Raises:
        ConfigError: one is less.
    """
    for name, value in options.items():
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _given(record: Any, field: str) -> str:
    missing = isinstance(record, dict) and field not in record
    return "nothing" if missing else shown(record[field] if isinstance(record, dict) else record)


def shown(value: Any) -> str:
    """A value as an error shows it: cut when it is long."""
    whole = repr(value)
    return whole if len(whole) <= SHOWN else f"{whole[:SHOWN]}..."


@contextmanager
def within(place: str, field: str | None = None) -> Iterator[None]:
    """Let every error that a record causes name its place, whatever in a reader it came from.

    Args:
        place: of the record.
        field: the one that is being read.

    Raises:
        DataError: something in the block was missing, of another type or not fit for an example.
    """
    where = place if field is None else f"{place}, field '{field}'"
    try:
        yield
    except DataError as error:
        if str(error).startswith(place):
            raise
        raise DataError(f"{where}: {error}") from None
    except KeyError as error:
        if error.args == (field,):
            raise DataError(f"{where}: it is missing") from None
        raise DataError(f"{where}: the field {error} is missing") from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{where}: it is not in the set's schema ({error})") from None

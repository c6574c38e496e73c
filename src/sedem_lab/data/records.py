"""Records of a file, or of a folder of shards, streamed one at a time with their places.

Files may be compressed with gzip, xz, bzip2 or zstd. A record is a line of JSON lines, an entry of
a JSON array, one JSON object, or a row of parquet. Errors name its place. The readers of the sets
interpret the records.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from sedem.config import explain
from sedem.errors import DataError, first_line
from sedem.untrusted import (
    JSON_BYTES,
    LINE_CHARACTERS,
    check_file,
    is_folder,
    open_file,
    parse_json,
)

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]
"""Records with their places."""

ENDINGS = (".json", ".jsonl", ".parquet")
ROWS = 64
"""Number of rows read at a time from a parquet file."""


def kind(path: Path) -> str:
    """The suffix of a file without its compression suffix: ".jsonl" for "articles.jsonl.xz".

    Empty if the file has no suffix.
    """
    endings = [ending for ending in path.suffixes if ending not in _OPENERS]
    return endings[-1] if endings else ""


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text file; its suffix determines the compression.

    Raises:
        DataError: the file is missing, damaged, not a regular file or not UTF-8, or a library is
            missing.
    """
    try:
        opener = _OPENERS.get(path.suffix, nullcontext)
        with (
            open_file(path, DataError) as stored,
            opener(stored) as file,
            io.TextIOWrapper(file, encoding="utf-8") as text,
        ):
            yield text
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


def read_records(path: Path) -> Records:
    """Records of a file, or of the shards of a folder in order of name.

    Raises:
        DataError: the file or folder cannot be read, or an entry is not a record; names the place.
    """
    for shard in shards(path):
        if kind(shard) == ".parquet":
            yield from _rows(shard)
        elif kind(shard) == ".jsonl":
            yield from _lines(shard)
        else:
            yield from _json(shard)


def shards(path: Path) -> list[Path]:
    """The file itself, or the data files of a folder.

    Raises:
        DataError: the folder has no data file.
    """
    if not is_folder(path):
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and kind(file) in ENDINGS)
    if not files:
        raise DataError(f"folder '{path}' holds no {', '.join(ENDINGS)} file; give a file")
    return files


def first_field_names(path: Path) -> set[str]:
    """Names of all fields of the first record of a file, including nested ones.

    Raises:
        DataError: as `read_records`.
    """
    names: set[str] = set()
    values: list[Any] = [next(read_records(path), ("", {}))[1]]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            names.update(value)
            value = list(value.values())
        values += [entry for entry in value if isinstance(entry, dict | list)]
    return names


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: the file is too large or not JSON; names line and column.
    """
    with open_text(path) as file:
        text = file.read(JSON_BYTES + 1)
    if len(text) > JSON_BYTES:
        raise DataError(
            f"'{path}' is one JSON value of more than {JSON_BYTES:,} characters, which would be "
            "read whole; save it as JSON lines"
        )
    return parse_json(text, f"'{path}'", DataError)


def _open_zstd(stored: IO[bytes]) -> Any:
    try:
        from pyarrow import CompressedInputStream
    except ImportError:
        raise DataError("install 'sedem[train]' to read a file that zstd has compressed") from None
    return CompressedInputStream(stored, "zstd")


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _open_zstd,
}


def _lines(path: Path) -> Records:
    with open_text(path) as file:
        lines = iter(lambda: file.readline(LINE_CHARACTERS + 1), "")
        for number, line in enumerate(lines, start=1):
            place = f"'{path}', line {number}"
            if len(line) > LINE_CHARACTERS:
                raise DataError(
                    f"{place} has more than {LINE_CHARACTERS:,} characters; put one object per line"
                )
            if line.strip():
                yield place, _object(parse_json(line.strip(), place, DataError), place)


def _json(path: Path) -> Records:
    """Records of a file that is an array, JSON lines, or one object over many lines."""
    with open_text(path) as file:
        lines = iter(lambda: file.readline(LINE_CHARACTERS), "")
        first = next(filter(None, map(str.strip, lines)), "{}")
    if first[0] not in "[{":
        raise DataError(f"'{path}' is not JSON: it begins with neither '[' nor '{{'")
    try:
        parse_json(first if first[0] == "{" else "", f"'{path}'", DataError)
    except DataError:
        value = read_json(path)
        if isinstance(value, dict):
            yield f"'{path}'", value
            return
        for number, entry in enumerate(value, start=1):
            yield f"'{path}', entry {number}", _object(entry, f"'{path}', entry {number}")
    else:
        yield from _lines(path)


def _object(entry: Any, place: str) -> Record:
    if not isinstance(entry, dict):
        raise DataError(f"{place}: a JSON object is needed, this is {type(entry).__name__}")
    return entry


def _rows(path: Path) -> Records:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"'{path}' is a parquet file; install 'sedem[train]' to read it") from None
    try:
        check_file(path, DataError)
        with ParquetFile(path) as file:
            count = 0
            for batch in file.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    count += 1
                    yield f"'{path}', row {count}", row
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except (ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read as parquet: {first_line(error)}") from None


def _unicode(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "unicode",
            "it must be Unicode text ({half} at character {place} is half a surrogate pair)",
            {"half": ascii(value[error.start]), "place": error.start},
        ) from None
    return value


def _not_blank(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("blank", "text with more than white space is needed")
    return value


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
Id = Annotated[Text, BeforeValidator(lambda given: str(given) if type(given) is int else given)]
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
            raise DataError(explain(error, place)) from None


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

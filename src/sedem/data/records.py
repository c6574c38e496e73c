"""Records of a file, or of a folder of shards, streamed one at a time with their places.

A record is a line of JSON lines, an entry of a JSON array, one JSON object, or a row of parquet.
Errors name its place. The readers of the sets interpret the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
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

from sedem.data.compression import kind, open_bytes, open_text
from sedem.errors import DataError, first_line
from sedem.untrusted import (
    JSON_BYTES,
    LINE_CHARACTERS,
    check_depth,
    check_file,
    is_folder,
    parse_json,
)
from sedem.validation import explain

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]
"""Records with their places."""

ENDINGS = (".json", ".jsonl", ".parquet")
BLANKS = 1000
"""White space that may precede the first character of JSON."""
ROWS = 64
"""Number of rows read at a time from a parquet file."""


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


def first_field_names(path: Path) -> Iterator[str]:
    """Names of all fields of the first record of a file, including nested ones; may repeat.

    JSON is read no further than the caller asks for.

    Raises:
        DataError: as `read_records`.
    """
    try:
        yield from _streamed_names(path)
    except _StreamingError:
        yield from _names(next(read_records(path), ("", {}))[1])


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


def read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Objects of a JSON-lines file with their line numbers; blank lines are skipped.

    Raises:
        DataError: a line is not a JSON object.
    """
    with open_text(path) as file:
        lines = iter(lambda: file.readline(LINE_CHARACTERS + 1), "")
        for number, line in enumerate(lines, start=1):
            place = f"'{path}', line {number}"
            if len(line) > LINE_CHARACTERS:
                raise DataError(
                    f"{place} has more than {LINE_CHARACTERS:,} characters; put one object per line"
                )
            if line.strip():
                yield number, _object(parse_json(line.strip(), place, DataError), place)


def _lines(path: Path) -> Records:
    for number, entry in read_lines(path):
        yield f"'{path}', line {number}", entry


def _json(path: Path) -> Records:
    """Records of a file that is an array, JSON lines, or one object over many lines."""
    with open_text(path) as file:
        start = file.read(1)
        for _ in range(BLANKS):
            if not start.isspace():
                break
            start = file.read(1)
        if start and start not in "[{":
            raise DataError(f"'{path}' is not JSON: it begins with neither '[' nor '{{'")
        first = start if start == "[" else start + file.readline(LINE_CHARACTERS)
    if start == "[":
        yield from _array(path)
        return
    try:
        parse_json(first or "{}", f"'{path}'", DataError)
    except DataError:
        yield f"'{path}'", _object(read_json(path), f"'{path}'")
    else:
        yield from _lines(path)


def _array(path: Path) -> Records:
    """Entries of an array; an array that cannot be streamed is parsed as a whole."""
    count = 0
    try:
        for count, entry in enumerate(_streamed_entries(path), start=1):
            yield f"'{path}', entry {count}", _object(entry, f"'{path}', entry {count}")
    except _StreamingError:
        # json reports line and column of an error, and reads what ijson cannot, such as NaN.
        for number, entry in enumerate(read_json(path)[count:], start=count + 1):
            yield f"'{path}', entry {number}", _object(entry, f"'{path}', entry {number}")


def _object(entry: Any, place: str) -> Record:
    if not isinstance(entry, dict):
        raise DataError(f"{place}: a JSON object is needed, this is {type(entry).__name__}")
    return entry


class _StreamingError(Exception):
    """ijson is not installed, fails, or would give other values than json.

    It raises a SystemError for an integer with more digits than Python accepts.
    """


def _ijson() -> Any:
    try:
        import ijson
    except ImportError:
        raise _StreamingError from None
    return ijson


def _streamed_entries(path: Path) -> Iterator[Any]:
    ijson = _ijson()
    repeated: list[str] = []

    class Watched(dict[str, Any]):
        # ijson cannot pass on an exception from this method.
        def __setitem__(self, key: str, value: Any) -> None:
            repeated.extend([key] if key in self else [])
            super().__setitem__(key, value)

    with open_bytes(path) as file:
        watched = _SurrogateWatch(file)
        try:
            for entry in ijson.items(watched, "item", use_float=True, map_type=Watched):
                if watched.found:
                    raise _StreamingError
                if repeated:
                    raise DataError(
                        f"'{path}' has an object with the key '{repeated[0]}' twice; remove one"
                    )
                check_depth(entry, f"'{path}'", DataError)
                yield entry
        except (ijson.JSONError, UnicodeDecodeError, SystemError):
            raise _StreamingError from None


class _SurrogateWatch:
    """A JSON file wrapper that notices an escaped lone high surrogate in the bytes it passes on.

    ijson replaces such a surrogate with "?" without an error. A lone low one does raise an error.
    """

    _LONE = re.compile(
        rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
        rb"(?:[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"  # no low surrogate follows
    )
    _LONGEST = 10

    def __init__(self, file: IO[bytes]) -> None:
        self.found = False
        self._file = file
        self._end = b""

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the file."""
        chunk = self._file.read(size)
        seen = self._end + chunk
        self.found = self.found or self._LONE.search(seen) is not None
        self._end = seen[1 - self._LONGEST :]
        return chunk


def _streamed_names(path: Path) -> Iterator[str]:
    if kind(path) == ".parquet":
        raise _StreamingError
    ijson = _ijson()
    outside: int | None = None
    depth = 0
    with open_bytes(path) as file:
        try:
            # A JSON-lines file has several values.
            for event, value in ijson.basic_parse(file, multiple_values=True):
                if outside is None:
                    outside = int(event == "start_array")
                if event == "map_key":
                    yield value
                depth += event.startswith("start_") - event.startswith("end_")
                if event.startswith("end_") and depth <= outside:
                    return
        except (ijson.JSONError, UnicodeDecodeError, SystemError):
            raise _StreamingError from None


def _names(value: Any) -> Iterator[str]:
    """Names of all fields of a JSON value, including nested ones."""
    if isinstance(value, dict):
        yield from value
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            yield from _names(entry)


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

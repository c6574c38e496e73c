"""Records of a file or of a folder of shards, one at a time, whatever form holds them.

A record comes with its place, which errors name. Forms: JSON lines, a JSON array, one JSON object,
parquet rows. Sets circulate in all of them; what a record means is the readers' business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sedem.data.files import kind, open_text, read_json, read_lines
from sedem.errors import DataError

Record = dict[str, Any]
Records = Iterator[tuple[str, Record]]
"""Records with their places."""

ENDINGS = (".json", ".jsonl", ".parquet")
CHARACTERS = 1 << 20
"""Read at a time from a JSON array."""
ROWS = 64
"""Read at a time from a parquet file."""

_BETWEEN = re.compile(r"[\s,]*")


def read_records(path: Path) -> Records:
    """Records of a file, or of the shards of a folder in the order of their names.

    Raises:
        DataError: there is nothing to read, or something that is no record; the place is named.
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
        DataError: the folder holds none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and kind(file) in ENDINGS)
    if not files:
        raise DataError(f"folder '{path}' holds no {', '.join(ENDINGS)} file; give a file")
    return files


def _lines(path: Path) -> Records:
    for number, entry in read_lines(path):
        yield f"'{path}', line {number}", entry


def _json(path: Path) -> Records:
    """A file that may be an array, lines, or one object over many lines."""
    with open_text(path) as file:
        start = file.read(1)
        while start and start.isspace():
            start = file.read(1)
        if start == "[":
            yield from _array(path, file)
            return
        first = start + file.readline()
    try:
        json.loads(first or "{}")
    except json.JSONDecodeError:
        yield f"'{path}'", _object(read_json(path), f"'{path}'")
    else:
        yield from _lines(path)


def _array(path: Path, file: IO[str]) -> Records:
    """Entries of an array whose bracket has been read; never more text than a few of them."""
    decoder, buffer, at, count = json.JSONDecoder(), "", 0, 0
    while True:
        found = _BETWEEN.match(buffer, at)
        assert found is not None
        at = found.end()
        if buffer.startswith("]", at) and not (buffer[at + 1 :] + file.read()).strip():
            return
        try:
            entry, at = decoder.raw_decode(buffer, at)
        except json.JSONDecodeError:
            more = file.read(max(CHARACTERS, len(buffer) - at))
            if not more:
                read_json(path)  # which says what is wrong, and where
                raise DataError(f"'{path}' is no JSON array") from None
            buffer, at = buffer[at:] + more, 0
        else:
            count += 1
            yield f"'{path}', entry {count}", _object(entry, f"'{path}', entry {count}")


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
        with ParquetFile(path) as file:
            count = 0
            for batch in file.iter_batches(batch_size=ROWS):
                for row in batch.to_pylist():
                    count += 1
                    yield f"'{path}', row {count}", row
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except (ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"'{path}' cannot be read as parquet: {reason}") from None

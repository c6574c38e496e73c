"""Reading data files: JSON, JSON lines and text, compressed or not; errors name the line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sedem.errors import DataError

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text file, decompressing .gz, .xz, .bz2 and .zst by its ending.

    Raises:
        DataError: it is missing, a folder, damaged or not UTF-8.
    """
    if path.is_dir():
        raise DataError(f"'{path}' is a folder; give a file")
    try:
        if path.suffix == ".zst":
            with _open_zstd(path) as file:
                yield file
        elif path.suffix in _OPENERS:
            with _OPENERS[path.suffix](path, "rt", encoding="utf-8") as file:
                yield file
        else:
            with path.open(encoding="utf-8") as file:
                yield file
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


@contextmanager
def _open_zstd(path: Path) -> Iterator[IO[str]]:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"'{path}' is compressed with zstd; install 'zstandard' to read it"
        ) from None
    try:
        with zstandard.open(path, "rt", encoding="utf-8") as file:
            yield file
    except zstandard.ZstdError as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: it is not JSON; the place is named.
    """
    with open_text(path) as file:
        try:
            return json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(
                f"'{path}' is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from None


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file with their line numbers; blank lines are passed over.

    Raises:
        DataError: a line is not a JSON object.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"'{path}', line {number}: not JSON ({error.msg})") from None
            if not isinstance(entry, dict):
                raise DataError(
                    f"'{path}', line {number}: a JSON object is needed, this is "
                    f"{type(entry).__name__}"
                )
            yield number, entry


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records of a file that is one JSON array or JSON lines: sets circulate in both forms."""
    with open_text(path) as file:
        first = file.read(1)
        while first and first.isspace():
            first = file.read(1)
    if first != "[":
        return [entry for _, entry in read_lines(path)]
    records = read_json(path)
    if not all(isinstance(record, dict) for record in records):
        raise DataError(f"'{path}' is a JSON array whose entries are not all objects")
    return list(records)

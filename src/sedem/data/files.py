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

from sedem.data.zstd import open_zstd
from sedem.errors import DataError

_OPENERS: dict[str, Callable[..., IO[str]]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_PACKED = (*_OPENERS, ".zst")


def kind(path: Path) -> str:
    """What a file holds, by its ending: "articles.jsonl.xz" is ".jsonl"; empty without one."""
    endings = [ending for ending in path.suffixes if ending not in _PACKED]
    return endings[-1] if endings else ""


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
            with open_zstd(path) as file:
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

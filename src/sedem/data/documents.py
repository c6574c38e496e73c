"""A user's own .txt and .md files as documents, in UTF-8 or a named encoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, is_folder, read_bytes

ENDINGS = (".txt", ".md")


def read_documents(paths: Sequence[Path], encoding: str = "utf-8") -> list[Document]:
    """Read files as documents, named by their paths.

    Raises:
        DataError: a file is missing, a folder, of another type, binary, empty or in another
            encoding, or larger than can be read.
    """
    return [read_document(path, encoding) for path in paths]


def files_in(paths: Sequence[Path]) -> list[Path]:
    """Files as they are, and every .txt and .md file of a folder in the order of their names.

    Raises:
        DataError: a folder has no such file.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS)
        if path.is_dir() and not inside:
            raise DataError(f"folder '{path}' holds no {' or '.join(ENDINGS)} file")
        found += inside if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def read_document(path: Path, encoding: str = "utf-8") -> Document:
    """Read one file as a document.

    Raises:
        DataError: as `read_documents`.
    """
    if is_folder(path):
        raise DataError(f"'{path}' is a folder; give its files, such as {path}/*.txt")
    if path.suffix.lower() not in ENDINGS:
        raise DataError(
            f"'{path}' is of the type '{path.suffix or 'without ending'}'; "
            f"{' and '.join(ENDINGS)} files can be read: save it as plain text"
        )
    try:
        content = read_bytes(path, DataError, DOCUMENT_BYTES)
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if b"\0" in content:
            raise _binary(path) from None
        raise DataError(
            f"'{path}' is not {encoding} text (byte {error.start}); "
            "name its encoding, such as --encoding latin-1"
        ) from None
    # A name with NUL is a ValueError, and some encodings raise errors of their own.
    except (LookupError, ValueError):
        raise DataError(
            f"'{path}' cannot be read as '{encoding}', or there is no such encoding; "
            "try utf-8 or latin-1"
        ) from None
    if "\0" in text:
        raise _binary(path)
    return Document(os.path.normpath(path), text.removeprefix("\ufeff"))


def _binary(path: Path) -> DataError:
    return DataError(f"'{path}' holds binary data, not text; save it as plain text")

"""A user's own files as documents, read one at a time."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sedem.data.document_formats import PARSERS, parse_file
from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, check_file, exists, is_folder

ENDINGS = tuple(PARSERS)
LISTED = f"{', '.join(ENDINGS[:-1])} and {ENDINGS[-1]}"


class DocumentFiles(Iterable[Document]):
    """Files as documents, named by their paths and read one at a time.

    `keep_going` skips files that cannot be read.

    Attributes:
        sizes: bytes of each file, by the name of its document, without skipped files.
        failed: one sentence for each skipped file.

    Raises:
        DataError: a folder or a pattern has no file; or a file is missing, of another type or too
            large, unless it is to be skipped. Reading raises the errors of `read_document`.
    """

    def __init__(
        self, sources: Sequence[Path], encoding: str = "utf-8", *, keep_going: bool = False
    ) -> None:
        self.encoding = encoding
        self.keep_going = keep_going
        self.sizes: dict[str, int] = {}
        self.failed: list[str] = []
        for path in files_in(sources):
            try:
                self.sizes[os.path.normpath(path)] = size_of(path)
            except DataError as error:
                self._fail(error)

    def __iter__(self) -> Iterator[Document]:
        """Read the files."""
        names = tuple(self.sizes)
        advice = "; or skip such files with --keep-going" if len(names) > 1 else ""
        for name in names:
            try:
                document = read_document(Path(name), self.encoding)
            except DataError as error:
                self._fail(error, advice)
                del self.sizes[name]
            else:
                yield document

    def _fail(self, error: DataError, advice: str = "") -> None:
        if not self.keep_going:
            raise DataError(f"{error}{advice}") from None
        self.failed.append(str(error))


def read_documents(paths: Sequence[Path], encoding: str = "utf-8") -> list[Document]:
    """Read files as documents, named by their paths; see `read_document`."""
    return [read_document(path, encoding) for path in paths]


def files_in(sources: Sequence[Path], endings: Sequence[str] = ENDINGS) -> list[Path]:
    """Files as given, and all files of known types in folders and matching patterns.

    Args:
        sources: files, folders and patterns such as "reports/**/*.pdf".

    Raises:
        DataError: a folder or a pattern has no such file.
    """
    found: list[Path] = []
    for source in sources:
        if is_folder(source):
            inside: Iterable[Path] = source.rglob("*")
        elif glob.has_magic(str(source)) and not exists(source):
            inside = map(Path, glob.iglob(str(source), recursive=True))
        else:
            found.append(source)
            continue
        chosen = sorted(p for p in inside if p.suffix.lower() in endings and not is_folder(p))
        if not chosen:
            listed = f"{', '.join(endings[:-1])} and {endings[-1]}"
            raise DataError(f"'{source}' holds no file that can be read ({listed})")
        found += chosen
    return list(dict.fromkeys(found))


def read_document(path: Path, encoding: str = "utf-8") -> Document:
    """Read one file as a document.

    Raises:
        DataError: the file is missing, a folder, of another type, binary, damaged, encrypted,
            empty or in another encoding, or larger or slower than can be read.
    """
    size_of(path)
    text, pages = parse_file(path, str(path), encoding)
    return Document(os.path.normpath(path), text, pages)


def source_text(name: str) -> str | None:
    """The text of the file that a document is named after; None if it cannot be read."""
    try:
        return read_document(Path(name)).text
    except DataError:
        return None


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; refuse one of an unknown type before it is read.

    Raises:
        DataError: it is missing, a folder, of another type, or larger than can be read.
    """
    if is_folder(path):
        raise DataError(f"'{path}' is a folder; give its files, such as {path}/*.txt")
    if not exists(path):
        raise DataError(f"there is no file or folder '{path}'")
    if path.suffix.lower() not in PARSERS:
        what = f"of the type '{path.suffix}'" if path.suffix else "without an ending"
        raise DataError(f"'{path}' is {what}; {LISTED} files can be read: save it as one of them")
    try:
        check_file(path, DataError, DOCUMENT_BYTES)
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"there is no file or folder '{path}'") from None

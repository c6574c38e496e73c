"""Documents for a build on many machines: files and records, on disks and in object stores.

This machine reads them, several files ahead, and workers encode them. Formats that take long are
parsed in processes of their own.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sedem.bank.buckets import Bucket
from sedem.bank.file import is_remote
from sedem.errors import BankError, DataError
from sedem.reading import documents as files
from sedem.reading.document_formats import PARSERS, parse_file
from sedem.reading.documents import LeftOut
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, check_file, too_large
from sedem_lab.data.records import kind, read_records

RECORDS = (".jsonl", ".parquet")
"""Endings of files of records; in a local folder, compressed ones must be named themselves."""
ENDINGS = (*PARSERS, *RECORDS)
AHEAD = 8
"""Files that are read at once."""


Row = tuple[Document | str, int]
"""A document, or the sentence that says why there is none, and its bytes."""


class SourceFile(NamedTuple):
    """A file that documents are read from.

    Attributes:
        name: as the user gave it, normalized; documents are named by it.
        place: absolute path or URL.
        size: bytes.
    """

    name: str
    place: str
    size: int


@dataclass
class Sources:
    """The documents in files, folders, patterns and places of object stores.

    Iteration yields documents in the order of the sources, of the files in a folder by name, and of
    the records in a file.

    Args:
        sources: what the user gave; a URL such as "s3://bucket/folder" is in an object store.
        encoding: encoding of text and HTML; None finds it out.
        strict: end where something cannot be read; else it is left out.
        include: patterns of what is read although folders of documents do not have it.

    Attributes:
        files: the files.
        sizes: bytes of each document that was read, by name.
        failed: one sentence for each file or record that could not be read.
        left_out: what was not read, by the reason.
        notes: sentences on what was left out of documents, or guessed.

    Raises:
        DataError: there is no such file, or a folder holds none; if it is strict, a file cannot be
            read or a record is not a document.
    """

    sources: Sequence[str]
    encoding: str | None = None
    strict: bool = False
    include: Sequence[str] = ()
    files: list[SourceFile] = field(default_factory=list, init=False)
    sizes: dict[str, int] = field(default_factory=dict, init=False)
    failed: list[str] = field(default_factory=list, init=False)
    left_out: LeftOut = field(default_factory=dict, init=False)
    notes: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        found: dict[str, SourceFile] = {}
        for source in self.sources:
            listed = _remote_files(source) if is_remote(source) else self._local_files(source)
            found |= {file.place: file for file in listed if file.place not in found}
        self.files = [*found.values()]
        if not self.files and not self.failed:
            raise DataError("there is nothing to read; give at least one file or folder")

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def __iter__(self) -> Iterator[Document]:
        """Read the documents, of several files at once."""
        with ThreadPoolExecutor(AHEAD) as pool:
            begun = (pool.submit(rows_of, file, self.encoding) for file in self.files)
            pending = deque(islice(begun, AHEAD))
            while pending:
                for document, size in pending.popleft().result():
                    if isinstance(document, str):
                        self._fail(document)
                        continue
                    self.sizes[document.name] = size
                    self.notes += document.notes
                    yield document
                pending.extend(islice(begun, 1))

    def _local_files(self, source: str) -> Iterator[SourceFile]:
        found = files.files_in(
            [Path(source)], ENDINGS, left_out=self.left_out, include=self.include
        )
        for path in found:
            try:
                if kind(path) in RECORDS:
                    check_file(path, DataError)
                    size = path.stat().st_size
                else:
                    size = files.size_of(path, self.include)
            except FileNotFoundError:
                self._fail(f"there is no file '{path}'")
            except DataError as error:
                self._fail(str(error))
            else:
                yield SourceFile(os.path.normpath(path), os.path.abspath(path), size)

    def _fail(self, error: str) -> None:
        if self.strict:
            raise DataError(error)
        self.failed.append(error)


def rows_of(file: SourceFile, encoding: str | None = None) -> Iterable[Row]:
    """Read the document of a file, or begin to read its records.

    A record is a document if it has a field `text`. Without a field `name`, it is named by its file
    and its number, such as "articles.jsonl#17". Records after one that is not JSON are not read.
    """
    if kind(Path(file.place)) in RECORDS:
        return _records(file)
    try:
        if not is_remote(file.place):
            parsed = parse_file(Path(file.place), file.name, encoding)
        elif file.size > DOCUMENT_BYTES:
            raise too_large(file.place, file.size, DOCUMENT_BYTES, DataError)
        else:
            with tempfile.TemporaryDirectory() as folder:
                copy = _downloaded(file, folder, file.size)
                parsed = parse_file(copy, file.name, encoding)
        return [(Document(file.name, *parsed), file.size)]
    except FileNotFoundError:
        return [(f"'{file.name}' was removed; build again", 0)]
    except (DataError, BankError) as error:
        return [(str(error), 0)]


def _records(file: SourceFile) -> Iterator[Row]:
    """Yield the documents of a file of records; an error ends it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(file.place)
        try:
            if is_remote(file.place):
                path = _downloaded(file, folder)
            for number, (_, record) in enumerate(read_records(path), start=1):
                name, text = record.get("name", f"{file.name}#{number}"), record.get("text")
                at = f"'{file.name}', record {number}"
                if not isinstance(name, str) or not isinstance(text, str):
                    yield f"{at} needs 'text', and 'name' if given, as strings", 0
                    continue
                try:
                    yield Document(name, text), len(text.encode())
                except (DataError, UnicodeEncodeError) as error:
                    yield f"{at}: {error}", 0
        except (DataError, BankError) as error:
            yield str(error).replace(str(path), file.name), 0


def _downloaded(file: SourceFile, folder: str, size: int | None = None) -> Path:
    place, _, name = file.place.rpartition("/")
    copy = Path(folder, name)
    if Bucket(place).download(name, copy, size) is None:
        raise DataError(f"'{file.place}' was removed or changed; build again")
    return copy


def _remote_files(source: str) -> list[SourceFile]:
    """Return the file at a place of an object store, or the files below it by name."""
    source = source.rstrip("/")
    folder, _, name = source.rpartition("/")
    try:
        if kind(Path(name)) in ENDINGS:
            size = Bucket(folder).size(name)
            found = [] if size is None else [SourceFile(source, source, size)]
        else:
            found = [
                SourceFile(f"{source}/{name}", f"{source}/{name}", size)
                for name, size, _ in sorted(Bucket(source).entries())
                if kind(Path(name)) in ENDINGS
            ]
    except BankError as error:
        raise DataError(str(error)) from None
    if not found:
        raise DataError(f"'{source}' holds no file that can be read ({', '.join(ENDINGS)})")
    return found

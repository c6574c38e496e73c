"""Documents for a build on many machines: files and records, on disks and in object stores.

The driver lists the files. Ray Data reads them on the machines of the cluster, several in parallel,
and returns their documents in the order of the sources.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sedem.bank.buckets import Bucket
from sedem.bank.parts import is_remote
from sedem.errors import BankError, DataError
from sedem.reading import documents as files
from sedem.reading.document_formats import PARSERS, parse_file
from sedem.reading.documents import LeftOut
from sedem.types import Document
from sedem.untrusted import DOCUMENT_BYTES, check_file, too_large
from sedem_lab.data.records import kind, read_records
from sedem_serve.ray.cluster import import_ray

RECORDS = (".jsonl", ".parquet")
"""Endings of files of records; in a local folder, compressed ones must be named themselves."""
ENDINGS = (*PARSERS, *RECORDS)
READ_CPUS = 0.25
"""Share of a CPU that reading uses; encoders leave it free."""
GROUP_BYTES = 2**25
GROUP_FILES = 256
"""Maximum that one task of Ray Data reads, unless a single file is larger."""
BATCH_CHARACTERS = 2**22
"""Characters of documents that a task returns at once."""


@dataclass(frozen=True)
class SourceFile:
    """A file that documents are read from.

    Attributes:
        name: as the user gave it, normalized; documents are named by it.
        place: absolute path or URL, which is the same on all machines.
        size: bytes.
    """

    name: str
    place: str
    size: int


@dataclass(frozen=True)
class Row:
    """A document, or the reason why there is none.

    Attributes:
        document: the document; None if it cannot be read.
        size: bytes of its file, or its share of the bytes of a file of records.
        error: why it cannot be read, in a sentence; empty if it can.
    """

    document: Document | None
    size: int
    error: str = ""


@dataclass
class Sources:
    """The documents in files, folders, patterns and places of object stores.

    Iteration needs a connection to a Ray cluster. It yields documents in the order of the sources,
    of the files in a folder by name, and of the records in a file.

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
        DataError: there is no such file, or a folder holds none; during iteration, a file cannot be
            read or a record is not a document, unless it is skipped.
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
        for source in self.sources:
            found = _remote_files(source) if is_remote(source) else self._local_files(source)
            self.files += found
        self.files = list({file.place: file for file in self.files}.values())
        if not self.files and not self.failed:
            raise DataError("there is nothing to read; give at least one file or folder")

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def __iter__(self) -> Iterator[Document]:
        """Read the documents on the cluster."""
        for row in _rows_on_cluster(self.files, self.encoding):
            if row.document is None:
                self._fail(row.error)
                continue
            self.sizes[row.document.name] = row.size
            self.notes += row.document.notes
            yield row.document

    def _local_files(self, source: str) -> Iterator[SourceFile]:
        found = files.files_in(
            [Path(source)], ENDINGS, left_out=self.left_out, include=self.include
        )
        for path in found:
            try:
                size = _size(path, self.include)
            except DataError as error:
                self._fail(str(error))
            else:
                yield SourceFile(os.path.normpath(path), os.path.abspath(path), size)

    def _fail(self, error: str) -> None:
        if self.strict:
            raise DataError(error)
        self.failed.append(error)


def rows_of(file: SourceFile, encoding: str | None = None) -> Iterator[Row]:
    """Read the documents of a file, or the sentence that says why it has none.

    A record is a document if it has a field `text`. Without a field `name`, it is named by its file
    and its number, such as "articles.jsonl#17". Records after one that is not JSON are not read.
    """
    try:
        if not is_remote(file.place):
            yield from _local_rows(file, Path(file.place), encoding)
            return
        folder, _, name = file.place.rpartition("/")
        is_document = kind(Path(name)) not in RECORDS
        if is_document and file.size > DOCUMENT_BYTES:
            raise too_large(file.place, file.size, DOCUMENT_BYTES, DataError)
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary) / name
            if Bucket(folder).download(name, copy, file.size if is_document else None) is None:
                raise DataError(f"'{file.place}' was removed or changed; build again")
            if not is_document:
                yield from _records(file, copy)
                return
            yield Row(Document(file.name, *parse_file(copy, file.name, encoding)), file.size)
    except (DataError, BankError) as error:
        yield Row(None, 0, str(error))


def _local_rows(file: SourceFile, path: Path, encoding: str | None) -> Iterator[Row]:
    if not path.exists():
        raise DataError(
            f"'{file.name}' is not on host '{os.uname().nodename}' of the cluster; put documents "
            "where every host sees them under the same path, or into an object store"
        )
    if kind(path) in RECORDS:
        yield from _records(file, path)
        return
    yield Row(Document(file.name, *parse_file(path, file.name, encoding)), file.size)


def _records(file: SourceFile, path: Path) -> Iterator[Row]:
    """Yield the documents of a file of records; `path` is where it is on this machine."""
    try:
        for number, (_, record) in enumerate(read_records(path), start=1):
            yield _record_row(file, number, record)
    except DataError as error:
        yield Row(None, 0, str(error).replace(str(path), file.name))


def _record_row(file: SourceFile, number: int, record: dict[str, Any]) -> Row:
    place = f"'{file.name}', record {number}"
    name, text = record.get("name", f"{file.name}#{number}"), record.get("text")
    if not isinstance(name, str) or not isinstance(text, str):
        return Row(None, 0, f"{place} needs 'text', and 'name' if given, as strings")
    try:
        return Row(Document(name, text), len(text.encode()))
    except (DataError, UnicodeEncodeError) as error:
        return Row(None, 0, f"{place}: {error}")


def _size(path: Path, include: Sequence[str]) -> int:
    """Return the bytes of a local file; anything but a file of a known type is refused."""
    try:
        if kind(path) not in RECORDS:
            return files.size_of(path, include)
        check_file(path, DataError)
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None


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


# On the cluster


def _rows_on_cluster(found: Sequence[SourceFile], encoding: str | None) -> Iterator[Row]:
    """Read the rows of all files with tasks of Ray Data, and yield them in file order."""
    if not found:
        return
    import_ray()
    from ray import data as ray_data

    groups = [json.dumps([(f.name, f.place, f.size) for f in group]) for group in _groups(found)]
    context = ray_data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with ray_data.DataContext.current(context):
        read = ray_data.from_items(
            [{"files": group} for group in groups], override_num_blocks=len(groups)
        ).map_batches(
            partial(_read_batch, encoding=encoding),
            batch_size=1,
            batch_format="numpy",
            num_cpus=READ_CPUS,
        )
    tables: Iterable[Any] = read.iter_batches(batch_size=None, batch_format="numpy")
    for table in tables:
        for line in table["row"]:
            about, size, error = json.loads(str(line))
            about = about and Document(about[0], about[1], tuple(about[2]), tuple(about[3]))
            yield Row(about, size, error)


def _groups(found: Sequence[SourceFile]) -> Iterator[list[SourceFile]]:
    """Yield the files of each task, in their order."""
    group: list[SourceFile] = []
    for file in found:
        size = sum(one.size for one in group)
        if group and (len(group) == GROUP_FILES or size + file.size > GROUP_BYTES):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _read_batch(batch: dict[str, Any], encoding: str | None) -> Iterator[dict[str, Any]]:
    """Convert files to rows as a task of Ray Data, a few million characters at a time."""
    rows: list[str] = []
    characters = 0
    for group in batch["files"]:
        for entry in json.loads(str(group)):
            for row in rows_of(SourceFile(*entry), encoding):
                document = row.document
                about = document and [*astuple(document)]
                rows.append(json.dumps([about, row.size, row.error]))
                characters += len(document.text) if document else 0
                if characters >= BATCH_CHARACTERS:
                    yield {"row": rows}
                    rows, characters = [], 0
    if rows:
        yield {"row": rows}

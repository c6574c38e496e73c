"""Uploads: parts of a multipart body are written to disk as they arrive, never held whole.

    async with receiving(request, files, most_bytes, most_files) as upload:
        await run_in_threadpool(upload.keep, lambda: library.upload(...))

Whatever was received but not kept is removed, however the request ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sedem.durable_files import atomic_write, bytes_text
from sedem.serve.database import full_disk
from sedem.serve.errors import ApiError, bad_request, too_large
from sedem.serve.file_records import Files, checked_name

FIELDS = 32
FIELD_BYTES = 2**14
FORM = "multipart/form-data"
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Received:
    """A file that was received; its bytes are synced.

    Attributes:
        path: where its bytes are.
        name: the client's name for it, as returned by `checked_name`.
        field: the form field that it came in.
    """

    path: Path
    name: str
    field: str


class Upload:
    """The fields and files of one multipart body.

    Args:
        files: where files are stored.
        most_bytes: maximum bytes of a file.
        most_files: maximum number of files.

    Attributes:
        fields: values of the fields that are not files, by name.
        received: the files, in their order.
    """

    def __init__(self, files: Files, most_bytes: int, most_files: int) -> None:
        self.fields: dict[str, str] = {}
        self.received: list[Received] = []
        self.files, self.most_bytes, self.most_files = files, most_bytes, most_files
        self._kept = self._ended = False
        self._header = [bytearray(), bytearray()]
        self._field, self._value = "", bytearray()
        self._file: IO[bytes] | None = None
        self._path, self._name, self._size = Path(), "", 0

    def keep(self, acknowledge: Callable[[], Kept]) -> Kept:
        """Run `acknowledge`, which records the files; after that they are kept."""
        result = acknowledge()
        self._kept = True
        return result

    def discard(self) -> None:
        """Remove what was received, unless it was kept."""
        if self._file is not None:
            self._file.close()
            _beside(self._path).unlink(missing_ok=True)
            self._file = None
        if not self._kept:
            self.files.forget([file.path.name for file in self.received])

    def parser(self, boundary: bytes) -> MultipartParser:
        """Return a parser that fills this upload."""
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._part_of_header(
                    0, data[start:end]
                ),
                "on_header_value": lambda data, start, end: self._part_of_header(
                    1, data[start:end]
                ),
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": lambda data, start, end: self._data(data[start:end]),
                "on_part_end": self._end,
                "on_end": self._all_ended,
            },
        )

    def check_complete(self) -> None:
        """Refuse a body whose end is missing.

        Raises:
            ApiError: 400.
        """
        if not self._ended:
            raise bad_request("the upload ends in the middle; send it again")

    def _begin(self) -> None:
        self._disposition = b""
        self._header = [bytearray(), bytearray()]

    def _part_of_header(self, which: int, data: bytes) -> None:
        self._header[which] += data

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise bad_request("a part of the upload has no name; send it as a form does")
        self._field = options[b"name"].decode("utf-8", "replace")[:100]
        self._value = bytearray()
        if b"filename" in options:
            self._open(options[b"filename"].decode("utf-8", "replace"))
        elif len(self.fields) >= FIELDS:
            raise bad_request(f"the upload has more than {FIELDS} fields; leave some out")

    def _open(self, name: str) -> None:
        if len(self.received) >= self.most_files:
            raise bad_request(
                f"the upload has more than {self.most_files:,} files; send them in several requests"
                if self.most_files > 1
                else "the upload has more than 1 file; send one per request",
                "file",
            )
        self._name = checked_name(name)
        self._path, self._size = self.files.new_path(), 0
        self._file = _beside(self._path).open("xb")

    def _data(self, data: bytes) -> None:
        if self._file is None:
            self._value += data
            if len(self._value) > FIELD_BYTES:
                raise bad_request(f"the field '{self._field}' is too long; shorten it")
            return
        self._size += len(data)
        if self._size > self.most_bytes:
            raise too_large(
                f"'{self._name}' is above the limit of {bytes_text(self.most_bytes)}; split it",
                "file",
            )
        self._file.write(data)

    def _end(self) -> None:
        if self._file is None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")
            return
        if not self._size:
            raise bad_request(f"'{self._name}' is empty; give a file with text", "file")
        self._file.close()
        with atomic_write(self._path) as temporary:
            _beside(self._path).rename(temporary)
        self._file = None
        self.received.append(Received(self._path, self._name, self._field))

    def _all_ended(self) -> None:
        self._ended = True


@asynccontextmanager
async def receiving(
    request: Request, files: Files, most_bytes: int, most_files: int
) -> AsyncIterator[Upload]:
    """Receive a multipart body; arguments as in `Upload`.

    Yields:
        What was received. It is removed at the end of the block unless it was kept.

    Raises:
        ApiError: 400, it is not such a body, or has no file; 413, a file is too large; 507, the
            disk is full.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind.decode("latin-1") != FORM or not boundary:
        raise bad_request(f"the body is not {FORM}; send the file as a form does, such as curl -F")
    upload = Upload(files, most_bytes, most_files)
    try:
        with full_disk():
            parser = _made(upload, boundary)
            async for chunk in request.stream():
                await run_in_threadpool(_write, parser, chunk)
        upload.check_complete()
        if not upload.received:
            raise bad_request("the upload has no file; send one as the field 'file'", "file")
        yield upload
    finally:
        await run_in_threadpool(upload.discard)


def _made(upload: Upload, boundary: bytes) -> MultipartParser:
    try:
        return upload.parser(boundary)
    except FormParserError as error:
        raise _malformed(error) from None


def _write(parser: MultipartParser, chunk: bytes) -> None:
    try:
        if chunk:
            parser.write(chunk)
    except FormParserError as error:
        raise _malformed(error) from None


def _malformed(error: FormParserError) -> ApiError:
    return bad_request(f"the body is not {FORM} as its header says ({str(error)[:100]})")


def _beside(path: Path) -> Path:
    """Return where a file's bytes are until they are complete."""
    return path.with_name(f".{path.name}.received")

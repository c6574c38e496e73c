"""Opening data files, plain or compressed with gzip, xz, bzip2 or zstd."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from sedem.errors import DataError
from sedem.untrusted import open_file

CHUNK = 1 << 9
"""Compressed bytes read at a time from a zstd file; each may expand to 32,768 bytes."""

_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
_COMPRESSED = (*_OPENERS, ".zst")


def kind(path: Path) -> str:
    """The suffix of a file without its compression suffix: ".jsonl" for "articles.jsonl.xz".

    Empty if the file has no suffix.
    """
    endings = [ending for ending in path.suffixes if ending not in _COMPRESSED]
    return endings[-1] if endings else ""


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes; its suffix determines the compression.

    Raises:
        DataError: the file is missing, damaged or not a regular file, or zstandard is missing.
    """
    try:
        with open_file(path, DataError) as stored:
            if path.suffix == ".zst":
                with _open_zstd(stored, path) as file:
                    yield file
            else:
                with _OPENERS.get(path.suffix, nullcontext)(stored) as file:
                    yield file
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text file; its suffix determines the compression.

    Raises:
        DataError: as `open_bytes`, or the file is not UTF-8.
    """
    try:
        with open_bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
            yield text
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None


@contextmanager
def _open_zstd(compressed: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise DataError(
            f"'{path}' is compressed with zstd; install 'zstandard' to read it"
        ) from None
    try:
        yield io.BufferedReader(_ZstdFrames(compressed, ZstdDecompressor()))
    except ZstdError as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


class _ZstdFrames(io.RawIOBase):
    """The contents of all zstd frames of a file, one after another.

    The end of the last frame is checked. The reader of zstandard itself accepts a file that stops
    early.
    """

    def __init__(self, compressed: IO[bytes], decompressor: Any) -> None:
        self.compressed = compressed
        self.decompressor = decompressor
        self.frame = decompressor.decompressobj()
        self.pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.pending:
            data = self.frame.unused_data if self.frame.eof else b""
            data = data or self.compressed.read(CHUNK)
            if not data:
                if self.frame.eof:
                    return 0
                raise EOFError("it ended before the end of its last frame")
            if self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            # A view: copying the rest for every buffer would take time quadratic in its length.
            self.pending = memoryview(self.frame.decompress(data))
        size = min(len(buffer), len(self.pending))
        buffer[:size], self.pending = self.pending[:size], self.pending[size:]
        return size

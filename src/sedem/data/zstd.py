"""Text of a zstd file with its end checked: the library takes one that stops early for whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sedem.errors import DataError

BYTES = 1 << 16


@contextmanager
def open_zstd(path: Path) -> Iterator[IO[str]]:
    """Open a UTF-8 text file compressed with zstd, in one frame or several.

    Raises:
        DataError: it is damaged, or the library is not installed.
        EOFError: it ends within a frame.
    """
    try:
        from zstandard import ZstdDecompressor, ZstdError
    except ImportError:
        raise DataError(
            f"'{path}' is compressed with zstd; install 'zstandard' to read it"
        ) from None
    try:
        with path.open("rb") as packed:
            frames = _Frames(packed, ZstdDecompressor())
            yield io.TextIOWrapper(io.BufferedReader(frames), encoding="utf-8")
    except ZstdError as error:
        raise DataError(f"'{path}' cannot be read: {error}") from None


class _Frames(io.RawIOBase):
    """What the frames of a file decompress to, one after the other."""

    def __init__(self, packed: IO[bytes], decompressor: Any) -> None:
        self.packed = packed
        self.decompressor = decompressor
        self.frame = decompressor.decompressobj()
        self.waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.waiting:
            given = self.frame.unused_data if self.frame.eof else b""
            given = given or self.packed.read(BYTES)
            if not given:
                if self.frame.eof:
                    return 0
                raise EOFError("it ended before the end of its last frame")
            if self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            self.waiting = self.frame.decompress(given)
        size = min(len(buffer), len(self.waiting))
        buffer[:size], self.waiting = self.waiting[:size], self.waiting[size:]
        return size

"""Progress of reading a bank's files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["empty", "building", "ready", "failed"]
ENDED: tuple[Status, ...] = ("empty", "ready", "failed")


@dataclass(frozen=True)
class Failure:
    """A file that could not be read.

    Attributes:
        file_id: the file.
        filename: its name.
        error: the reason, in one sentence.
    """

    file_id: str
    filename: str
    error: str


@dataclass(frozen=True)
class Progress:
    """Progress of the files uploaded since the bank last had nothing to read.

    Attributes:
        status: "building" while files are to be read; then "ready", or "failed" if none of these
            files could be read; "empty" in a bank without files.
        files_done: files that were read or could not be read.
        files: number of files.
        characters_done: characters that were read.
        characters: number of characters; for a file that is not parsed yet, its bytes.
        blocks: blocks of the bank now.
        error: one sentence if a file could not be read.
        failed: all files that could not be read.
    """

    status: Status
    files_done: int
    files: int
    characters_done: int
    characters: int
    blocks: int
    error: str | None = None
    failed: tuple[Failure, ...] = ()

    def to_dict(self, bank: str) -> dict[str, Any]:
        """Return the progress as JSON."""
        return {"object": "bank.progress", "bank": bank, **asdict(self)}

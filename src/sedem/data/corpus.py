"""The texts of a stage-1 corpus, streamed from a file, a folder or the hub."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from pathlib import Path

from sedem.data import hub
from sedem.data.compression import kind, open_text
from sedem.data.records import Records, read_records
from sedem.errors import DataError
from sedem.untrusted import DOCUMENT_BYTES, exists, is_folder

TEXT_ENDINGS = (".txt", ".md", ".jsonl", ".parquet")
HUB = "hub:"
"""Prefix of a hub id, such as hub:DKYoon/SlimPajama-6B."""


def read_texts(
    source: str | Path,
    exclude_titles: Collection[str] = (),
    revision: str | None = None,
    shard_seed: int | None = None,
) -> Iterator[str]:
    """Texts of a file, of every text file of a folder in order of name, or of the hub.

    A .txt or .md file is one text; a line of a .jsonl file and a row of a .parquet file have a
    field `text`. Files may be compressed (.gz, .xz, .bz2, .zst).

    Args:
        source: file, folder, or "hub:" and the id of a dataset, whose training split is streamed.
        exclude_titles: lines and rows with one of these in the field `title` are left out.
        revision: commit of the dataset on the hub; None means the newest.
        shard_seed: seed of the order in which the files of a folder, or the shards of a dataset on
            the hub, are read; None reads them in order of their names.

    Raises:
        DataError: the source cannot be read, or a line has no text.
    """
    repository = hub_id(source)
    if repository is not None:
        yield from _texts(hub.stream(repository, revision, shard_seed), exclude_titles)
        return
    files = text_files(Path(source))
    if shard_seed is not None:
        random.Random(shard_seed).shuffle(files)
    for file in files:
        if kind(file) in (".jsonl", ".parquet"):
            yield from _texts(read_records(file), exclude_titles)
        elif kind(file) in TEXT_ENDINGS:
            with open_text(file) as opened:
                text = opened.read(DOCUMENT_BYTES + 1)
            if len(text) > DOCUMENT_BYTES:
                raise DataError(
                    f"'{file}' has more than {DOCUMENT_BYTES:,} characters, which would be read "
                    "whole; split it, or save it as JSON lines"
                )
            yield text
        else:
            raise DataError(
                f"'{file}' is not a text file; give {', '.join(TEXT_ENDINGS)}, compressed or not"
            )


def hub_id(source: str | Path) -> str | None:
    """The id of a dataset on the hub; None for a file or folder."""
    return str(source).removeprefix(HUB) if str(source).startswith(HUB) else None


def text_files(path: Path) -> list[Path]:
    """The file itself, or every text file of a folder.

    Raises:
        DataError: the folder has no text file.
    """
    if not is_folder(path):
        return [path]
    files = sorted(file for file in path.rglob("*") if kind(file) in TEXT_ENDINGS)
    if not files:
        raise DataError(f"folder '{path}' holds no {', '.join(TEXT_ENDINGS)} file")
    return files


def holds_texts(source: str | Path) -> bool:
    """Whether a source is plain text rather than questions, judging by its first record."""
    path = Path(source)
    if hub_id(source) is not None:
        return True
    if not exists(path):
        return False
    file = min(text_files(path))
    if kind(file) in (".jsonl", ".parquet"):
        _, first = next(read_records(file), ("", {}))
        return isinstance(first.get("text"), str) and "question" not in first
    return kind(file) in TEXT_ENDINGS


def _texts(records: Records, exclude_titles: Collection[str]) -> Iterator[str]:
    for place, entry in records:
        if not isinstance(entry.get("text"), str):
            raise DataError(f"{place}: a string field 'text' is needed")
        if entry.get("title") not in exclude_titles:
            yield entry["text"]

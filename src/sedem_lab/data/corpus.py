"""The texts of a stage-1 corpus, streamed from a file, a folder or the hub, and their tokens."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import context_prompt
from sedem.durable_files import atomic_write, build_once, check_free_space, write_text
from sedem.errors import DataError
from sedem.untrusted import DOCUMENT_BYTES, exists, is_folder
from sedem_lab.data import hub
from sedem_lab.data.hub import Home, commit
from sedem_lab.data.records import Records, kind, open_text, read_records

TEXT_ENDINGS = (".txt", ".md", ".jsonl", ".parquet")
TEXT = "text"
"""The field of a line or row that has its text, unless another is named."""
HUB = "hub:"
"""Prefix of a hub id, such as hub:DKYoon/SlimPajama-6B."""


def read_texts(
    source: str | Path,
    exclude_titles: Collection[str] = (),
    revision: str | None = None,
    shard_seed: int | None = None,
    field: str = TEXT,
) -> Iterator[str]:
    """Texts of a file, of every text file of a folder in order of name, or of the hub.

    A .txt or .md file is one text; a line of a .jsonl file and a row of a .parquet file have it in
    a field. Files may be compressed (.gz, .xz, .bz2, .zst).

    Args:
        source: "hub:" and the id of a dataset streams its training split.
        exclude_titles: lines and rows with one of these in the field `title` are left out.
        revision: commit of the dataset on the hub; None means the newest.
        shard_seed: seed of the order in which the files of a folder, or the shards of a dataset on
            the hub, are read; None reads them in order of their names.
        field: name of the field that has the text.

    Raises:
        DataError: the source cannot be read, or a line has no text.
    """
    repository = hub_id(source)
    if repository is not None:
        yield from _texts(hub.stream(repository, revision, shard_seed), exclude_titles, field)
        return
    files = text_files(Path(source))
    if shard_seed is not None:
        random.Random(shard_seed).shuffle(files)
    for file in files:
        if kind(file) in (".jsonl", ".parquet"):
            yield from _texts(read_records(file), exclude_titles, field)
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
    """The file itself, or every text file of a folder, of which there must be one."""
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
        return isinstance(first.get(TEXT), str) and "question" not in first
    return kind(file) in TEXT_ENDINGS


def _texts(records: Records, exclude_titles: Collection[str], field: str) -> Iterator[str]:
    for place, entry in records:
        if not isinstance(entry.get(field), str):
            raise DataError(f"{place}: a string field '{field}' is needed")
        if entry.get("title") not in exclude_titles:
            yield entry[field]


def join_texts(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Join consecutive texts into texts of at least so many characters, except the last.

    A blank line separates two texts, and white space around a text is removed.
    """
    together: list[str] = []
    for text in texts:
        together.append(text)
        if sum(map(len, together)) >= characters:
            yield context_prompt(together)
            together.clear()
    if together:
        yield context_prompt(together)


TOKENIZED_TOGETHER = 64
PART = 1 << 22
"""Number of tokens after which what is written is made durable; a killed run loses no more."""
TEXT_BYTES = 4
"""Bytes of text per token, to estimate the tokens of a file; most texts have more tokens."""
TOKENS, SIZES, BOUNDS = "tokens.bin", "sizes.bin", "bounds.npy"
"""All tokens; the tokens of each text while they are written; and the file that is written last."""


@dataclass(frozen=True)
class TokenizedCorpus:
    """All tokens of a corpus in one array on disk, and the bounds of its texts."""

    tokens: NDArray[Any]
    bounds: NDArray[np.int64]
    """The first token of each text, and the end of the last one."""

    @classmethod
    def open(
        cls,
        source: str | Path,
        backbone: Backbone,
        cache: Path,
        exclude_titles: Collection[str] = (),
        limit: int | None = None,
        shard_seed: int | None = None,
        field: str = TEXT,
        join: int | None = None,
    ) -> TokenizedCorpus:
        """Open a tokenized corpus; tokenize it first, or continue after a killed run.

        Args:
            cache: folder of the arrays; their names depend on the corpus and the tokenizer.
            limit: stop after this many tokens, which cuts the last text; None means all.
            join: join texts to at least so many characters; None keeps each one apart.

        Raises:
            DataError: the corpus cannot be read or is empty.
            ConfigError: the disk is too full for its tokens.
        """
        titles = sorted(exclude_titles)
        chosen = (_stamp(source), backbone.vocabulary, titles, limit, shard_seed, field, join)
        folder = cache / f"corpus-{hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]}"

        def build(partial: Path) -> None:
            if not _is_complete(partial):
                # Refuse a corpus whose tokens will not fit on the disk, if their number is known.
                tokens, repository = limit or 0, hub_id(source)
                if repository is None:
                    size = sum(file.stat().st_size for file in text_files(Path(source)))
                    tokens = min(size // TEXT_BYTES, limit or size)
                written = (partial / TOKENS).stat().st_size if (partial / TOKENS).exists() else 0
                needed = tokens * _dtype(backbone).itemsize - written
                check_free_space(folder.parent, needed, f"tokenizing '{source}'")
                # A continued run reads the commit of the first run.
                revision, kept = None, partial / "revision.txt"
                if repository is not None:
                    if not kept.is_file():
                        write_text(kept, commit(Home(repository)))
                    revision = kept.read_text()
                texts = read_texts(source, exclude_titles, revision, shard_seed, field)
                if join is not None:
                    texts = join_texts(texts, join)
                _write(texts, backbone, partial, limit, str(source))
            (partial / SIZES).unlink(missing_ok=True)

        build_once(folder, _is_complete, build, f"the tokens of '{source}'")
        tokens = np.memmap(folder / TOKENS, _dtype(backbone), mode="r")
        return cls(tokens, np.load(folder / BOUNDS))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.bounds) - 1


def _stamp(source: str | Path) -> str:
    """Identity of a corpus: paths, times and sizes of its files, or its hub id."""
    if hub_id(source) is not None:
        return str(source)
    if not Path(source).exists():
        raise DataError(f"there is no file or folder '{source}'")
    return " ".join(
        f"{file.resolve()} {file.stat().st_mtime_ns} {file.stat().st_size}"
        for file in text_files(Path(source))
    )


def _is_complete(folder: Path) -> bool:
    return (folder / BOUNDS).is_file()


def _dtype(backbone: Backbone) -> np.dtype[Any]:
    """The smallest type that holds every token."""
    return np.dtype(np.uint16 if len(backbone.tokenizer) <= 2**16 else np.uint32)


def _write(
    texts: Iterable[str], backbone: Backbone, folder: Path, limit: int | None, source: str
) -> None:
    """Tokenize the texts after those that a killed run has written; bounds come last."""
    dtype = _dtype(backbone)
    with (folder / TOKENS).open("ab") as tokens_file, (folder / SIZES).open("ab") as sizes_file:
        # What has no size yet may be damaged.
        sizes = np.fromfile(folder / SIZES, np.int64).tolist()
        done, pending = len(sizes), 0
        sizes_file.truncate(done * np.dtype(np.int64).itemsize)
        tokens_file.truncate(sum(sizes) * dtype.itemsize)

        def make_durable() -> None:
            """The tokens first, because their sizes say that they are there."""
            tokens_file.flush()
            os.fsync(tokens_file.fileno())
            sizes_file.write(np.asarray(sizes[done:], np.int64).tobytes())
            sizes_file.flush()
            os.fsync(sizes_file.fileno())

        room, left = None if limit is None else limit - sum(sizes), islice(texts, done, None)
        with tqdm(
            total=limit, initial=sum(sizes), desc=f"tokenizing {source}", unit="token"
        ) as bar:
            while room != 0 and (batch := list(islice(left, TOKENIZED_TOGETHER))):
                for tokens in backbone.tokenize(batch)["input_ids"]:
                    # The last text is cut at the limit.
                    ids = tokens[:room]
                    tokens_file.write(np.asarray(ids, dtype).tobytes())
                    sizes.append(len(ids))
                    pending += len(ids)
                    bar.update(len(ids))
                    if pending >= PART:
                        make_durable()
                        done, pending = len(sizes), 0
                    if room is not None:
                        room -= len(ids)
                        if not room:
                            break
        make_durable()
    if not sum(sizes):
        raise DataError(f"'{source}' has no tokens; give a corpus with text in it")
    with atomic_write(folder / BOUNDS) as temporary, temporary.open("wb") as file:
        np.save(file, np.cumsum([0, *sizes]))

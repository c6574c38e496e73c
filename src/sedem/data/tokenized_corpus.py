"""The tokens of a stage-1 corpus, tokenized once and kept in arrays on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from sedem.backbone.decoder import Backbone
from sedem.data.corpus import hub_id, read_texts, text_files
from sedem.data.hub import Home, commit
from sedem.durable_files import atomic_write, build_once, check_free_space, write_text
from sedem.errors import DataError

TOKENIZED_TOGETHER = 64
PART = 1 << 22
"""Number of tokens written to disk at a time; a killed run loses at most this many."""
TEXT_BYTES = 4
"""Bytes of text per token, to estimate the tokens of a file; most texts have more tokens."""
BOUNDS = "bounds.npy"
"""The file written last; a folder that contains it is complete."""


class TokenizedCorpus:
    """All tokens of a corpus in one array on disk, and the bounds of its texts.

    Args:
        tokens: ids of all texts, one after another.
        bounds: first token of each text, and the end of the last one.
    """

    def __init__(self, tokens: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        self.tokens = tokens
        self.bounds = bounds

    @classmethod
    def open(
        cls,
        source: str | Path,
        backbone: Backbone,
        cache: Path,
        exclude_titles: Collection[str] = (),
        limit: int | None = None,
        shard_seed: int | None = None,
    ) -> TokenizedCorpus:
        """Open a tokenized corpus; tokenize it first, or continue after a killed run.

        Args:
            source: file or folder of texts, or "hub:" and the id of a dataset.
            backbone: gives the tokenizer.
            cache: folder of the arrays; their names depend on the corpus and the tokenizer.
            exclude_titles: as in `read_texts`.
            limit: stop after this many tokens, which cuts the last text; None means all.
            shard_seed: as in `read_texts`.

        Raises:
            DataError: the corpus cannot be read or is empty.
            ConfigError: the disk is too full for its tokens.
        """
        chosen = f"{_stamp(source)} {backbone.vocabulary} {sorted(exclude_titles)}"
        if limit is not None:
            chosen += f" {limit}"
        if shard_seed is not None:
            chosen += f" shards {shard_seed}"
        folder = cache / f"tokens-{hashlib.sha256(chosen.encode()).hexdigest()[:16]}"

        def build(partial: Path) -> None:
            if not _is_complete(partial):
                _check_room(source, limit, _dtype(backbone), partial)
                revision = _revision(source, partial)
                texts = read_texts(source, exclude_titles, revision, shard_seed)
                _write_parts(texts, backbone, partial, limit, str(source))
                _join_parts(partial, str(source))
            for part in _parts(partial):
                part.unlink()

        build_once(folder, _is_complete, build, f"the tokens of '{source}'")
        return cls(np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / BOUNDS))

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


def _revision(source: str | Path, folder: Path) -> str | None:
    """The commit to tokenize; a continued run reads the commit of the first run."""
    repository, kept = hub_id(source), folder / "revision.txt"
    if repository is None:
        return None
    if not kept.is_file():
        write_text(kept, commit(Home(repository)))
    return kept.read_text()


def _is_complete(folder: Path) -> bool:
    return (folder / BOUNDS).is_file()


def _dtype(backbone: Backbone) -> np.dtype[Any]:
    """The smallest type that holds every token."""
    return np.dtype(np.uint16 if len(backbone.tokenizer) <= 2**16 else np.uint32)


def _check_room(source: str | Path, limit: int | None, dtype: np.dtype[Any], folder: Path) -> None:
    """Refuse a corpus whose tokens will not fit on the disk, if their number is known."""
    tokens = limit or 0
    if hub_id(source) is None:
        written = sum(file.stat().st_size for file in text_files(Path(source))) // TEXT_BYTES
        tokens = min(written, limit or written)
    # The parts and the joined array exist at the same time for a while.
    size = 2 * tokens * dtype.itemsize - sum(part.stat().st_size for part in _parts(folder))
    check_free_space(folder.parent, size, f"tokenizing '{source}'")


def _write_parts(
    texts: Iterable[str], backbone: Backbone, folder: Path, limit: int | None, source: str
) -> None:
    """Tokenize the texts after those whose parts are already on disk."""
    parts = _parts(folder)
    sizes = [size for part in parts for size in np.load(part)["sizes"].tolist()]
    remaining = islice(texts, len(sizes), None)
    room = None if limit is None else limit - sum(sizes)
    dtype = _dtype(backbone)
    pending: list[NDArray[Any]] = []
    number, count = len(parts), 0
    with tqdm(total=limit, initial=sum(sizes), desc=f"tokenizing {source}", unit="token") as bar:
        for ids in _tokenized(remaining, backbone, room):
            pending.append(np.asarray(ids, dtype=dtype))
            count += len(ids)
            bar.update(len(ids))
            if count >= PART:
                _save_part(folder, number, pending)
                pending, number, count = [], number + 1, 0
    if pending:
        _save_part(folder, number, pending)


def _tokenized(texts: Iterator[str], backbone: Backbone, limit: int | None) -> Iterator[list[int]]:
    """Tokens of each text, at most `limit` in total; the last text is cut."""
    while limit != 0 and (batch := list(islice(texts, TOKENIZED_TOGETHER))):
        for ids in backbone.tokenize(batch)["input_ids"]:
            kept = ids[:limit]
            yield kept
            if limit is not None:
                limit -= len(kept)
                if not limit:
                    return


def _save_part(folder: Path, number: int, texts: list[NDArray[Any]]) -> None:
    path = folder / f"part-{number:06d}.npz"
    sizes = np.asarray([len(ids) for ids in texts])
    tokens = np.concatenate(texts)
    check_free_space(folder.parent, tokens.nbytes + sizes.nbytes, "the next part of the tokens")
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, tokens=tokens, sizes=sizes)


def _join_parts(folder: Path, source: str) -> None:
    """Join all parts in one array; its bounds are written last and mark it as complete."""
    parts = _parts(folder)
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.load(part)["sizes"] for part in parts)])
    bounds = np.cumsum(sizes)
    if not bounds[-1]:
        raise DataError(f"'{source}' has no tokens; give a corpus with text in it")
    dtype = np.load(parts[0])["tokens"].dtype
    # Writing to a memory-mapped file on a full disk would kill the process without a message.
    check_free_space(folder.parent, int(bounds[-1]) * dtype.itemsize, f"the tokens of '{source}'")
    joined = np.lib.format.open_memmap(
        folder / "tokens.npy", mode="w+", dtype=dtype, shape=(int(bounds[-1]),)
    )
    start = 0
    for part in parts:
        tokens = np.load(part)["tokens"]
        joined[start : start + len(tokens)] = tokens
        start += len(tokens)
    joined.flush()
    with atomic_write(folder / BOUNDS) as temporary, temporary.open("wb") as file:
        np.save(file, bounds)


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.npz"))

"""Stage-1 text: windows of context and continuation, deterministic under a seed.

Letters: T context tokens, A continuation tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from sedem.backbone.decoder import Backbone
from sedem.data.hub import Home, commit
from sedem.data.texts import hub_id, read_texts, text_files
from sedem.durable_files import atomic_write, write_text
from sedem.errors import DataError

TOKENIZED_TOGETHER = 64
PART = 1 << 22
"""Tokens that are written to disk at a time; a run that is killed loses at most so many."""


class Tokens:
    """All tokens of a corpus in one array on disk, with where each text begins.

    Args:
        tokens: ids of all texts, one after the other.
        bounds: first token of each text, and the end of the last.
    """

    def __init__(self, tokens: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        self.tokens = tokens
        self.bounds = bounds

    @classmethod
    def of(
        cls,
        source: str | Path,
        backbone: Backbone,
        cache: Path,
        exclude_titles: Collection[str] = (),
        limit: int | None = None,
    ) -> Tokens:
        """Tokenize a corpus, go on where a killed run stopped, or map what is there.

        Args:
            source: file or folder of texts, or "hub:" and the id of a set.
            backbone: whose tokenizer counts.
            cache: folder for the arrays, named after corpus and tokenizer.
            exclude_titles: as in `read_texts`.
            limit: stop after so many tokens, which cuts the last text; None means all.

        Raises:
            DataError: the corpus cannot be read or is empty.
        """
        chosen = f"{_stamp(source)} {backbone.vocabulary} {sorted(exclude_titles)}"
        if limit is not None:
            chosen += f" {limit}"
        folder = cache / f"tokens-{hashlib.sha256(chosen.encode()).hexdigest()[:16]}"
        if not (folder / "bounds.npy").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            texts = read_texts(source, exclude_titles, _revision(source, folder))
            _write_parts(texts, backbone, folder, limit, str(source))
            _join_parts(folder, str(source))
        return cls(np.load(folder / "tokens.npy", mmap_mode="r"), np.load(folder / "bounds.npy"))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.bounds) - 1


class Windows(Dataset[dict[str, NDArray[np.int64]]]):
    """Windows of context and continuation, in a seeded order.

    Every text is cut from a seeded offset on, so that windows do not overlap within an epoch and
    differ between seeds. Item i is the same whatever was asked for before: training that is resumed
    in the middle goes on with the same windows.

    Args:
        corpus: the tokens.
        context: T.
        continuation: A.
        seed: decides offsets and order.
        texts: which texts to use; None means all.
    """

    def __init__(
        self,
        corpus: Tokens,
        context: int,
        continuation: int,
        seed: int,
        texts: range | None = None,
    ) -> None:
        self.corpus = corpus
        self.context = context
        width = context + continuation
        rng = np.random.default_rng(seed)
        used = range(len(corpus)) if texts is None else texts
        starts = []
        for text in used:
            begin, end = int(corpus.bounds[text]), int(corpus.bounds[text + 1])
            offset = int(rng.integers(0, width))
            if end - begin < offset + width:
                offset = 0
            starts.append(np.arange(begin + offset, end - width + 1, width))
        self.starts: NDArray[np.int64] = np.concatenate(starts) if starts else np.zeros(0, np.int64)
        self.width = width
        if not len(self.starts):
            raise DataError(f"no text is {width} tokens long; give longer texts or shorter windows")
        rng.shuffle(self.starts)

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Tokens of one window: `context` `[T]` and `continuation` `[A]`."""
        start = self.starts[index]
        tokens = np.asarray(self.corpus.tokens[start : start + self.width], dtype=np.int64)
        return {"context": tokens[: self.context], "continuation": tokens[self.context :]}


def _stamp(source: str | Path) -> str:
    """What says that a corpus is another one: its files as they are, or its id."""
    if hub_id(source) is not None:
        return str(source)
    if not Path(source).exists():
        raise DataError(f"there is no file or folder '{source}'")
    return " ".join(
        f"{file.resolve()} {file.stat().st_mtime_ns} {file.stat().st_size}"
        for file in text_files(Path(source))
    )


def _revision(source: str | Path, folder: Path) -> str | None:
    """The commit that is tokenized: a run that goes on must skip what the first one has read."""
    repository, kept = hub_id(source), folder / "revision.txt"
    if repository is None:
        return None
    if not kept.is_file():
        write_text(kept, commit(Home(repository)))
    return kept.read_text()


def collate_windows(windows: Sequence[Mapping[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Windows as a batch: `context` `[B, T]` and `continuation` `[B, A]`."""
    return {
        name: torch.from_numpy(np.stack([window[name] for window in windows]))
        for name in ("context", "continuation")
    }


def _write_parts(
    texts: Iterable[str], backbone: Backbone, folder: Path, limit: int | None, what: str
) -> None:
    """Tokenize what no part holds yet."""
    parts = _parts(folder)
    sizes = [size for part in parts for size in np.load(part)["sizes"].tolist()]
    left, room = islice(texts, len(sizes), None), None if limit is None else limit - sum(sizes)
    dtype = np.uint16 if len(backbone.tokenizer) <= 2**16 else np.uint32
    pending: list[NDArray[Any]] = []
    number, held = len(parts), 0
    with tqdm(total=limit, initial=sum(sizes), desc=f"tokenizing {what}", unit="token") as bar:
        for ids in _tokenized(left, backbone, room):
            pending.append(np.asarray(ids, dtype=dtype))
            held += len(ids)
            bar.update(len(ids))
            if held >= PART:
                _save_part(folder, number, pending)
                pending, number, held = [], number + 1, 0
    if pending:
        _save_part(folder, number, pending)


def _tokenized(texts: Iterator[str], backbone: Backbone, room: int | None) -> Iterator[list[int]]:
    """Tokens of each text, until so many are there; the last text is cut."""
    while room != 0 and (together := list(islice(texts, TOKENIZED_TOGETHER))):
        for ids in backbone.tokenize(together)["input_ids"]:
            kept = ids[:room]
            yield kept
            if room is not None:
                room -= len(kept)
                if not room:
                    return


def _save_part(folder: Path, number: int, texts: list[NDArray[Any]]) -> None:
    path = folder / f"part-{number:06d}.npz"
    sizes = np.asarray([len(ids) for ids in texts])
    tokens = np.concatenate(texts)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, tokens=tokens, sizes=sizes)


def _join_parts(folder: Path, what: str) -> None:
    """One array of all parts; its bounds are written last and say that it is whole."""
    parts = _parts(folder)
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.load(part)["sizes"] for part in parts)])
    bounds = np.cumsum(sizes)
    if not bounds[-1]:
        raise DataError(f"'{what}' has no tokens; give a corpus with text in it")
    dtype = np.load(parts[0])["tokens"].dtype
    joined = np.lib.format.open_memmap(
        folder / "tokens.npy", mode="w+", dtype=dtype, shape=(int(bounds[-1]),)
    )
    at = 0
    for part in parts:
        tokens = np.load(part)["tokens"]
        joined[at : at + len(tokens)] = tokens
        at += len(tokens)
    joined.flush()
    with atomic_write(folder / "bounds.npy") as temporary, temporary.open("wb") as file:
        np.save(file, bounds)
    for part in parts:
        part.unlink()


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.npz"))

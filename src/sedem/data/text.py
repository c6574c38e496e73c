"""Stage-1 text: windows of context and continuation, deterministic under a seed.

Letters: T context tokens, A continuation tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from sedem.backbone import Backbone
from sedem.data.files import open_text, read_lines
from sedem.errors import DataError

TEXT_ENDINGS = (".txt", ".md", ".jsonl")
TOKENIZED_TOGETHER = 64


def read_texts(path: Path, exclude_titles: Collection[str] = ()) -> Iterator[str]:
    """Texts of a file or of every text file of a folder, in the order of their names.

    A .txt or .md file is one text; each line of a .jsonl file is an object with a field `text`.
    Files may be compressed (.gz, .xz, .bz2, .zst).

    Args:
        path: file or folder.
        exclude_titles: lines of a .jsonl file whose field `title` is one of these are left out.

    Raises:
        DataError: there is nothing to read, or a line has no text.
    """
    for file in _text_files(path):
        if _kind(file) == ".jsonl":
            for number, entry in read_lines(file):
                if not isinstance(entry.get("text"), str):
                    raise DataError(f"'{file}', line {number}: a string field 'text' is needed")
                if entry.get("title") not in exclude_titles:
                    yield entry["text"]
        elif _kind(file) in TEXT_ENDINGS:
            with open_text(file) as opened:
                yield opened.read()
        else:
            raise DataError(
                f"'{file}' is no text file; {', '.join(TEXT_ENDINGS)} are read, compressed or not"
            )


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
        cls, path: Path, backbone: Backbone, cache: Path, exclude_titles: Collection[str] = ()
    ) -> Tokens:
        """Tokenize a corpus, or map what an earlier call has written.

        Args:
            path: file or folder of texts.
            backbone: whose tokenizer counts.
            cache: folder for the arrays, named after corpus and tokenizer.
            exclude_titles: as in `read_texts`.
        """
        if not path.exists():
            raise DataError(f"there is no file or folder '{path}'")
        stamps = [
            f"{file.resolve()} {file.stat().st_mtime_ns} {file.stat().st_size}"
            for file in _text_files(path)
        ]
        chosen = f"{' '.join(stamps)} {backbone.vocabulary} {sorted(exclude_titles)}"
        key = hashlib.sha256(chosen.encode()).hexdigest()[:16]
        folder = cache / f"tokens-{key}"
        if not (folder / "bounds.npy").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _write_tokens(read_texts(path, exclude_titles), backbone, folder)
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


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if _kind(file) in TEXT_ENDINGS)
    if not files:
        raise DataError(f"folder '{path}' holds no {', '.join(TEXT_ENDINGS)} file")
    return files


def _kind(file: Path) -> str:
    endings = [e for e in file.suffixes if e not in (".gz", ".xz", ".bz2", ".zst")]
    return endings[-1] if endings else ""


def _write_tokens(corpus: Iterable[str], backbone: Backbone, folder: Path) -> None:
    parts: list[NDArray[Any]] = []
    bounds = [0]
    dtype = np.uint16 if len(backbone.tokenizer) <= 2**16 else np.uint32
    texts: list[str] = []

    def flush() -> None:
        for ids in backbone.tokenize(texts)["input_ids"] if texts else []:
            parts.append(np.asarray(ids, dtype=dtype))
            bounds.append(bounds[-1] + len(ids))
        texts.clear()

    for text in corpus:
        texts.append(text)
        if len(texts) == TOKENIZED_TOGETHER:
            flush()
    flush()
    np.save(folder / "tokens.npy", np.concatenate(parts) if parts else np.zeros(0, dtype))
    # Written last: its presence says that the tokens are whole.
    np.save(folder / "bounds.npy", np.asarray(bounds))

"""Examples converted into the items of a training set, kept as rows in flat arrays."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset, Subset
from tqdm.auto import tqdm

from sedem.durable_files import build_once, check_free_space, write_text
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.data.labels import Labelling, labelling_of

Item = TypeVar("Item")

TOGETHER = 64
"""Number of examples that are tokenized together."""
COUNTS = "counts.json"
"""The file written last; a folder that contains it is complete."""


@dataclass(frozen=True)
class Ragged:
    """Rows of numbers of different lengths, in memory or mapped from disk.

    `values` has one row after another; `bounds` has the start of each, and the end of the last one.
    """

    values: NDArray[Any]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], dtype: DTypeLike = np.int32) -> Ragged:
        """Rows that are given as Python objects."""
        lengths = [0, *map(len, rows)]
        values = np.fromiter(chain.from_iterable(rows), dtype, sum(lengths))
        return cls(values, np.cumsum(lengths, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of several lists; a single list is not copied."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(part.bounds[-1] for part in parts)])
        bounds = [part.bounds[1:] + start for part, start in zip(parts, starts, strict=False)]
        first = np.zeros(1, np.int64)
        return cls(np.concatenate([p.values for p in parts]), np.concatenate([first, *bounds]))

    @classmethod
    def load(cls, folder: Path, name: str) -> Ragged:
        """Map rows from the files that `save` has written."""
        bounds = np.load(folder / f"{name}-bounds.npy")
        # An empty array cannot be mapped.
        mode: Any = "r" if bounds[-1] else None
        return cls(np.load(folder / f"{name}-values.npy", mmap_mode=mode), bounds)

    def save(self, folder: Path, name: str) -> None:
        """Write the rows to two files."""
        np.save(folder / f"{name}-values.npy", self.values)
        np.save(folder / f"{name}-bounds.npy", self.bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, with their bounds."""
        return self.values.nbytes + self.bounds.nbytes

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Numbers in each row."""
        return np.diff(self.bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.values[self.bounds[index] : self.bounds[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[index] for index in range(len(self)))


@dataclass(kw_only=True)
class ExampleDataset(Dataset[Item], ABC, Generic[Item]):
    """A training set of examples; a subclass prepares them for one kind of training.

    Prepared data is stored in flat arrays. With a `cache` they are written to disk, and mapped from
    there when the same examples are added again with the same settings.

    Attributes:
        cache: folder that contains a folder for every prepared set; None prepares in memory.
        dropped: number of examples left out, by reason.
        by_answer: number of examples that are labelled by their answer strings.
        cut: counts of what was shortened; empty if a subclass shortens nothing.
    """

    cache: Path | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    by_answer: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    arrays: dict[str, Ragged] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    _key: str = ""

    @property
    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """All settings, apart from the examples, that affect what is prepared."""

    @abstractmethod
    def prepare(self, batches: Iterator[list[Example]], labelling: Labelling) -> dict[str, Ragged]:
        """Prepare examples; count those that cannot be used in `dropped`.

        Args:
            batches: the examples, in groups that are tokenized together.

        Returns:
            The new data, by name. "answers" has one row for each usable example.
        """

    @abstractmethod
    def item(self, number: int) -> Item:
        """The item of a prepared example."""

    def add(self, examples: ExampleSet, labelling: Labelling, repeat: int = 1) -> None:
        """Prepare a set of examples and append the items.

        Args:
            labelling: "evidence" takes the labels of the set; "answer" labels as evidence what
                contains an answer string, which is also done for every example without evidence.
            repeat: how often each example occurs in an epoch.

        Raises:
            ConfigError: the disk of the cache is too full.
        """
        first = self._examples()
        own = [labelling_of(example, labelling) for example in examples.examples]
        self.by_answer += own.count("answer")
        if self.cache is None:
            arrays = self._prepare(examples, labelling)
        else:
            # The key includes what was added before, as known documents are not stored again.
            given = [version("sedem"), self._key, dict(self.settings), labelling]
            digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
            for example in examples.examples:
                digest.update(repr(example).encode())
            self._key = digest.hexdigest()
            folder = self.cache / f"examples-{self._key[:16]}"
            what = f"the prepared set {examples.name}"
            before = self.dropped.copy(), self.cut.copy()

            def build(partial: Path) -> None:
                arrays = self._prepare(examples, labelling)
                size = sum(array.nbytes for array in arrays.values())
                check_free_space(partial, size, what)
                for name, array in arrays.items():
                    array.save(partial, name)
                counts = [self.dropped - before[0], self.cut - before[1]]
                write_text(partial / COUNTS, json.dumps([sorted(arrays), *counts]))

            build_once(folder, lambda found: (found / COUNTS).is_file(), build, what)
            names, dropped, cut = json.loads((folder / COUNTS).read_text())
            self.dropped, self.cut = before[0] + Counter(dropped), before[1] + Counter(cut)
            arrays = {name: Ragged.load(folder, name) for name in names}
        parts = [self.arrays, arrays] if self.arrays else [arrays]
        self.arrays = {name: Ragged.joined([part[name] for part in parts]) for name in arrays}
        for number in range(first, self._examples()):
            self._order += [number] * repeat

    @abstractmethod
    def example_lengths(self) -> NDArray[np.int64]:
        """Count the tokens that a step reads of each prepared example."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each item, in order."""
        return self.example_lengths()[self._order]

    @property
    def items(self) -> list[Item]:
        """Every item, in order; a repeated example occurs several times."""
        return [self[index] for index in range(len(self))]

    def __len__(self) -> int:
        """Number of items."""
        return len(self._order)

    def __getitem__(self, index: int) -> Item:
        """The item at an index."""
        return self.item(self._order[index])

    def _examples(self) -> int:
        return len(self.arrays["answers"]) if self.arrays else 0

    def _prepare(self, examples: ExampleSet, labelling: Labelling) -> dict[str, Ragged]:
        """Prepare a set, with a progress bar."""
        every = examples.examples
        with tqdm(total=len(every), desc=f"preparing {examples.name}", unit="example") as bar:

            def batches() -> Iterator[list[Example]]:
                for start in range(0, len(every), TOGETHER):
                    batch = every[start : start + TOGETHER]
                    yield batch
                    bar.update(len(batch))

            return self.prepare(batches(), labelling)


def lengths_of(data: Dataset[Any]) -> NDArray[np.int64] | None:
    """Tokens of each item of a set of examples, or of a part of one; None for windows of text."""
    if isinstance(data, Subset):
        own = lengths_of(data.dataset)
        return None if own is None else own[list(data.indices)]
    return data.lengths if isinstance(data, ExampleDataset) else None

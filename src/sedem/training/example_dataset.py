"""Examples converted into the items of a training set, with a count of those left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.utils.data import Dataset

from sedem.data.examples import Example, ExampleSet
from sedem.data.labels import Labelling

Item = TypeVar("Item")


@dataclass(kw_only=True)
class ExampleDataset(Dataset[Item], ABC, Generic[Item]):
    """A training set of examples; a subclass converts them for one kind of training.

    Attributes:
        items: one item per example; a repeated example occurs several times.
        dropped: number of examples left out, by reason.
    """

    items: list[Item] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @abstractmethod
    def convert(self, example: Example, labelling: Labelling) -> Item | None:
        """Convert an example to an item; count it in `dropped` and return None if unusable."""

    def add(self, examples: ExampleSet, labelling: Labelling, repeat: int = 1) -> None:
        """Convert a set of examples and append the items.

        Args:
            examples: the set.
            labelling: "evidence" takes the labels of the set; "answer" labels as evidence what
                holds an answer string.
            repeat: how often each example occurs in an epoch.
        """
        for example in examples.examples:
            item = self.convert(example, labelling)
            if item is not None:
                self.items += [item] * repeat

    def __len__(self) -> int:
        """Number of items."""
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        """The item at an index."""
        return self.items[index]

"""Examples converted into the items of a training set, with a count of those left out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch.utils.data import Dataset

from sedem.data.examples import Example, ExampleSet
from sedem.data.labels import Labelling, labelling_of

Item = TypeVar("Item")


@dataclass(kw_only=True)
class ExampleDataset(Dataset[Item], ABC, Generic[Item]):
    """A training set of examples; a subclass converts them for one kind of training.

    Attributes:
        items: one item per example; a repeated example occurs several times.
        dropped: number of examples left out, by reason.
        by_answer: number of examples whose labels come from answer strings.
    """

    items: list[Item] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    by_answer: int = 0

    @abstractmethod
    def convert(self, example: Example, labelling: Labelling) -> Item | None:
        """Convert an example to an item; count it in `dropped` and return None if unusable."""

    def add(self, examples: ExampleSet, labelling: Labelling, repeat: int = 1) -> None:
        """Convert a set of examples and append the items.

        Args:
            examples: the set.
            labelling: "evidence" takes the labels of the set; "answer" labels as evidence what
                holds an answer string, as is done for every example without evidence.
            repeat: how often each example occurs in an epoch.
        """
        for example in examples.examples:
            own = labelling_of(example, labelling)
            item = self.convert(example, own)
            if item is not None:
                self.by_answer += own == "answer"
                self.items += [item] * repeat

    def __len__(self) -> int:
        """Number of items."""
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        """The item at an index."""
        return self.items[index]

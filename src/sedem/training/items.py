"""Sets of examples as the items that a training goes through, what was left out counted."""

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
class Items(Dataset[Item], ABC, Generic[Item]):
    """What examples become for one kind of training.

    Attributes:
        items: one an example, as often as it counts.
        dropped: what was left out, and why.
    """

    items: list[Item] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @abstractmethod
    def item(self, example: Example, labelling: Labelling) -> Item | None:
        """An example as an item; None, counted, where it cannot be used."""

    def add(self, examples: ExampleSet, labelling: Labelling, repeat: int = 1) -> None:
        """Take in a set.

        Args:
            examples: the set.
            labelling: "evidence" uses its labels, "answer" what holds an answer string.
            repeat: how many times each example counts.
        """
        for example in examples.examples:
            item = self.item(example, labelling)
            if item is not None:
                self.items += [item] * repeat

    def __len__(self) -> int:
        """Number of items."""
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        """One item."""
        return self.items[index]

"""Sets of invented questions: one way from articles, a split and a seed to examples.

A hash of its text assigns every invented name and value to training or evaluation.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sedem.config import Whole, WholeAbove0
from sedem.errors import DataError
from sedem_lab.data.articles import articles, paragraphs
from sedem_lab.data.examples import ExampleSet, numbered_example
from sedem_lab.data.records import Records

Split = Literal["train", "evaluation"]
Told = tuple[list[str], str, str, list[tuple[str, int, int]]]
"""Texts of a context in order, question, answer, and evidence: a text, its start and end there."""

SHORTEST = 250
"""Minimum characters of a real paragraph."""


def split_of(text: str) -> Split:
    """The split that a name or value belongs to."""
    return "train" if hashlib.sha256(text.encode()).digest()[0] % 2 else "evaluation"


@dataclass(frozen=True)
class InventedSet:
    """A set whose questions are about invented texts, hidden among real paragraphs.

    Attributes:
        key: what seeds an example, with places for split, seed and number; its id has hyphens.
        real: number of real paragraphs in a context.
        longest: maximum characters of one of them.
        tell: invents a context, with some of the given real paragraphs.
        document: name of a document, which a number follows.
    """

    name: str
    key: str
    real: int
    longest: int
    tell: Callable[[Split, random.Random, Sequence[str]], Told]
    document: str = "paragraph"

    def read(
        self,
        records: Records,
        *,
        split: Split = "evaluation",
        count: WholeAbove0 = 1000,
        seed: Whole = 0,
    ) -> ExampleSet:
        """Examples with paragraphs of articles (`title` and `text`) beside the invented ones.

        Raises:
            DataError: the articles have too few paragraphs.
        """
        texts = [text for _, text in articles(records)]
        real = [p for text in texts for p in paragraphs(text, SHORTEST, self.longest)]
        return self.generate(split, count, real, seed=seed)

    def generate(
        self, split: Split, count: int, real: Sequence[str], *, seed: int = 0
    ) -> ExampleSet:
        """Examples of a split with the given real paragraphs.

        Raises:
            DataError: there are too few of these.
        """
        if len(real) < self.real:
            raise DataError(
                f"a context needs {self.real} filler paragraphs, {len(real)} are given; "
                "give more text"
            )
        result = ExampleSet(f"{self.name}-{split}", [])
        for number in range(count):
            given = split, seed, number
            told = self.tell(split, random.Random(self.key.format(*given)), real)
            identity = self.key.replace(":", "-").format(*given)
            result.examples.append(numbered_example(identity, self.document, *told))
        return result

"""What a campaign of faults has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Result:
    """The figures of a campaign.

    Attributes:
        unit: what is counted, in the plural.
        cases: number of cases by their kind.
        counts: what else was counted.
        wrong: one sentence for each case that went wrong.
    """

    unit: str
    cases: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        """Count something."""
        self.counts[what] += number

    @contextmanager
    def case(self, kind: str, where: str) -> Iterator[None]:
        """Count a case; an error inside the `with` block is noted and does not end the campaign."""
        self.cases[kind] += 1
        try:
            yield
        except Exception as error:
            told = str(error)
            self.wrong.append(told if where in told else f"{where}: {type(error).__name__}: {told}")

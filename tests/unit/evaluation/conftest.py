"""Examples about numbered hills, and a method that needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sedem import Answer, Citation, Document
from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem_lab.data.examples import Evidence, Example


def hill(number: int) -> Example:
    """Two documents of which the second holds the answer."""
    documents = (
        Document("lake", f"Lake {number} is deep."),
        Document("hill", f"Hill {number} lies at {number}00 metres."),
    )
    evidence = (Evidence(1, 0, len(documents[1].text)),)
    return Example(f"q{number}", documents, f"Hill {number}?", (f"{number}00 metres",), evidence)


class Echo:
    """A method that answers from the references, and fails at chosen examples."""

    def __init__(
        self, batch: int = 1, bad: Sequence[str] = (), dies: str = "", right: bool = True
    ) -> None:
        self.batch = batch
        self.backbone: Backbone | None = None
        self.bad = bad
        self.dies = dies
        self.right = right
        self.answered: list[str] = []

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its second document."""
        for example in examples:
            if example.id in self.bad:
                raise DataError(f"the question of {example.id} is too long")
            if example.id == self.dies:
                raise KeyboardInterrupt
        self.answered += [example.id for example in examples]
        return [self._answer(example) for example in examples]

    def _answer(self, example: Example) -> Answer:
        found = example.documents[1]
        return Answer(
            text=example.answers[0] if self.right else "no idea",
            citations=(Citation(1, found.name, 0, len(found.text), 1.0, found.text),),
            k=1,
            blocks=2,
            timings={"select_ms": 1.0, "ttft_ms": 2.0, "total_ms": 3.0},
            finish_reason="end",
            model="echo",
            conditioning=40,
            stored_bytes=100,
            context_tokens=10,
            ranking=(("hill", 0, len(found.text)), ("lake", 0, 4)),
        )


@pytest.fixture
def examples() -> list[Example]:
    return [hill(number) for number in range(1, 8)]

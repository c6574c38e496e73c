"""Questions in two steps: one paragraph names a person, firm or town, another one describes it.

"How many people work at the firm that employs Ada Corbury?" shares no name with the paragraph that
answers it. Everything is invented, as in the exact-facts set, whose splits it has: no name or value
of training occurs in evaluation. Among the other paragraphs are statements of the same kinds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sedem.config import Whole, WholeAbove0
from sedem.types import Document
from sedem_lab.data.articles import fillers
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.data.facts import Split, make
from sedem_lab.data.records import Records

REAL, OTHERS = 4, 2
"""Real paragraphs of a context, and other pairs of invented ones."""


@dataclass(frozen=True)
class Relation:
    """How one thing leads to another: kinds of both, statements, and words for the second."""

    kinds: tuple[str, str]
    statements: tuple[str, ...]
    described: str


@dataclass(frozen=True)
class Attribute:
    """What is said of a thing: the kind of the value, a statement, and a question."""

    kind: str
    statement: str
    question: str


RELATIONS = (
    Relation(
        ("person", "firm"),
        ("{a} has worked for {b} for many years.", "{a} joined {b} as a clerk."),
        "the firm that employs {a}",
    ),
    Relation(
        ("person", "place"),
        ("{a} grew up in {b}.", "{b} is the home town of {a}."),
        "the town where {a} grew up",
    ),
    Relation(("place", "person"), ("The mayor of {a} is {b}.",), "the mayor of {a}"),
    Relation(
        ("firm", "person"),
        ("{b} founded {a}.", "{a} was founded by {b}."),
        "the founder of {a}",
    ),
    Relation(
        ("firm", "place"),
        ("{a} has its seat in {b}.", "The offices of {a} are in {b}."),
        "the town where {a} is based",
    ),
)
ATTRIBUTES = {
    "firm": (
        Attribute("year", "{a} was registered in {v}.", "In what year was {d} registered?"),
        Attribute("count", "{a} has {v} employees.", "How many people work at {d}?"),
        Attribute("person", "{v} runs {a} today.", "Who runs {d} today?"),
    ),
    "place": (
        Attribute("count", "{a} has {v} inhabitants.", "How many inhabitants does {d} have?"),
        Attribute("year", "{a} became a town in {v}.", "When did {d} become a town?"),
        Attribute("metres", "{a} lies {v} above the sea.", "How high does {d} lie?"),
    ),
    "person": (
        Attribute("date", "{a} was born on {v}.", "When was {d} born?"),
        Attribute("money", "{a} left {v} to a school.", "How much did {d} leave to a school?"),
        Attribute("code", "The file of {a} has number {v}.", "What number has the file of {d}?"),
    ),
}


def read(
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
    real = fillers(records, 250, 650, REAL)
    examples = [_example(f"two-steps-{split}-{seed}-{n}", split, real) for n in range(count)]
    return ExampleSet(f"two-steps-{split}", examples)


def _example(name: str, split: Split, real: Sequence[str]) -> Example:
    rng = random.Random(name)
    first, second, question, answer = _pair(split, rng)
    texts = [first, second]
    for _ in range(OTHERS):
        texts += _pair(split, rng)[:2]
    texts = rng.sample([*texts, *rng.sample(real, REAL)], len(texts) + REAL)
    places = [texts.index(text) for text in (first, second)]
    return Example(
        name,
        tuple(Document(f"paragraph {i}", text) for i, text in enumerate(texts, 1)),
        question,
        (answer,),
        tuple(Evidence(place, 0, len(texts[place])) for place in places),
    )


def _pair(split: Split, rng: random.Random) -> tuple[str, str, str, str]:
    """A paragraph about a thing that names another, one about the other, question and answer."""
    relation = rng.choice(RELATIONS)
    own, other = (make(kind, split, rng) for kind in relation.kinds)
    asked, beside = rng.sample(ATTRIBUTES[relation.kinds[1]], 2)
    [extra] = rng.sample(ATTRIBUTES[relation.kinds[0]], 1)
    value = make(asked.kind, split, rng)
    leads = rng.choice(relation.statements).format(a=own, b=other)
    first = [leads, extra.statement.format(a=own, v=make(extra.kind, split, rng))]
    second = [
        asked.statement.format(a=other, v=value),
        beside.statement.format(a=other, v=make(beside.kind, split, rng)),
    ]
    first, second = (rng.sample(lines, 2) for lines in (first, second))
    question = asked.question.format(d=relation.described.format(a=own))
    return " ".join(first), " ".join(second), question, value

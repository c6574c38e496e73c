"""Questions in two steps: one paragraph names a person, firm or town, another one describes it.

"How many people work at the firm that employs Ada Corbury?" shares no name with the paragraph that
answers it. Everything is invented, as in the exact-facts set, whose splits it has: no name or value
of training occurs in evaluation. Among the other paragraphs are statements of the same kinds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sedem_lab.data.facts import make
from sedem_lab.data.invented import InventedSet, Split, Told

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


def _tell(split: Split, rng: random.Random, real: Sequence[str]) -> Told:
    first, second, question, answer = _pair(split, rng)
    texts = [first, second]
    for _ in range(OTHERS):
        texts += _pair(split, rng)[:2]
    texts = rng.sample([*texts, *rng.sample(real, REAL)], len(texts) + REAL)
    return texts, question, answer, [(text, 0, len(text)) for text in (first, second)]


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


TWO_STEPS = InventedSet("two-steps", "two-steps-{}-{}-{}", REAL, 650, _tell)
"""The set; both paragraphs that lead to the answer are evidence."""

"""The exact-facts set, which tests whether compression loses names, numbers, dates and codes.

Each invented person, place, contract or shipment has a paragraph, hidden among real paragraphs.
Only that paragraph answers the question, with an exact value. Training and evaluation share no
template, name or value: templates are in two lists (fact_templates.json), and a hash of its text
assigns every name and value to one of the two splits.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from sedem.config import Whole, WholeAbove0
from sedem.types import Document
from sedem_lab.data.articles import check_fillers, fillers
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.data.records import Records

Split = Literal["train", "evaluation"]
REAL, INVENTED = 8, 2
"""Paragraphs of a context; the question is about an invented one."""

_FIRST = (
    "Ada Albin Berta Carl Clara Dora Edgar Elsa Emil Felix Greta Hanna Hugo Ida Ivan Jonas Karin "
    "Lena Leo Mara Martin Nora Olga Otto Paula Peter Rita Rosa Simon Thea Tomas Vera Viktor Wanda"
).split()
_STARTS = (
    "Al Bar Bel Bran Cal Car Cor Dal Dan Dar El Fal Far Gal Gar Hal Har Hol Kal Kar Kel Kor Lan "
    "Lor Mal Mar Mel Mor Nor Or Pel Per Ral Ran Ros Sal San Sel Sor Stan Tal Tar Tor Ul Val Var "
    "Vel Wal War Wen"
).split()
_ENDS = (
    "bach berg bury by den don eck en er field ford gate ham holm in ing land ley lin lock man mar "
    "mere mond more ney ow rick rin ris rod sen shire son stad stead ton vale vik ville way wick "
    "win wood worth"
).split()
_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_GOODS = "carpets glass timber wool copper grain paper salt linen ceramics leather tin".split()
_COINS = "crowns florins marks pounds".split()
_TRADES = "Brothers Company Mills Works Trading Foundry".split()


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(2))
    return f"{letters}-{rng.randrange(1000, 10000)}"


_MAKERS: dict[str, Callable[[random.Random, Split], str]] = {
    "place": lambda rng, split: rng.choice(_STARTS) + rng.choice(_ENDS),
    "person": lambda rng, split: f"{rng.choice(_FIRST)} {make('place', split, rng)}",
    "firm": lambda rng, split: f"{make('place', split, rng)} {rng.choice(_TRADES)}",
    "contract": lambda rng, split: f"contract {make('code', split, rng)}",
    "shipment": lambda rng, split: f"shipment {make('code', split, rng)}",
    "code": lambda rng, split: _code(rng),
    "date": lambda rng, split: (
        f"{rng.randrange(1, 29)} {rng.choice(_MONTHS)} {rng.randrange(1801, 2024)}"
    ),
    "year": lambda rng, split: str(rng.randrange(1201, 2024)),
    "count": lambda rng, split: f"{rng.randrange(1000, 100000):,}",
    "money": lambda rng, split: f"{rng.randrange(1000, 90000):,} {rng.choice(_COINS)}",
    "metres": lambda rng, split: f"{rng.randrange(12, 4000)} metres",
    "kilos": lambda rng, split: f"{rng.randrange(110, 9999)} kg",
    "goods": lambda rng, split: f"{rng.choice(_GOODS)} from {make('place', split, rng)}",
}


def read(
    records: Records,
    *,
    split: Split = "evaluation",
    count: WholeAbove0 = 1000,
    seed: Whole = 0,
) -> ExampleSet:
    """Examples with the paragraphs of articles (`title` and `text`) as fillers.

    Raises:
        DataError: the articles have too few paragraphs.
    """
    return generate(split, count, fillers(records, 250, 650, REAL), seed=seed)


def generate(split: Split, count: int, real: Sequence[str], *, seed: int = 0) -> ExampleSet:
    """Examples with facts of a split, each hidden among real paragraphs.

    Raises:
        DataError: there are too few of these.
    """
    check_fillers(real, REAL)
    examples = []
    for number in range(count):
        rng = random.Random(f"{split}:{seed}:{number}")
        name, gold, question, value, start, end = _tell(split, rng)
        texts = [gold]
        while len(texts) < INVENTED:
            _, other, *_ = _tell(split, rng)
            # No other paragraph is about the same thing, so the question has one answer.
            if name.lower() not in other.lower():
                texts.append(other)
        texts = rng.sample([*texts, *rng.sample(real, REAL)], REAL + INVENTED)
        examples.append(
            Example(
                f"{split}-{seed}-{number}",
                tuple(Document(f"paragraph {i}", text) for i, text in enumerate(texts, 1)),
                question,
                (value,),
                (Evidence(texts.index(gold), start, end),),
            )
        )
    return ExampleSet(f"exact-facts-{split}", examples)


def split_of(text: str) -> Split:
    """The split that a name or value belongs to."""
    return "train" if hashlib.sha256(text.encode()).digest()[0] % 2 else "evaluation"


@cache
def templates() -> dict[str, Any]:
    """Attributes of each kind of invented thing, with their templates by split."""
    return dict(json.loads((files("sedem_lab.data") / "fact_templates.json").read_text()))


def _tell(split: Split, rng: random.Random) -> tuple[str, str, str, str, int, int]:
    """Name of a thing, paragraph, question, answer, start and end of the answer's sentence."""
    kind = rng.choice(sorted(templates()))
    name = make(kind, split, rng)
    attributes = rng.sample(templates()[kind], rng.choice((3, 4)))
    asked = rng.randrange(len(attributes))
    text, question, answer, span = "", "", "", (0, 0)
    for index, attribute in enumerate(attributes):
        value = make(attribute["value"], split, rng)
        words = attribute[split]
        sentence = rng.choice(words["statements"]).format(name=name, value=value)
        sentence = sentence[0].upper() + sentence[1:]
        start = len(text) + 1 if text else 0
        text = f"{text} {sentence}" if text else sentence
        if index == asked:
            question = rng.choice(words["questions"]).format(name=name)
            answer, span = value, (start, len(text))
    return name, text, question, answer, *span


def make(kind: str, split: Split, rng: random.Random) -> str:
    """A random name or value of a split; its parts belong to that split too."""
    while True:
        candidate = _MAKERS[kind](rng, split)
        if split_of(candidate) == split:
            return candidate

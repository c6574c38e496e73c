"""The exact-facts set, which tests whether compression loses names, numbers, dates and codes.

Each invented person, place, contract or shipment has a paragraph, hidden among real paragraphs.
Only that paragraph answers the question, with an exact value. Training and evaluation share no
template, name or value: templates are in two lists (fact_templates.json), and a hash of its text
assigns every name and value to one of the two splits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from sedem_lab.data.invented import InventedSet, Split, Told, split_of

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
_LETTERS = "ABCDEFGHJKLMNPRSTUVWXYZ"
_TRADES = "Brothers Company Mills Works Trading Foundry".split()


_MAKERS: dict[str, Callable[[random.Random, Split], str]] = {
    "place": lambda rng, split: rng.choice(_STARTS) + rng.choice(_ENDS),
    "person": lambda rng, split: f"{rng.choice(_FIRST)} {make('place', split, rng)}",
    "firm": lambda rng, split: f"{make('place', split, rng)} {rng.choice(_TRADES)}",
    "contract": lambda rng, split: f"contract {make('code', split, rng)}",
    "shipment": lambda rng, split: f"shipment {make('code', split, rng)}",
    "code": lambda rng, split: (
        f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)}-{rng.randrange(1000, 10000)}"
    ),
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


@cache
def templates() -> dict[str, Any]:
    """Attributes of each kind of invented thing, with their templates by split."""
    return dict(json.loads((files("sedem_lab.data") / "fact_templates.json").read_text()))


def _tell(split: Split, rng: random.Random, real: Sequence[str]) -> Told:
    name, gold, question, value, start, end = _paragraph(split, rng)
    texts = [gold]
    while len(texts) < INVENTED:
        _, other, *_ = _paragraph(split, rng)
        # No other paragraph is about the same thing, so the question has one answer.
        if name.lower() not in other.lower():
            texts.append(other)
    texts = rng.sample([*texts, *rng.sample(real, REAL)], REAL + INVENTED)
    return texts, question, value, [(gold, start, end)]


def _paragraph(split: Split, rng: random.Random) -> tuple[str, str, str, str, int, int]:
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


EXACT_FACTS = InventedSet("exact-facts", "{}:{}:{}", REAL, 650, _tell)
"""The set; one thing of a context is asked about."""

"""Generated paperwork: leases, invoices, letters, handbooks and tables, with questions about them.

People's own documents are full of names, sums and dates that must be repeated letter by letter. No
public set has such documents, so these are made from templates (paperwork.json). Values have many
forms, because spelling is what is learned. A hash of its text assigns every value to training or
evaluation, as in the exact-facts set; the templates are shared.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from sedem_lab.data.invented import InventedSet, Split, Told, split_of

PAPERS, REAL = 4, 3
"""Generated documents of a context, the question is about one of them; and real paragraphs."""
_BREAK = re.compile(r"\n+|(?<=\.) ")


def _one(rng: random.Random, kind: str) -> str:
    return rng.choice(_words()[kind])


def _surname(rng: random.Random) -> str:
    lead = rng.choice(["", "", "", "", "", "", "van ", "de ", "Mc", "O'", "al-", "Mac"])
    return lead + _one(rng, "stems") + _one(rng, "tails")


def _place(rng: random.Random) -> str:
    return _one(rng, "stems") + _one(rng, "places")


def _street(rng: random.Random) -> str:
    way, name = _one(rng, "ways"), _place(rng)
    joined = f"{name}{way}" if way[0].islower() else f"{name} {way}"
    return rng.choice([f"{joined} {rng.randrange(1, 190)}", f"{rng.randrange(1, 190)} {joined}"])


def _money(rng: random.Random) -> str:
    amount = rng.choice([rng.randrange(12, 999), rng.randrange(1000, 98000)])
    cents = f".{rng.randrange(5, 100, 5):02d}" if rng.random() < 0.4 else ""
    shown = f"{amount:,}{cents}" if rng.random() < 0.85 else f"{amount}{cents}"
    form = rng.choice(
        ["{} euros", "€{}", "{} EUR", "${}", "£{}", "{} crowns", "{} SEK", "{} pounds"]
    )
    return form.format(shown)


def _date(rng: random.Random) -> str:
    day, month, year = rng.randrange(1, 29), rng.randrange(12), rng.randrange(1998, 2032)
    named = _words()["months"][month]
    forms = [
        f"{day} {named} {year}",
        f"{named} {day}, {year}",
        f"{year}-{month + 1:02d}-{day:02d}",
        f"{day:02d}.{month + 1:02d}.{year}",
        f"{day} {named[:3]} {year}",
    ]
    return rng.choices(forms, (6, 3, 1, 1, 1))[0]


def _letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(count))


def _reference(rng: random.Random) -> str:
    number = rng.randrange(100, 99999)
    year = rng.randrange(2015, 2031)
    return rng.choice(
        [f"{_letters(rng, 2)}-{number}", f"{year}/{number}", f"{_letters(rng, 3)}{number}",
         f"{number}-{_letters(rng, 1)}"]
    )  # fmt: skip


def _mail(rng: random.Random) -> str:
    name = re.sub("[^a-z]", "", _surname(rng).lower())
    return f"{rng.choice(['office', 'info', 'service', name])}@{_place(rng).lower()}.example"


def _phone(rng: random.Random) -> str:
    parts = [f"{rng.randrange(10, 100)}" for _ in range(3)]
    return rng.choice(["0{} {} {}", "+49 {} {}{}", "({}) {}-{}", "0{}-{}{}"]).format(*parts)


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "person": lambda rng: f"{_one(rng, 'first')} {_surname(rng)}",
    "firm": lambda rng: f"{rng.choice([_surname, _place])(rng)} {_one(rng, 'firms')}",
    "place": _place,
    "street": _street,
    "money": _money,
    "date": _date,
    "month": lambda rng: f"{_one(rng, 'months')} {rng.randrange(2005, 2031)}",
    "reference": _reference,
    "mail": _mail,
    "phone": _phone,
    "goods": lambda rng: _one(rng, "goods"),
    "room": lambda rng: f"the {_one(rng, 'rooms')}",
    "count": lambda rng: f"{rng.choice([rng.randrange(3, 60), rng.randrange(60, 4000)]):,}",
    "percent": lambda rng: rng.choice(
        [f"{rng.randrange(2, 40)} percent", f"{rng.randrange(2, 40)}.{rng.randrange(1, 10)} %"]
    ),
    "clock": lambda rng: f"{rng.randrange(6, 22)}:{rng.choice(['00', '15', '30', '45'])}",
    "period": lambda rng: (
        f"{rng.choice([*_words()['numbers'][1:], '14', '21', '28', '30', '45', '90'])} "
        f"{rng.choice(['days', 'working days', 'weeks', 'months'])}"
    ),
    "area": lambda rng: f"{rng.randrange(18, 240)} square metres",
}
"""What draws a value of each type."""
SMALL = ("goods", "room", "clock", "period", "percent", "count", "month", "area")
"""Types with too few values, or too common ones, to be divided between splits."""


def templates() -> list[dict[str, Any]]:
    """Kinds of paper: the types of their fields, their texts, and questions by field."""
    return list(_file()["kinds"])


def _words() -> dict[str, list[str]]:
    """The words and syllables that values are made of."""
    return dict(_file()["words"])


@cache
def _file() -> dict[str, Any]:
    return dict(json.loads((files("sedem_lab.data") / "paperwork.json").read_text("utf-8")))


def _tell(split: Split, rng: random.Random, real: Sequence[str]) -> Told:
    kind = rng.choice(templates())
    field = rng.choice(sorted(kind["questions"]))
    values, template = _paper(kind, split, rng)
    text = template.format_map(values)
    # Others of the same kind lie beside it, so the question names what it is about.
    others = [_paper(rng.choice([kind, *templates()]), split, rng) for _ in range(PAPERS - 1)]
    beside = [template.format_map(values) for values, template in others]
    texts = [text, *beside, *rng.sample(real, REAL)]
    rng.shuffle(texts)
    # Where the field stands, since its value may also be a part of another one before it.
    start = len(template[: template.index(f"{{{field}}}")].format_map(values))
    # The sentence, or the line of a table, around it.
    after = _BREAK.search(text, start + len(values[field]))
    [*_, start] = [0, *(found.end() for found in _BREAK.finditer(text, 0, start))]
    question = rng.choice(kind["questions"][field]).format_map(values)
    return texts, question, values[field], [(text, start, after.start() if after else len(text))]


def _paper(kind: dict[str, Any], split: Split, rng: random.Random) -> tuple[dict[str, str], str]:
    """Values by field, all different, and the text that they fill."""
    values: dict[str, str] = {}
    for field, of_type in kind["fields"].items():
        value = make(of_type, split, rng)
        while value in values.values():
            value = make(of_type, split, rng)
        values[field] = value
    return values, rng.choice(kind["texts"])


def make(of_type: str, split: Split, rng: random.Random) -> str:
    """A random value of a split."""
    while True:
        value = MAKERS[of_type](rng)
        if of_type in SMALL or split_of(value) == split:
            return value


PAPERWORK = InventedSet("paperwork", "paperwork:{}:{}:{}", REAL, 900, _tell, "paper")
"""The set; one paper of a context is asked about."""

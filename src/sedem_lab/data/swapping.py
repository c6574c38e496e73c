"""Copies of questions whose answers are invented, so that nobody can know them without reading.

A model that read the web may know that Ulysses was launched in 1990. In a copy, the answer is
another name or number, in the question and in every document.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from sedem_lab.data.examples import Evidence, Example
from sedem_lab.data.facts import make
from sedem_lab.data.invented import Split

NOTHING = "no name or number to swap"
"""The reason under which a question is dropped whose answer is neither, or is part of a word."""

_YEAR = re.compile(r"1\d{3}|20\d\d")
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")
_NAME = re.compile(r"[A-Z][a-z]{2,}(?: [A-Z][a-z]{2,})*")


def swapped(example: Example, split: Split = "evaluation") -> Example | None:
    """A copy with an invented answer of the same kind; None if the answer has no such kind.

    Evidence must be the answer itself, as in SQuAD.

    Args:
        split: whose names are invented.
    """
    given, rng = example.answers[0], random.Random(f"swap:{example.id}")
    # What replaces each part of the answer.
    if _YEAR.fullmatch(given):
        year = int(given)
        swaps = {given: str(rng.choice([n for n in range(year - 60, year + 20) if n != year]))}
    elif _NUMBER.fullmatch(given):
        drawn = given
        while drawn == given:
            drawn = re.sub(r"\d", lambda _: str(rng.randrange(1, 10)), given)
        swaps = {given: drawn}
    elif _NAME.fullmatch(given):
        swaps = {word: make("place", split, rng) for word in given.split()}
    else:
        return None
    words = "|".join(map(re.escape, swaps))
    pattern = re.compile(rf"(?<![\w,.])(?:{words})(?!\w|[,.]\d)")

    def changed(text: str) -> str:
        return pattern.sub(lambda found: swaps[found[0]], text)

    documents = tuple(replace(one, text=changed(one.text)) for one in example.documents)
    answer, evidence = changed(given), []
    for span in example.evidence:
        start = len(changed(example.documents[span.document].text[: span.start]))
        evidence.append(Evidence(span.document, start, start + len(answer)))
        if not documents[span.document].text.startswith(answer, start):
            return None
    question = changed(example.question)
    return Example(example.id, documents, question, (answer,), tuple(evidence))

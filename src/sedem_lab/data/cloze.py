"""Cloze supervision: questions made from sentences of the documents, without human labels.

In a sentence that can stand alone, a question word replaces one specific span (a date, a year, a
number, a name). The span is the answer, and the sentence is the evidence. Fixed rules select
sentences and spans, so a text always gives the same questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sedem.config import Whole, WholeAbove0
from sedem.errors import DataError
from sedem_lab.data.articles import articles, paragraphs
from sedem_lab.data.examples import ExampleSet, numbered_example
from sedem_lab.data.records import Records

SHORTEST, LONGEST = 8, 32
"""Minimum and maximum words of a sentence that is asked about."""
DOCUMENTS = 10
"""Number of paragraphs in a context."""
CHARACTERS = 200, 900
"""Minimum and maximum characters of a paragraph."""

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_SENTENCE = re.compile(r"[A-Z\"(].*?[.!?](?=\s+[A-Z\"(]|\s*\Z)", re.DOTALL)
# Kinds of span, the most specific first, with the words that replace them.
_KINDS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(rf"\b(\d{{1,2}} (?:{_MONTH}) \d{{4}}|(?:{_MONTH}) \d{{1,2}}, \d{{4}})\b"),
        "what date",
    ),
    (re.compile(rf"\b((?:{_MONTH}) \d{{4}})\b"), "what month"),
    (re.compile(r"\bin (1[0-9]{3}|20[0-2][0-9])\b"), "what year"),
    (
        re.compile(r"\b(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)(?= (?:percent|[mb]illion|[a-z]+s)\b)"),
        "how many",
    ),
    (
        re.compile(
            r"\b(?:by|from|with|at|to|near|called|named) ([A-Z][a-z]+(?: [A-Z][a-z]+){0,3})\b"
        ),
        "what",
    ),
)
# A sentence that starts like this refers to another sentence.
_DEPENDENT = re.compile(
    r"(?:He|She|It|They|This|That|These|Those|His|Her|Its|Their|There|Here|However|But|And|Also|"
    r"Such|Some|Others?|Another|Both|Thus|Therefore|Then|In this|At this|For this)\b"
)


@dataclass(frozen=True)
class Cloze:
    """A question, its answer, and the span of the sentence in its paragraph."""

    question: str
    answer: str
    start: int
    end: int


def clozes(paragraph: str) -> Iterator[Cloze]:
    """Questions of a paragraph, at most one per sentence."""
    for match in _SENTENCE.finditer(paragraph):
        sentence = match.group()
        # It must stand alone.
        if not (
            SHORTEST <= len(sentence.split()) <= LONGEST
            and not _DEPENDENT.match(sentence.lstrip('"('))
            and sentence.count("(") == sentence.count(")")
            and sentence.count('"') % 2 == 0
            and not {"|", "\n"} & set(sentence)
        ):
            continue
        for pattern, words in _KINDS:
            found = pattern.search(sentence)
            if found is None:
                continue
            # The span must occur once in its paragraph, and not in a quotation.
            spans = re.findall(rf"(?<!\w){re.escape(found.group(1))}(?!\w)", paragraph)
            if len(spans) == 1 and sentence.count('"', 0, found.start(1)) % 2 == 0:
                question = sentence[: found.start(1)] + words + sentence[found.end(1) :]
                question = " ".join(question.rstrip(".!? ").split()) + "?"
                yield Cloze(question, found.group(1), match.start(), match.end())
                break


def read(records: Records, *, count: WholeAbove0 = 10_000, seed: Whole = 0) -> ExampleSet:
    """Cloze questions of articles: each paragraph among others, half of them from its article.

    Raises:
        DataError: the articles have too few paragraphs.
    """
    pool = [list(dict.fromkeys(paragraphs(text, *CHARACTERS))) for _, text in articles(records)]
    usable = [own for own in pool if len(own) >= 2]
    given = len({paragraph for own in usable for paragraph in own})
    if given < DOCUMENTS:
        raise DataError(
            f"a context needs {DOCUMENTS} paragraphs, {given} are given; give more text"
        )
    result = ExampleSet("cloze", [])
    result.dropped["articles with fewer than two paragraphs"] = len(pool) - len(usable)
    candidates = [(own, gold, cloze) for own in usable for gold in own for cloze in clozes(gold)]
    random.Random(f"cloze:{seed}").shuffle(candidates)
    for number, (own, gold, cloze) in enumerate(candidates[:count]):
        rng = random.Random(f"cloze:{seed}:{number}")
        near = [paragraph for paragraph in own if paragraph != gold]
        # Half of the context is from the same article, the rest from any.
        texts = [gold, *rng.sample(near, min(DOCUMENTS // 2, len(near)))]
        while len(texts) < DOCUMENTS:
            other = rng.choice(rng.choice(usable))
            if other not in texts:
                texts.append(other)
        texts = rng.sample(texts, DOCUMENTS)
        evidence = [(gold, cloze.start, cloze.end)]
        identity = f"cloze-{seed}-{number}"
        result.examples.append(
            numbered_example(identity, "paragraph", texts, cloze.question, cloze.answer, evidence)
        )
    return result

"""Questions made from a user's own documents, without human labels.

Questions ask about a date, a year, a number or a name in a sentence (`cloze`), with the sentence as
evidence. In any other sentence, and in any language, they ask about words that occur nowhere else
in the documents; the block that contains them is found by the answer string (`labels`).
"""

from __future__ import annotations

import random
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.cloze import DOCUMENTS, LONGEST, SHORTEST, Cloze, add_among_others, clozes
from sedem_lab.data.examples import ExampleSet

SHORT_PIECE, LONG_PIECE = 200, 900
"""Characters of a piece: a shorter one is joined with the next, a longer one is split."""
RARE_WORDS = 3
"""Maximum words of an answer that is not a span known to `cloze`."""
RARE_LETTERS = 4
"""Minimum letters of each of these words."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+(?:[-'\u2019.,]\w+)*")
_PART = re.compile(r"\w+")


def pieces(text: str) -> list[str]:
    """Split a text into single-line pieces; only white space is lost.

    A piece ends with a paragraph if it is long enough, and otherwise with a sentence. Hard line
    breaks and headings need no special treatment: a line is joined with what follows.
    """
    found: list[str] = []
    current = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for number, sentence in enumerate(_sentences(paragraph)):
            joined = f"{current} {sentence}".strip()
            ends = number == 0 and len(current) >= SHORT_PIECE
            if current and (ends or len(joined) > LONG_PIECE):
                found.append(current)
                joined = sentence
            current = joined
    return [*found, current] if current else found


def questions(
    asked: Sequence[Document], among: Sequence[Document], *, count: int, seed: int = 0
) -> ExampleSet:
    """Make questions about documents; each has the piece with its answer among other pieces.

    Args:
        among: the documents that give the other pieces; half are from the document itself.
        count: maximum number of questions; `noted` counts those left over.
    """
    own = [list(dict.fromkeys(pieces(document.text))) for document in asked]
    every = [piece for document in among for piece in pieces(document.text)]
    pool = list(dict.fromkeys([*every, *(piece for some in own for piece in some)]))
    occurring = Counter(part.lower() for piece in pool for part in _PART.findall(piece))
    candidates = [
        (some, piece, found) for some in own for piece in some for found in blanks(piece, occurring)
    ]
    result = ExampleSet("documents", [])
    if len(candidates) > count:
        result.noted["questions that are not used"] = len(candidates) - count
    size = min(DOCUMENTS, len(pool))
    add_among_others(result, candidates, count, lambda rng: rng.choice(pool), size, seed)
    return result


def blanks(piece: str, occurring: Mapping[str, int]) -> Iterator[Cloze]:
    """Questions of a piece, at most one per sentence.

    Args:
        occurring: how often each run of letters, in lower case, occurs in all documents.
    """
    known = list(clozes(piece))
    yield from known
    bounds = [0, *(end.end() for end in _SENTENCE_END.finditer(piece)), len(piece) + 1]
    for start, end in pairwise(bounds):
        if any(found.start < end and start < found.end for found in known):
            continue
        sentence = piece[start:end].strip()
        span = _rare_words(sentence, occurring)
        if span is not None and SHORTEST <= len(sentence.split()) <= LONGEST:
            question = f"{sentence[: span[0]]}what{sentence[span[1] :]}"
            yield Cloze(f"{question.rstrip('.!? ')}?", sentence[slice(*span)])


def _sentences(paragraph: str) -> Iterator[str]:
    """Single-line sentences of a paragraph; sentences longer than a piece are split."""
    for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
        yield from textwrap.wrap(sentence, LONG_PIECE, break_on_hyphens=False)


def _rare_words(sentence: str, occurring: Mapping[str, int]) -> tuple[int, int] | None:
    """The longest run of words that occur only once in all documents; never the first word."""
    best: tuple[int, int] | None = None
    run: list[re.Match[str]] = []
    for word in list(_WORD.finditer(sentence))[1:]:
        text = word.group()
        counts = [occurring[part] for part in _PART.findall(text.lower())]
        rare = min(counts) == 1 and len(text) >= RARE_LETTERS
        follows = bool(run) and sentence[run[-1].end() : word.start()] == " "
        run = [*(run if follows and len(run) < RARE_WORDS else ()), word] if rare else []
        if run and (best is None or run[-1].end() - run[0].start() > best[1] - best[0]):
            best = run[0].start(), run[-1].end()
    return best


PARAGRAPHS = "\n\n"
"""Separator between joined texts."""
ENOUGH = 4
"""Minimum windows of a text; what is left after its last window is not used for training."""


def split_documents(
    documents: Sequence[Document], share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into training documents and held-out documents.

    Documents are drawn until they reach the share by number and by characters, since a single short
    one would measure little. A document that would bring them above half of the text is skipped.
    Of a single document, the last part is held out, in pieces.

    Raises:
        DataError: the only document is too short to split.
    """
    if len(documents) == 1:
        [document] = documents
        cut = pieces(document.text)
        if len(cut) < 2:
            raise DataError(
                f"document '{document.name}' has {len(document.text):,} characters, too few to "
                "train on one part and to measure on another; give more or longer documents"
            )
        count = max(1, round(share * len(cut)))
        halves = (cut[:-count], cut[-count:])
        training, held_out = (replace(document, text=PARAGRAPHS.join(half)) for half in halves)
        return [training], [held_out]
    lengths = [len(document.text) for document in documents]
    chosen: list[int] = []
    drawn = 0
    for index in random.Random(f"held-out:{seed}").sample(range(len(documents)), len(documents)):
        if len(chosen) >= share * len(documents) and drawn >= share * sum(lengths):
            break
        if drawn + lengths[index] <= sum(lengths) / 2 and len(chosen) < len(documents) - 1:
            chosen.append(index)
            drawn += lengths[index]
    parts: tuple[list[Document], list[Document]] = ([], [])
    for index, document in enumerate(documents):
        parts[index in chosen].append(document)
    return parts


def packed(documents: Sequence[Document], backbone: Backbone, window: int) -> list[str]:
    """Texts of documents; short ones are joined with the next, since a window never spans texts."""
    texts: list[str] = []
    long_enough = True
    for document in documents:
        if long_enough:
            texts.append(document.text)
        else:
            texts[-1] += PARAGRAPHS + document.text
        long_enough = tokens_of([texts[-1]], backbone)[0] >= ENOUGH * window
    if not long_enough and len(texts) > 1:
        last = texts.pop()
        texts[-1] += PARAGRAPHS + last
    return texts


def tokens_of(texts: Sequence[str], backbone: Backbone) -> list[int]:
    """Number of tokens in each text."""
    return [len(ids) for ids in backbone.tokenize(list(texts))["input_ids"]]

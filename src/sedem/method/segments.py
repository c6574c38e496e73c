"""Cut documents into segments of T tokens, with exact character spans (section 3).

Letters: S segments, T tokens per segment.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.config import Segmentation
from sedem.folding import UNSPACED
from sedem.types import check_tokens

# Lines up to a blank line. Each run of white space is scanned once, however long it is.
_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n(?!\s*(?:\n|\Z))[^\n]*)*")
_WORD = re.compile(r"\S+")
_APART = re.compile(rf"[\s{UNSPACED}\u3001-\u303f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f]")
"""A character beside which a text may be cut: white space, a letter or a mark of a script without
spaces."""
# No sentence ends after an initial or a title, or before a small letter. No space need follow
# full-width marks. The end of a line ends one too, unless a long line was wrapped there: the next
# one begins with a small letter, or the line is full and the next one is no item, label or row.
_STOP = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:Dr|Mr|Ms|St|Jr|No|vs))(?<!\b(?:Mrs|e\.g|i\.e|Nos))"
    "[.!?\u2026]+[\"'\u201d\u2019)\\]]*\\s+(?![a-z\\s])|[\u3002\uff01\uff1f]"
    r"|(?<![^\n]{30})\n|(?<=[.!?:;|])\n|\n(?![^\W_])|(?<![^\n]{60})\n(?![a-z\u00df-\u00f6\u00f8-\u00ff])"
    r"|\n(?=[^\n:|]{1,30}: |[^\n]*(?:\t| \| )|\d+[.)] )"
)
_CELL = re.compile(r"\t| \| ")
_WITHIN_WORD, _CHARACTER, _WORD_START, _LINE, _SENTENCE, _PARAGRAPH_START = range(1, 7)


@dataclass(frozen=True)
class Segments:
    """The segments of one text.

    Attributes:
        ids: token ids `[S, T]`; 0 where a short segment is padded.
        lengths: tokens of each segment `[S]`; fewer than T in a short one.
        starts: first character of each token `[S, T]`.
        ends: character after each token `[S, T]`.
    """

    ids: Tensor
    lengths: Tensor
    starts: Tensor
    ends: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]

    def part(self, rows: slice) -> Segments:
        """Some of the segments."""
        return Segments(self.ids[rows], self.lengths[rows], self.starts[rows], self.ends[rows])

    @property
    def mask(self) -> Tensor:
        """False where a token is padding `[S, T]`."""
        return torch.arange(self.ids.shape[1])[None, :] < self.lengths[:, None]


def segment_text(
    text: str,
    backbone: Backbone,
    length: int,
    how: Segmentation,
    shift: int = 0,
    whole_words: bool = False,
) -> Segments:
    """Cut a text into segments of at most `length` tokens.

    Args:
        backbone: its tokenizer cuts the text into tokens.
        how: "window" cuts every T tokens; "sentence" cuts at most that far, where a paragraph, a
            sentence, a line or a word ends; "paragraph" starts a new segment at every paragraph,
            and cuts a long one every T tokens. Blank lines separate paragraphs. A window ends
            before a row of a table that it would cut, if the cells of the row are named.
        shift: tokens by which `boundaries` are moved.
        whole_words: whether a word that is cut is in the spans of both segments, as a character of
            several tokens is; the tokens stay the same. A word is letters, digits and signs
            without white space, such as "V-77", of at most half a window.

    Raises:
        DataError: the text has no tokens.
    """
    pieces, lines = pieces_of(text, how), _rows(text) if how == "window" else []
    encoded = backbone.tokenize([piece for _, piece in pieces], offsets=True)
    rows: list[tuple[list[int], NDArray[np.int64]]] = []
    for (origin, _), ids, spans in zip(
        pieces, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        moved = np.array(spans, dtype=np.int64).reshape(-1, 2) + origin
        cuts = boundaries_of(text, moved[:, 0].tolist(), length, how, shift)
        cuts = _between_rows(moved[:, 0], cuts, length, lines) if lines else cuts
        if whole_words:
            _widened(text, moved, cuts, length // 2)
        rows += [(ids[first:stop], moved[first:stop]) for first, stop in pairwise(cuts)]
    check_tokens(rows)
    ids, starts, ends = np.zeros((3, len(rows), length), dtype=np.int64)
    for row, (tokens, spans) in enumerate(rows):
        count = len(tokens)
        ids[row, :count] = tokens
        starts[row, :count], ends[row, :count] = spans[:, 0], spans[:, 1]
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    return Segments(torch.from_numpy(ids), lengths, *map(torch.from_numpy, (starts, ends)))


def pieces_of(text: str, how: Segmentation) -> list[tuple[int, str]]:
    """The parts of a text that are cut separately, each with the character it starts at."""
    return list(paragraphs(text)) or [(0, "")] if how == "paragraph" else [(0, text)]


def boundaries_of(
    text: str, starts: Sequence[int], length: int, how: Segmentation, shift: int = 0
) -> list[int]:
    """Return the two ends of a piece of a text, and between them the boundaries of its segments.

    Args:
        starts: first character of each token of the piece in the text.
        how: as in `segment_text`, as is `shift`.

    Returns:
        Numbers of tokens.
    """
    if how != "sentence":
        return boundaries(len(starts), length, shift)
    words = [word.start() for word in _WORD.finditer(text)]

    def word_after(at: int) -> int:
        """The first character from here on that is no white space; the end if there is none."""
        if at < len(text) and not text[at].isspace():
            return at
        number = bisect_left(words, at)
        return words[number] if number < len(words) else len(text)

    # How good it is to begin a segment at a character. A new paragraph is best.
    begins: dict[int, int] = {}
    line_end, is_row = -1, False
    for stop in _STOP.finditer(text):
        if stop.start() > line_end:
            line_end = text.find("\n", stop.start())
            line_end = len(text) if line_end < 0 else line_end
            is_row = _CELL.search(text, text.rfind("\n", 0, stop.start()) + 1, line_end) is not None
        # The row of a table stays whole, even if one of its cells has a full stop.
        if stop[0][0] == "\n" or not is_row:
            begins[word_after(stop.end())] = _LINE if stop[0][0] == "\n" else _SENTENCE
    begins |= dict.fromkeys((at for at, _ in paragraphs(text)), _PARAGRAPH_START)

    def value(token: int) -> int:
        if starts[token] == starts[token - 1]:
            return 0  # a character of several tokens stays whole
        at = word_after(starts[token])
        if at == len(text) or at > starts[token] or text[at - 1].isspace():
            return begins.get(at, _WORD_START)
        return begins.get(at, _WITHIN_WORD if _is_within_word(text, at) else _CHARACTER)

    cuts = [0]
    while len(starts) - cuts[-1] > length:
        # In the second half of the window, the last of the best places.
        window = range(cuts[-1] + length, cuts[-1] + length // 2, -1)
        cuts.append(max(window, key=value))
    return [*cuts, len(starts)] if starts else []


def _rows(text: str) -> list[tuple[int, int]]:
    """Where the rows of tables are whose cells carry their header, "Name: Ida | Rent: 900"."""
    rows: list[tuple[int, int]] = []
    at = 0
    for line in text.splitlines(keepends=True) if " | " in text else ():
        if is_row(line):
            rows.append((at, at + len(line.rstrip())))
        at += len(line)
    return rows


def is_row(line: str) -> bool:
    """Whether a line is the row of a table whose cells carry their header."""
    return sum(": " in cell for cell in line.split(" | ")) > 1


def _is_within_word(text: str, at: int) -> bool:
    """Whether a word as a person writes it, "V-77" or "a@b.org", goes on at a character."""
    return 0 < at < len(text) and not (_APART.match(text, at - 1) or _APART.match(text, at))


def _widened(text: str, spans: NDArray[np.int64], cuts: Sequence[int], most: int) -> None:
    """Give a word that is cut to both segments, if it has at most so many tokens."""
    starts, ends = spans.copy().T
    for cut in cuts[1:-1]:
        first = last = int(starts[cut])
        least, limit = starts[max(cut - most, 0)], ends[min(cut + most, len(ends) - 1)]
        while first >= least and _is_within_word(text, first):
            first -= 1
        while last <= limit and _is_within_word(text, last):
            last += 1
        if np.subtract(*np.searchsorted(starts, (last, first))) <= most:
            spans[cut - 1, 1] = max(ends[cut - 1], last)
            spans[cut, 0] = first


def _between_rows(
    starts: NDArray[np.int64], cuts: Sequence[int], length: int, rows: Sequence[tuple[int, int]]
) -> list[int]:
    """Move cuts before the rows that they would divide; a row longer than a window is divided."""
    moved, first = [0], cuts[1]
    firsts = [begin for begin, _ in rows]
    while len(starts) - moved[-1] > (room := length if moved[-1] else first):
        cut = moved[-1] + room
        row = bisect_right(firsts, int(starts[cut])) - 1
        if row >= 0 and rows[row][0] < starts[cut] < rows[row][1]:
            before = int(np.searchsorted(starts, rows[row][0]))
            cut = before if before > moved[-1] else cut
        moved.append(cut)
    return [*moved, len(starts)] if len(starts) else []


def sentences_of(text: str) -> list[int]:
    """Return where the sentences of a text begin, and its end; lines begin one, too.

    A line that was wrapped within a sentence does not, and the row of a table is one, even if one
    of its cells has a full stop.
    """
    rows = _rows(text)
    firsts = [begin for begin, _ in rows]

    def is_inside(at: int) -> bool:
        row = bisect_left(firsts, at) - 1
        return row >= 0 and at <= rows[row][1]

    stops = (stop.end() for stop in _STOP.finditer(text))
    return [0, *(at for at in stops if not is_inside(at)), len(text)]


def boundaries(tokens: int, length: int, shift: int = 0) -> list[int]:
    """The two ends of a text, and between them the boundaries of its segments.

    Args:
        length: T, maximum tokens of a segment.
        shift: number of tokens by which every boundary is earlier. If the last segment has room for
            fewer, it is that many, so the number of segments does not depend on the shift.
    """
    room = -tokens % length
    return [0, *range(length - min(shift, room), tokens, length), tokens] if tokens else []


def paragraphs(text: str) -> Iterable[tuple[int, str]]:
    """Yield each paragraph with the character it starts at; blank lines separate paragraphs."""
    for match in _PARAGRAPH.finditer(text):
        yield match.start(), match.group().rstrip()

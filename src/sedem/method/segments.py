"""Cut documents into segments of T tokens, with exact character spans (section 3).

Letters: S segments, T tokens per segment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.config import Segmentation
from sedem.types import check_tokens

# Lines up to a blank line. Each run of white space is scanned once, however long it is.
_PARAGRAPH = re.compile(r"\S[^\n]*(?:\n(?!\s*(?:\n|\Z))[^\n]*)*")


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
    text: str, backbone: Backbone, length: int, how: Segmentation, shift: int = 0
) -> Segments:
    """Cut a text into segments of at most `length` tokens.

    Args:
        backbone: its tokenizer cuts the text into tokens.
        how: "window" cuts every T tokens; "paragraph" also starts a new segment at every paragraph.
            Blank lines separate paragraphs.
        shift: tokens by which `boundaries` are moved.

    Raises:
        DataError: the text has no tokens.
    """
    pieces = [(0, text)] if how == "window" else list(paragraphs(text)) or [(0, "")]
    encoded = backbone.tokenize([piece for _, piece in pieces], offsets=True)
    rows: list[tuple[list[int], NDArray[np.int64]]] = []
    for (origin, _), ids, spans in zip(
        pieces, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        moved = np.array(spans, dtype=np.int64).reshape(-1, 2) + origin
        cuts = pairwise(boundaries(len(ids), length, shift))
        rows += [(ids[first:stop], moved[first:stop]) for first, stop in cuts]
    check_tokens(rows)
    return _to_tensors(rows, length)


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


def _to_tensors(rows: list[tuple[list[int], NDArray[np.int64]]], length: int) -> Segments:
    ids, starts, ends = np.zeros((3, len(rows), length), dtype=np.int64)
    for row, (tokens, spans) in enumerate(rows):
        count = len(tokens)
        ids[row, :count] = tokens
        starts[row, :count], ends[row, :count] = spans[:, 0], spans[:, 1]
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    return Segments(torch.from_numpy(ids), lengths, *map(torch.from_numpy, (starts, ends)))

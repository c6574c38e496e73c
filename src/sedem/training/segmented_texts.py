"""Many texts cut into segments and blocks at once, as `segment_text` and `partition` cut one.

Those two make tensors with every offset of a text. Training reads whole sets, and needs only the
ends of blocks among the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Encoding

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.method.segments import paragraphs
from sedem.types import check_tokens


@dataclass(frozen=True)
class SegmentedText:
    """One text.

    Attributes:
        blocks: for each block with a token: its index among all blocks, its first character
            and the character after its last.
    """

    segments: list[list[int]]
    blocks: list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Piece:
    """A piece of a text, cut into tokens: a paragraph or the whole text."""

    origin: int
    encoding: Encoding

    def span(self, first: int, last: int) -> tuple[int, int]:
        """First character of one token, and the character after another token, in the text."""
        start, end = self.encoding.token_to_chars(first), self.encoding.token_to_chars(last)
        assert start is not None and end is not None
        return self.origin + start[0], self.origin + end[1]


def segment_texts(
    texts: Sequence[str], encoder: Backbone, config: SedemConfig
) -> Iterator[SegmentedText]:
    """Cut texts into segments and blocks.

    Args:
        encoder: backbone whose tokenizer cuts all texts together.
        config: shape of segments and blocks.

    Yields:
        The segments and blocks of each text, in order.

    Raises:
        DataError: a text has no tokens.
    """
    if not texts:
        return
    whole = config.segmentation == "window"
    pieces = [[(0, t)] if whole else list(paragraphs(t)) or [(0, "")] for t in texts]
    encodings = iter(encoder.encodings([piece for own in pieces for _, piece in own]))
    for own in pieces:
        yield _segmented([_Piece(origin, next(encodings)) for origin, _ in own], config)


def _segmented(pieces: list[_Piece], config: SedemConfig) -> SegmentedText:
    """Segments and blocks of one text."""
    length, shift = config.segment_length, config.segment_shift
    segments, places = [], []
    for piece in pieces:
        ids = piece.encoding.ids
        cuts = [0, *range(shift or length, len(ids), length), len(ids)] if ids else []
        for first, stop in pairwise(cuts):
            segments.append(ids[first:stop])
            places.append((piece, first))
    check_tokens(segments)
    width = config.slots_per_block * config.compression
    blocks = []
    # Positions include the padding of short segments, as slots do.
    for place, start in enumerate(range(0, len(segments) * length, width)):
        spans = []
        for number in range(start // length, min(-(-(start + width) // length), len(segments))):
            first = max(start - number * length, 0)
            stop = min(start + width - number * length, len(segments[number]))
            if first < stop:
                piece, offset = places[number]
                spans.append(piece.span(offset + first, offset + stop - 1))
        if spans:
            blocks.append((place, spans[0][0], spans[-1][1]))
    return SegmentedText(segments, blocks)

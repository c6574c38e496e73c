"""Documents as the paragraphs that methods of raw text rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.method.segments import paragraphs, segment_text
from sedem.types import Citation, Document, Span


@dataclass(frozen=True)
class Paragraph:
    """One paragraph, or a piece of a long one.

    Attributes:
        document: name of its document.
        start: its first character there.
        end: the character after it.
        text: what stands between.
        ids: its tokens.
        ends: character of the text after each of them.
    """

    document: str
    start: int
    end: int
    text: str
    ids: Tensor
    ends: Tensor

    @property
    def span(self) -> Span:
        """Where it stands."""
        return self.document, self.start, self.end

    def cited(self, rank: int, score: float | None, length: int | None = None) -> Citation:
        """The paragraph, or its first characters, as what an answer was conditioned on."""
        text = self.text[:length]
        return Citation(rank, self.document, self.start, self.start + len(text), score, text)


def split(documents: Sequence[Document], backbone: Backbone, length: int) -> list[Paragraph]:
    """The paragraphs of some documents, in their order.

    Args:
        documents: blank lines part their paragraphs.
        backbone: whose tokenizer counts.
        length: tokens of a paragraph; a longer one is cut every so many.
    """
    found = []
    for document in documents:
        segments = segment_text(document.text, backbone, length, "paragraph")
        for row, count in enumerate(segments.lengths.tolist()):
            start, end = int(segments.starts[row, 0]), int(segments.ends[row, count - 1])
            # The first token of a piece may begin with a space.
            start += len(document.text[start:end]) - len(document.text[start:end].lstrip())
            text, ends = document.text[start:end], segments.ends[row, :count] - start
            found.append(
                Paragraph(document.name, start, end, text, segments.ids[row, :count], ends)
            )
    return found


def cut_notes(
    documents: Sequence[Document], pieces: Sequence[Paragraph], length: int, tokens: int, name: str
) -> tuple[str, ...]:
    """One sentence where paragraphs were too long to stay whole.

    Args:
        documents: what was split.
        pieces: into what.
        length: tokens of a paragraph at most.
        tokens: of all documents.
        name: of the method.
    """
    whole = sum(1 for document in documents for _ in paragraphs(document.text))
    if len(pieces) <= whole:
        return ()
    return (
        f"the context has {tokens:,} tokens in {whole:,} paragraph{'s' if whole > 1 else ''}; "
        f"{name} cut those of more than {length:,}, so it ranks {len(pieces):,} pieces",
    )

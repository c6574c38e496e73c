"""Documents split into the paragraphs that methods over raw text rank."""

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
        start: index of its first character in the document.
        end: index of the character after it.
        ends: for each token, the index of the character after it in `text`.
    """

    document: str
    start: int
    end: int
    text: str
    ids: Tensor
    ends: Tensor

    @property
    def span(self) -> Span:
        """Document name, start and end."""
        return self.document, self.start, self.end

    def cited(self, rank: int, score: float | None, length: int | None = None) -> Citation:
        """A citation of the paragraph, or of its first `length` characters."""
        text = self.text[:length]
        return Citation(rank, self.document, self.start, self.start + len(text), score, text)


def split(documents: Sequence[Document], backbone: Backbone, length: int) -> list[Paragraph]:
    """Split documents into paragraphs, in document order.

    Args:
        documents: documents whose paragraphs are separated by blank lines.
        backbone: gives the tokenizer that counts tokens.
        length: longest paragraph in tokens; longer ones are cut into pieces of this length.
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


def split_notes(
    documents: Sequence[Document], pieces: Sequence[Paragraph], length: int, tokens: int, name: str
) -> tuple[str, ...]:
    """A note that paragraphs were cut into pieces; empty if none were.

    Args:
        documents: the documents that were split.
    """
    whole = sum(1 for document in documents for _ in paragraphs(document.text))
    if len(pieces) <= whole:
        return ()
    return (
        f"the context has {tokens:,} tokens in {whole:,} paragraph{'s' if whole > 1 else ''}; "
        f"{name} cut those of more than {length:,}, so it ranks {len(pieces):,} pieces",
    )

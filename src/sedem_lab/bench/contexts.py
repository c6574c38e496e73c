"""Contexts of an exact length: the demo's text cut to N tokens of a backbone's tokenizer."""

from __future__ import annotations

from sedem.backbone.decoder import Backbone
from sedem.demo import DOCUMENTS
from sedem.errors import DataError
from sedem.reading.documents import read_documents
from sedem.types import Document

DOCUMENT = 512
"""Tokens per document of a context; the last document has the remainder."""
CHARACTERS = 32
"""Characters to tokenize for each token that is wanted; a text has fewer per token."""


def demo_text() -> str:
    """The text of the bundled documents, which contexts are cut from."""
    documents = read_documents(sorted(DOCUMENTS.glob("*.txt")))
    return "\n\n".join(document.text for document in documents)


def context(text: str, backbone: Backbone, tokens: int) -> list[Document]:
    """Documents of `DOCUMENT` tokens each, with `tokens` tokens in total.

    The text is repeated as often as needed.

    Raises:
        DataError: the text cannot be cut to that many tokens.
    """
    sizes = [DOCUMENT] * (tokens // DOCUMENT) + [tokens % DOCUMENT] * (tokens % DOCUMENT > 0)
    documents = []
    at = 0
    for number, size in enumerate(sizes, start=1):
        piece, at = _cut(text, at, backbone, size)
        documents.append(Document(f"part-{number}", piece))
    return documents


def _cut(text: str, at: int, backbone: Backbone, size: int) -> tuple[str, int]:
    """A piece of exactly `size` tokens that starts at `at` or soon after, and where it ends."""
    words = [at + 1 + i for i, letter in enumerate(_repeated(text, at, 2000)) if letter.isspace()]
    for start in [at, *words[:100]]:
        piece = _repeated(text, start % len(text), CHARACTERS * size)
        encoded = backbone.tokenize([piece], offsets=True)
        if len(encoded["input_ids"][0]) < size:
            break
        piece = piece[: encoded["offset_mapping"][0][size - 1][1]]
        # Cutting can change the last tokens. If it does, try the next word as a start.
        if piece.strip() and len(backbone.token_ids(piece)) == size:
            return piece, (start + len(piece)) % len(text)
    raise DataError(f"the text cannot be cut to {size:,} tokens; a longer one is needed")


def _repeated(text: str, start: int, length: int) -> str:
    """`length` characters from `start`, with the text repeated."""
    copies = -(-(start + length) // len(text))
    return (text * copies)[start : start + length]

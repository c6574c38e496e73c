"""Contexts of an exact length: real text cut to N tokens of a backbone's tokenizer."""

from __future__ import annotations

from pathlib import Path

from sedem.backbone.decoder import Backbone
from sedem.data.documents import read_documents
from sedem.demo import DOCUMENTS
from sedem.errors import ConfigError, DataError
from sedem.types import Document

DOCUMENT = 512
"""Tokens of one document of a context; the last one holds what is left."""

LONGEST = 2**22
"""Tokens of the longest context that is made."""

CHARACTERS = 32
"""Characters a token that are looked at first; more where a text needs more."""


def source(text: Path | None) -> tuple[str, str]:
    """The text that contexts are cut from, and what it is in words.

    Args:
        text: a file; None means the demo's documents.
    """
    if text is not None:
        return read_documents([text])[0].text, f"the text of '{text.name}'"
    documents = read_documents(sorted(DOCUMENTS.glob("*.txt")))
    return "\n\n".join(d.text for d in documents), "the bundled documents of the demo"


def check_lengths(lengths: list[int]) -> None:
    """Refuse contexts that cannot be made.

    Raises:
        ConfigError: one is empty, longer than `LONGEST` or named twice.
    """
    for tokens in lengths:
        if not 1 <= tokens <= LONGEST:
            raise ConfigError(
                f"a context of {tokens:,} tokens was asked for; it can have 1 to {LONGEST:,}"
            )
    if len(set(lengths)) < len(lengths):
        raise ConfigError("a context length is named twice; name each once")


def context(text: str, backbone: Backbone, tokens: int) -> list[Document]:
    """Documents of `DOCUMENT` tokens each that have `tokens` tokens in all.

    The text goes round as often as is needed.

    Args:
        text: what is cut.
        backbone: whose tokenizer counts.
        tokens: of all documents together.

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
    """A piece of exactly `size` tokens from `at` on or a little later, and where it ends."""
    for start in _starts(text, at):
        window = CHARACTERS * size
        while True:
            piece = _around(text, start, window)
            encoded = backbone.tokenize([piece], offsets=True)
            if len(encoded["input_ids"][0]) > size or window > 64 * CHARACTERS * size:
                break
            window *= 2
        if len(encoded["input_ids"][0]) < size:
            break
        piece = piece[: encoded["offset_mapping"][0][size - 1][1]]
        # A cut can change the last tokens; then the next word is as good a start.
        if piece.strip() and len(backbone.token_ids(piece)) == size:
            return piece, (start + len(piece)) % len(text)
    raise DataError(f"the text cannot be cut to {size:,} tokens; give a longer one with --text")


def _starts(text: str, at: int) -> list[int]:
    words = [at + 1 + i for i, letter in enumerate(_around(text, at, 2000)) if letter.isspace()]
    return [start % len(text) for start in [at, *words[:100]]]


def _around(text: str, start: int, length: int) -> str:
    """So many characters from a place on, the text taken as a ring."""
    rounds = -(-(start + length) // len(text))
    return (text * rounds)[start : start + length]

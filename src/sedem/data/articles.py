"""Articles with titles, as cloze questions and the exact-facts set need them."""

from __future__ import annotations

from pathlib import Path

from sedem.data.files import read_lines
from sedem.errors import DataError

Article = tuple[str, str]
"""Title and text; paragraphs are lines."""


def read_articles(path: Path, records: slice = slice(None)) -> list[Article]:
    """Articles of a JSON-lines file with the fields `title` and `text`.

    Raises:
        DataError: a line lacks one of them.
    """
    articles = []
    for number, entry in read_lines(path):
        title, text = entry.get("title"), entry.get("text")
        if not isinstance(title, str) or not isinstance(text, str):
            raise DataError(f"'{path}', line {number}: strings 'title' and 'text' are needed")
        articles.append((title, text))
    return articles[records]


def paragraphs(text: str, shortest: int, longest: int) -> list[str]:
    """Paragraphs of an article with so many characters, headings left out."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if shortest <= len(line) <= longest and not line.startswith("=")]

"""Articles with titles: the source of cloze questions and of invented sets."""

from __future__ import annotations

from pathlib import Path

from sedem_lab.data.records import RecordModel, Records, Text, read_records

Article = tuple[str, str]
"""Title and text; paragraphs are lines."""


def read_articles(path: Path, records: slice = slice(None)) -> list[Article]:
    """Articles of a file, or of a slice of its records."""
    return articles(read_records(path))[records]


def articles(records: Records) -> list[Article]:
    """Articles from records with the fields `title` and `text`.

    Raises:
        DataError: a record lacks one of these fields.
    """
    given = (_ArticleRecord.from_record(record, place) for place, record in records)
    return [(article.title, article.text) for article in given]


class _ArticleRecord(RecordModel):
    title: Text
    text: Text


def paragraphs(article: str, shortest: int, longest: int) -> list[str]:
    """Paragraphs of an article with `shortest` to `longest` characters, without headings."""
    lines = (line.strip() for line in article.splitlines())
    return [line for line in lines if shortest <= len(line) <= longest and not line.startswith("=")]

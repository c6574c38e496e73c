from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sedem.data.articles import paragraphs, read_articles
from sedem.errors import DataError

Write = Callable[[str, Any], Path]


def test_articles_are_titles_and_texts(fixtures: Path) -> None:
    articles = read_articles(fixtures / "articles.jsonl")
    assert len(articles) == 9
    assert [title for title, _ in articles[:2]] == ["MV Blue Marlin", "Polaris Sales Agreement"]
    assert read_articles(fixtures / "articles.jsonl", slice(7, None)) == articles[7:]


@pytest.mark.parametrize("entry", [{"title": "Ada"}, {"text": "Ada"}, {"title": 1, "text": "Ada"}])
def test_an_article_without_title_or_text_is_named(write: Write, entry: dict[str, Any]) -> None:
    path = write("articles.jsonl", [{"title": "Bo", "text": "Bo"}, entry])
    with pytest.raises(
        DataError,
        match=r"articles\.jsonl', line 2: (missing key '(title|text)'|title is 1; text is)",
    ):
        read_articles(path)


def test_paragraphs_are_lines_of_some_length_and_no_headings() -> None:
    text = "== A heading that is long ==\n  abcde  \nabcd\n\nabcdefghij\nabcdefghijk\n"
    assert paragraphs(text, 5, 10) == ["abcde", "abcdefghij"]
    assert paragraphs(text, 1, 100) == ["abcde", "abcd", "abcdefghij", "abcdefghijk"]

"""Real records, small files and a small corpus."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sedem.backbone.decoder import Backbone
from sedem_lab.data.corpus import TokenizedCorpus

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file: text as it is, a list to .jsonl as lines, anything else as JSON."""

    def to_file(name: str, content: Any) -> Path:
        if isinstance(content, list) and name.endswith(".jsonl"):
            content = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in content)
        elif not isinstance(content, str):
            content = json.dumps(content, ensure_ascii=False)
        path = tmp_path / name
        # Half a surrogate pair goes in as JSON's escape: UTF-8 has no other way to hold one.
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
        return path

    return to_file


@pytest.fixture
def texts() -> list[str]:
    """Nine texts of 60 to 164 letters."""
    return ["".join(chr(97 + (7 * i + j) % 26) for j in range(60 + 13 * i)) for i in range(9)]


@pytest.fixture
def path(write: Write, texts: list[str]) -> Path:
    """A file of the nine texts, titled by their number."""
    return write("texts.jsonl", [{"title": str(i), "text": t} for i, t in enumerate(texts)])


@pytest.fixture
def corpus(path: Path, backbone: Backbone, tmp_path: Path) -> TokenizedCorpus:
    """The nine texts, tokenized; every letter is a token."""
    return TokenizedCorpus.open(path, backbone, tmp_path / "cache")

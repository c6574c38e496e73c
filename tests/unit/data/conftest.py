"""Real records and a way to write small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[[str, Any], Path]


@pytest.fixture
def fixtures() -> Path:
    """Folder of real records."""
    return Path(__file__).parents[2] / "fixtures"


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

"""What docs/bank-format.md says is enough to read a bank."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bank_reader
import numpy as np
import pytest
from stored_banks import META, append

from sedem import MemoryBank
from sedem.bank.database import TABLES, WORDS
from sedem.bank.file import BankFile

DOCS = Path(__file__).parents[2] / "docs"


def changed_bank(path: Path, dtype: str) -> MemoryBank:
    """A bank in which one document was replaced and one removed."""
    file = BankFile(path)
    with file.creating(replace(META, dtype=dtype)):
        append(file, 1, 2, 3)
    append(file, 1, 4, version=1)
    file.remove("2.txt")
    return MemoryBank.open(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "fp8"])
def test_a_reader_without_sedem_finds_the_same_documents_spans_and_memory(
    dtype: str, tmp_path: Path
) -> None:
    bank = changed_bank(tmp_path / "a.bank", dtype)
    texts, blocks = bank_reader.read_bank(tmp_path / "a.bank")
    assert texts == {document.name: document.text for document in bank.documents}
    assert list(texts) == ["3.txt", "1.txt", "4.txt"]
    assert [(name, start, end) for name, start, end, _ in blocks] == [
        (bank.documents.names[block.document], block.start, block.end) for block in bank.blocks
    ]
    expected = bank.memory(range(len(bank))).float().numpy()
    assert np.array_equal(np.stack([memory for *_, memory in blocks]), expected)


def test_the_reader_stays_short_and_imports_nothing_of_sedem() -> None:
    """The format is simple only as long as a reader of it is."""
    source = Path(bank_reader.__file__).read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in source.splitlines()) <= 40
    code = "import bank_reader, sys; print(any(name.startswith('sedem') for name in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(bank_reader.__file__).parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout == "False\n"


def test_the_schema_in_the_docs_is_that_of_a_bank() -> None:
    page = (DOCS / "bank-format.md").read_text(encoding="utf-8")
    assert TABLES.strip() in page and WORDS.strip() in page


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs the sqlite3 shell")
def test_the_sqlite3_shell_can_query_a_bank(tmp_path: Path) -> None:
    changed_bank(tmp_path / "a.bank", "int8")
    query = "SELECT name FROM documents WHERE removed IS NULL AND added NOT NULL ORDER BY id"
    found = subprocess.run(
        ["sqlite3", "-readonly", tmp_path / "a.bank", query], capture_output=True, text=True
    )
    assert found.stdout.split() == ["3.txt", "1.txt", "4.txt"]

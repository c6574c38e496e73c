"""Parsing in a process that is killed when it takes too long."""

from __future__ import annotations

import subprocess
import time
import zlib
from pathlib import Path

import pytest
from document_files import pdf_of

from sedem.errors import DataError
from sedem.serve.parsing import StoppedError, parse_upload


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file-1"
    path.write_bytes(content)
    return path


def endless_pdf() -> bytes:
    """A PDF whose page has millions of commands, which takes pypdf minutes."""
    drawn = b"BT /F1 12 Tf 72 700 Td " + b"(word) Tj 1 0 0 1 2 2 cm " * 2_000_000 + b"ET"
    return pdf_of(["x"], zlib.compress(drawn))


def test_the_name_tells_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module in the working folder is not imported.
    (tmp_path / "pypdf.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, pdf_of(["One", "Two"]))
    document = parse_upload(path, "a.PDF")
    assert (document.name, document.text, document.pages) == ("a.PDF", "One\n\nTwo", (0, 5))
    with pytest.raises(DataError, match=r"holds binary data|is not utf-8"):
        parse_upload(path, "a.txt")
    with pytest.raises(DataError, match="not stored any more"):
        parse_upload(tmp_path / "none", "a.txt")


def test_a_file_that_takes_too_long_or_is_not_needed_is_given_up(tmp_path: Path) -> None:
    path, started = written(tmp_path, endless_pdf()), time.monotonic()
    with pytest.raises(DataError, match=r"took more than 0.3 s and was stopped"):
        parse_upload(path, "slow.pdf", seconds=0.3)
    with pytest.raises(StoppedError):
        parse_upload(path, "slow.pdf", lambda: True)
    assert time.monotonic() - started < 20


def test_a_parser_that_dies_or_needs_too_much_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, endless_pdf())
    with pytest.raises(DataError, match=r"^reading 'a.html' takes too much memory; split it$"):
        parse_upload(path, "a.html", memory=2**28)  # less than the buffer that a file is read into
    communicate = subprocess.Popen.communicate

    def killed(process: subprocess.Popen[bytes], **options: object) -> tuple[bytes, bytes]:
        process.kill()
        return communicate(process)

    monkeypatch.setattr(subprocess.Popen, "communicate", killed)
    with pytest.raises(DataError, match=r"^'slow.pdf' crashed its parser; save it"):
        parse_upload(path, "slow.pdf")

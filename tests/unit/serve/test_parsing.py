"""Parsing in a process that is ended when it takes too long."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_files import pdf_of

from sedem.errors import DataError
from sedem.serve.parsing import ParserProcess, StoppedError


@pytest.fixture(scope="module")
def parser() -> Iterator[ParserProcess]:
    parser = ParserProcess()
    yield parser
    parser.close()


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file-1"
    path.write_bytes(content)
    return path


def endless_pdf() -> bytes:
    """A PDF whose page has millions of commands, which takes pypdf minutes."""
    drawn = b"BT /F1 12 Tf 72 700 Td " + b"(word) Tj 1 0 0 1 2 2 cm " * 2_000_000 + b"ET"
    return pdf_of(["x"], zlib.compress(drawn))


def test_the_name_tells_the_format(parser: ParserProcess, tmp_path: Path) -> None:
    path = written(tmp_path, pdf_of(["One", "Two"]))
    document = parser.parse(path, "a.PDF")
    assert (document.name, document.text, document.pages) == ("a.PDF", "One\n\nTwo", (0, 5))
    with pytest.raises(DataError, match=r"holds binary data|is not utf-8"):
        parser.parse(path, "a.txt")


def test_one_file_after_another_by_one_process(parser: ParserProcess, tmp_path: Path) -> None:
    parser.parse(written(tmp_path, b"one"), "a.txt")
    process = parser._process
    for bad in (b"\xff", b""):
        with pytest.raises(DataError):
            parser.parse(written(tmp_path, bad), "a.txt")
    with pytest.raises(DataError, match="not stored any more"):
        parser.parse(tmp_path / "none", "a.txt")
    assert parser.parse(written(tmp_path, b"two"), "b.txt").text == "two"
    assert parser._process is process


def test_a_file_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    parser = ParserProcess(seconds=0.3)
    try:
        started = time.monotonic()
        with pytest.raises(DataError, match=r"took more than 0.3 s and was stopped"):
            parser.parse(written(tmp_path, endless_pdf()), "slow.pdf")
        assert time.monotonic() - started < 20
        assert parser.parse(written(tmp_path, b"next"), "next.txt").text == "next"
    finally:
        parser.close()


def test_nobody_waits_for_a_file_that_is_not_needed(tmp_path: Path) -> None:
    parser = ParserProcess()
    try:
        parser.parse(written(tmp_path, b"one"), "a.txt")
        with pytest.raises(StoppedError):
            parser.parse(written(tmp_path, endless_pdf()), "slow.pdf", lambda: True)
        assert parser._process is None
    finally:
        parser.close()


def test_a_parser_that_dies_is_one_sentence_and_the_next_file_is_read(tmp_path: Path) -> None:
    parser = ParserProcess()

    def kill() -> bool:
        assert parser._process is not None
        parser._process.kill()
        return False

    try:
        parser.parse(written(tmp_path, b"one"), "a.txt")
        with pytest.raises(DataError, match=r"^'slow.pdf' crashed its parser; save it"):
            parser.parse(written(tmp_path, endless_pdf()), "slow.pdf", kill)
        assert parser.parse(written(tmp_path, b"two"), "a.txt").text == "two"
    finally:
        parser.close()


def test_a_parser_has_a_limit_of_memory(tmp_path: Path) -> None:
    parser = ParserProcess(memory=2**28)  # less than the buffer that a file is read into
    try:
        with pytest.raises(DataError, match=r"^reading 'a.txt' takes too much memory; split it$"):
            parser.parse(written(tmp_path, b"word"), "a.txt")
        assert parser._process is not None and parser._process.is_alive()
    finally:
        parser.close()

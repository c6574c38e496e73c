"""A document costs bounded time and memory: its parser runs in a process with limits."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docx
import pytest
from commands import sedem
from document_files import docx_of, docx_with, pdf_of
from docx.oxml.ns import qn

from sedem import Document
from sedem.errors import ConfigError, DataError
from sedem.reading.document_formats import parse, parse_file
from sedem.reading.documents import read_document
from sedem.untrusted import LimitError, StoppedError, apart


def parse_upload(path: Path, name: str, stopped: Callable[[], bool] = lambda: False) -> Document:
    """What a server does with a file that has another name on disk."""
    return Document(name, *parse_file(path, name, stopped=stopped))


def written(folder: Path, content: bytes, name: str = "file-1") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def endless_pdf() -> bytes:
    """A PDF whose page has millions of commands, which takes pypdf minutes."""
    drawn = b"BT /F1 12 Tf 72 700 Td " + b"(word) Tj 1 0 0 1 2 2 cm " * 2_000_000 + b"ET"
    return pdf_of(["x"], zlib.compress(drawn))


def wide_cell() -> bytes:
    """A Word file with a cell that says it spans a billion columns."""
    document = docx.Document()
    table = document.add_table(1, 1)
    table.cell(0, 0).text = "Rent"
    table._tbl.tr_lst[0].tc_lst[0].grid_span = 10**9
    return docx_of(document)


def tall_table(rows: int, columns: int) -> bytes:
    row = "<w:tr>" + "<w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p></w:tc>" * columns + "</w:tr>"
    return docx_with(f"<w:tbl><w:tblPr/><w:tblGrid/>{row * rows}</w:tbl>")


def attributes(count: int) -> bytes:
    return b"<p " + b" ".join(b"a%d=1" % number for number in range(count)) + b">text</p>"


# Where files are read


def test_the_name_of_an_upload_tells_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module in the working folder is not imported.
    (tmp_path / "pypdf.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, pdf_of(["One", "Two"]))
    document = parse_upload(path, "a.PDF")
    assert (document.name, document.text, document.pages) == ("a.PDF", "One\n\nTwo", (0, 5))
    with pytest.raises(DataError, match=r"holds binary data|is not utf-8"):
        parse_upload(path, "a.txt")


@pytest.mark.parametrize("read", [read_document, lambda path: parse_upload(path, path.name)])
@pytest.mark.parametrize(
    ("variable", "limit", "name", "content", "needs"),
    [
        ("SEDEM_PARSER_SECONDS", 1, "slow.pdf", endless_pdf, "needs more than 1 s"),
        ("SEDEM_PARSER_SECONDS", 1, "a.html", lambda: attributes(500_000), "needs more than 1 s"),
        ("SEDEM_PARSER_BYTES", 2**27, "a.docx", lambda: tall_table(900, 100), "more than 128 MB"),
        ("SEDEM_PARSER_BYTES", 2**27, "a.pdf", endless_pdf, "more than 128 MB"),
        ("SEDEM_PARSER_BYTES", 2**26, "a.html", lambda: b"<b>a" * 10**6, "more than 64 MB"),
    ],
)
def test_a_document_that_needs_too_much_is_one_sentence(
    read: Callable[[Path], object], variable: str, limit: int, name: str,
    content: Callable[[], bytes], needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = written(tmp_path, content(), name)
    monkeypatch.setenv(variable, str(limit))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with pytest.raises(DataError, match=rf"'.*{name}' needs more than .* to be read; ") as caught:
        read(path)
    assert needs in str(caught.value) and "damaged" not in str(caught.value)
    if "BYTES" in variable:
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 2 * limit)


def test_the_command_keeps_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, endless_pdf(), "a.pdf")
    monkeypatch.setenv("SEDEM_PARSER_SECONDS", "1")
    told = sedem("build", tmp_path / "a.bank", path)
    assert told.exit_code == 1 and "a.pdf' needs more than 1 s to be read" in told.stderr
    assert not (tmp_path / "a.bank").exists()
    monkeypatch.setenv("SEDEM_PARSER_SECONDS", "soon")
    with pytest.raises(ConfigError, match=r"^SEDEM_PARSER_SECONDS is 'soon'; give a number"):
        read_document(path)


def test_an_upload_that_is_not_needed_is_given_up(tmp_path: Path) -> None:
    path, started = written(tmp_path, endless_pdf()), time.monotonic()
    with pytest.raises(StoppedError):
        parse_upload(path, "slow.pdf", lambda: True)
    assert time.monotonic() - started < 20


# Word


def test_a_cell_counts_once_whatever_it_says_it_spans(tmp_path: Path) -> None:
    assert read_document(written(tmp_path, wide_cell(), "a.docx")).text == "Rent"


def test_a_cell_that_spans_rows_is_in_each_of_them() -> None:
    document = docx.Document()
    table = document.add_table(3, 3)
    for number, cell in enumerate(table._cells):
        cell.text = str(number)
    table.cell(0, 1).merge(table.cell(1, 2)).text = "both"
    text = parse(Path("a.docx"), docx_of(document), "utf-8")[0]
    assert text == "0\tboth\n3\tboth\n6\t7\t8"
    # Nothing is above the first row.
    table._tbl.tr_lst[0].tc_lst[0].get_or_add_tcPr()._add_vMerge().set(qn("w:val"), "continue")
    assert parse(Path("a.docx"), docx_of(document), "utf-8")[0].startswith("\tboth\n")


def test_a_large_table_is_read_in_a_time_that_grows_with_it() -> None:
    seconds = []
    for rows in (40, 160):
        began = time.process_time()
        parse(Path("a.docx"), tall_table(rows, 100), "utf-8")
        seconds.append(time.process_time() - began)
    assert seconds[1] < 8 * seconds[0]


# The process


LIMITS: dict[str, Any] = {"seconds": 20, "memory": 2**30}
FIXTURES = str(Path(__file__).parents[1] / "fixtures")
RAISE, PARSE = "signal:raise_signal", "sedem.reading.document_formats:_parse_apart"


@pytest.mark.parametrize(
    ("call", "given", "limits", "error", "message"),
    [
        ("builtins:sorted", [[3, "a"]], {}, ValueError, ".*not supported.*"),
        (PARSE, [FIXTURES, "a.txt", "utf-8"], {}, DataError, ".*is a folder; give a file"),
        ("builtins:bytearray", [2**29], {"memory": 2**27}, LimitError, "needs more than 128 MB"),
        ("builtins:bytearray", [2**29], {"memory": 2**28}, LimitError, "needs more than 256 MB"),
        ("time:sleep", [60], {"seconds": 0.5}, LimitError, r"needs more than 0\.5 s"),
        (RAISE, [signal.SIGKILL], {}, LimitError, "needs more memory than the system has"),
        (RAISE, [signal.SIGABRT], {}, LimitError, "needs more than 1,024 MB"),
        (RAISE, [signal.SIGALRM], {}, LimitError, "needs more than 20 s"),
        (RAISE, [signal.SIGSEGV], {}, ValueError, "its process died with SIGSEGV"),
        ("os:_exit", [3], {}, ValueError, "its process died with status 3"),
    ],
)
def test_what_happened_to_a_process_is_told(
    call: str, given: list[Any], limits: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        apart(call, *given, **LIMITS | limits)


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/python")
    with pytest.raises(ValueError, match=r"^no process could be started: No such file"):
        apart("builtins:sorted", [1], **LIMITS)


def test_a_process_ends_by_itself_if_nobody_waits_for_it() -> None:
    command = [sys.executable, "-P", "-m", "sedem.untrusted", "0", str(2**30), "time:sleep"]
    ended = subprocess.run(command, input=b"[60]", timeout=30)
    assert ended.returncode < 0

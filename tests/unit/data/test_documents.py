"""Files, folders and patterns as documents, one after the other."""

from __future__ import annotations

import io
import sys
import zipfile
import zlib
from pathlib import Path

import docx
import pypdf
import pytest
from document_files import docx_of, pdf_of
from hostile.borders import hostile_paths

from sedem import Document
from sedem.data import document_formats
from sedem.data.document_formats import parse
from sedem.data.documents import DocumentFiles, files_in, read_document, source_text
from sedem.errors import DataError
from sedem.untrusted import DOCUMENT_BYTES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("texts/deep").mkdir(parents=True)
    Path("texts/deep/a.txt").write_text("First.")
    Path("texts/b.MD").write_text("Second.")
    Path("texts/c.csv").write_text("1,2")
    return tmp_path


def test_folders_and_patterns_give_files_of_known_types_in_order_and_once() -> None:
    found = files_in([Path("texts"), Path("texts/**/*.txt"), Path("x.txt"), Path("./x.txt")])
    assert found == [Path("texts/b.MD"), Path("texts/deep/a.txt"), Path("x.txt")]
    for source in ("texts/*.csv", "none/*", "deep/[ab].txt"):
        with pytest.raises(DataError, match=r"holds no file that can be read \(\.txt, "):
            files_in([Path(source)])


def test_a_file_whose_name_looks_like_a_pattern_is_a_file() -> None:
    Path("a[1].txt").write_text("Third.")
    assert list(DocumentFiles([Path("a[1].txt")])) == [Document("a[1].txt", "Third.")]


def test_a_file_is_read_when_its_turn_comes() -> None:
    files = DocumentFiles([Path("texts")])
    assert files.sizes == {"texts/b.MD": 7, "texts/deep/a.txt": 6}
    stream = iter(files)
    assert next(stream) == Document("texts/b.MD", "Second.")
    Path("texts/deep/a.txt").write_text("Changed.")
    assert next(stream).text == "Changed."


def test_missing_files_and_unknown_types_are_refused_before_any_file_is_read() -> None:
    for name, words in (
        ("no.txt", "there is no file or folder 'no.txt'"),
        ("nosuch", "there is no file or folder 'nosuch'"),
        ("texts/c.csv", "type '.csv'"),
    ):
        with pytest.raises(DataError, match=words):
            DocumentFiles([Path("texts"), Path(name)])
    with pytest.raises(DataError, match="is a folder; give its files"):
        read_document(Path("texts"))


def test_files_that_cannot_be_read_are_passed_over_on_request() -> None:
    Path("bad.txt").write_bytes(b"\xff\xfe\xfd")
    files = DocumentFiles([Path("no.txt"), Path("bad.txt"), Path("texts")], keep_going=True)
    assert [document.text for document in files] == ["Second.", "First."]
    assert [sentence.split("'")[1] for sentence in files.failed] == ["no.txt", "bad.txt"]
    assert list(files.sizes) == ["texts/b.MD", "texts/deep/a.txt"]
    with pytest.raises(DataError, match=r"'bad\.txt' is not utf-8 text.*latin-1$"):
        list(DocumentFiles([Path("bad.txt")]))
    with pytest.raises(DataError, match=r"'bad\.txt' is not utf-8 text.*with --keep-going$"):
        list(DocumentFiles([Path("bad.txt"), Path("texts")]))


def test_the_text_of_a_source_is_none_if_it_cannot_be_read(tmp_path: Path) -> None:
    assert source_text("texts/deep/a.txt") == "First."
    for name in ("texts/none.txt", "texts/c.csv", "texts", "\0.txt", "x" * 5000 + ".txt"):
        assert source_text(name) is None
    for kind, path in hostile_paths(tmp_path / "hostile.txt", DOCUMENT_BYTES + 1):
        assert source_text(str(path)) is None, kind


# Formats


def encrypted(content: bytes, password: str) -> bytes:
    writer, file = pypdf.PdfWriter(clone_from=io.BytesIO(content)), io.BytesIO()
    writer.encrypt(password, "owner", algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()


def read(name: str, content: bytes) -> str:
    return parse(Path(name), content, "utf-8")[0]


def refused(name: str, content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words) as told:
        read(name, content)
    assert len(str(told.value).splitlines()) == 1


# PDF


def test_a_pdf_has_its_text_and_its_pages() -> None:
    text, pages = parse(Path("a.PDF"), pdf_of(["The lease.", "The rent.", "The cellar."]), "utf-8")
    assert text.split() == ["The", "lease.", "The", "rent.", "The", "cellar."]
    assert [text[page:].split()[1] for page in pages] == ["lease.", "rent.", "cellar."]


def test_a_pdf_without_text_says_so() -> None:
    refused("a.pdf", pdf_of(["", " "]), r"'a\.pdf' has no text: its pages are pictures")
    assert parse(Path("a.pdf"), pdf_of(["", "Text."]), "utf-8")[1] == (0, 2)


def test_a_pdf_that_needs_a_password_is_refused() -> None:
    content = pdf_of(["The lease."])
    refused("a.pdf", encrypted(content, "secret"), r"'a\.pdf' is encrypted; save a copy without")
    assert read("a.pdf", encrypted(content, "")).strip() == "The lease."


@pytest.mark.parametrize("keep", [0, 4, 100, 400])
def test_a_damaged_pdf_is_refused(keep: int, capfd: pytest.CaptureFixture[str]) -> None:
    refused("a.pdf", pdf_of(["The lease."])[:keep], "'a.pdf' cannot be read as PDF|has no text")
    assert capfd.readouterr() == ("", "")


def test_a_pdf_that_unpacks_without_end_is_refused() -> None:
    bomb = zlib.compress(bytes(8 * 10**7), 1)
    refused("a.pdf", pdf_of(["x"], bomb), r"'a\.pdf' cannot be read as PDF")


# Word


def test_a_word_document_has_its_paragraphs_and_tables_in_order() -> None:
    document = docx.Document()
    document.add_paragraph("Lease")
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ("Rent", "900", "Total", ""), strict=True):
        cell.text = text
    table.cell(1, 0).merge(table.cell(1, 1))
    document.add_paragraph("The end.")
    assert read("a.docx", docx_of(document)) == "Lease\nRent\t900\nTotal\nThe end."


def test_what_is_no_word_document_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "Text.")
    whole = docx_of(docx.Document())
    for content in (b"", b"Text.", file.getvalue(), whole[:-100], whole[:5000]):
        refused("a.docx", content, r"'a\.docx' cannot be read as Word document")


def test_a_word_document_that_unpacks_to_far_more_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document_formats, "MARKUP_BYTES", 10**6)
    document = docx.Document()
    document.add_paragraph(" " * 10**6)
    refused("a.docx", docx_of(document), r"has 1\.\d* MB of markup, at most 1 MB are read")


# HTML


def test_html_has_its_words_by_paragraph() -> None:
    page = (
        "<!doctype html><title>The lease</title><style>p {}</style><nav>Home</nav>"
        "<?xml version='1.0' encoding='latin-1'?><p>The <b>rent</b>\n is&nbsp;900&euro;.<!-- no -->"
        "<script>x</script><ul><li>One<li>Two</ul>End<br>of <table><tr><td>a<td>b</table>"
    )
    assert read("a.html", page.encode()).split("\n\n") == [
        "The lease", "The rent is 900€.", "One", "Two", "End", "of", "a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<head><title> Mill\n Lane </title></head><p>The rent.", "Mill Lane\n\nThe rent."),
        ("<title>Mill Lane</title><h1>MILL lane</h1><p>The rent.", "MILL lane\n\nThe rent."),
        ("<p>The rent.<title>Lane</title> It is due.", "Lane\n\nThe rent.\n\nIt is due."),
        ("<title>Lane</title><p>At Mill Lane.", "Lane\n\nAt Mill Lane."),
        ("<title>Lane</title><title>Other</title><p>Rent", "Lane\n\nRent"),
        ("<p>See <svg><title>A plan</title><text>north</text></svg> below.", "See north below."),
        ("<title>An application</title>", "An application"),
        ("<title> </title><p>The rent.", "The rent."),
    ],
)
def test_the_title_of_html_comes_first_if_no_paragraph_is_it(page: str, text: str) -> None:
    assert read("a.html", page.encode()) == text


def test_html_is_read_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("a.htm", b"<div>" * 300 + b"deep" + b"</div>" * 300 + b"end") == "deep\n\nend"
    refused("a.htm", b"<div>" * 5000 + b"deep", r"'a\.htm' cannot be read as HTML.*depth")
    assert read("a.htm", b"") == read("a.htm", b"<!-- no -->") == ""
    monkeypatch.setattr(document_formats, "HTML_BYTES", 10)
    refused("a.htm", b"<p>" * 10, r"'a\.htm' has 30 bytes of HTML, at most 10 bytes are read")


# All


@pytest.mark.parametrize(
    ("name", "library"), [("a.pdf", "pypdf"), ("a.docx", "docx"), ("a.html", "lxml")]
)
def test_a_parser_that_is_not_installed_is_named(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    refused(name, b"x", rf"needs the library '{library}'; .* pip install 'sedem\[documents\]'")


def test_text_is_read_as_it_is() -> None:
    assert read("a.md", "\ufeff# Café\n\n<b>".encode()) == "# Café\n\n<b>"

"""Files, folders and patterns as documents, one after the other."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import docx
import openpyxl
import pypdf
import pytest
from document_files import archive_of, docx_of, docx_with, pdf_of

from sedem import Document
from sedem.errors import DataError
from sedem.reading import document_formats
from sedem.reading.document_formats import parse
from sedem.reading.documents import (
    DocumentFiles,
    files_in,
    read_document,
    told_left_out,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("texts/deep").mkdir(parents=True)
    Path("texts/deep/a.txt").write_text("First.")
    Path("texts/b.MD").write_text("Second.")
    Path("texts/c.bin").write_text("1,2")
    return tmp_path


def test_folders_and_patterns_give_files_of_known_types_in_order_and_once() -> None:
    found = files_in([Path("texts"), Path("texts/**/*.txt"), Path("x.txt"), Path("./x.txt")])
    assert found == [Path("texts/b.MD"), Path("texts/deep/a.txt"), Path("x.txt")]
    for source in ("texts/*.bin", "none/*", "deep/[ab].txt"):
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


JUNK = {
    ".git/x.md": "hidden", ".trash/old.txt": "hidden", "._a.pdf": "hidden", ".env": "hidden",
    "node_modules/x/README.md": "of programs", "venv/lib/y.py": "of programs",
    "own/pyvenv.cfg": "of programs", "~$lease.docx": "lock files", "~$b.xlsx": "lock files",
    "p.png": "of an unknown type", "a.xyz": "of an unknown type", "empty.md": "empty",
}  # fmt: skip


def test_what_is_no_document_is_left_out_of_folders_and_named() -> None:
    for name in JUNK:
        Path("texts", name).parent.mkdir(parents=True, exist_ok=True)
        Path("texts", name).write_text("" if JUNK[name] == "empty" else "Text.")
    Path("texts/noise").write_bytes(bytes(range(256)))
    Path("texts/README").write_text("Read me.")
    Path("texts/out.txt").symlink_to("/etc/hostname")
    Path("texts/gone.txt").symlink_to("nothing")
    os.close(os.open(b"texts/caf\xe9.txt", os.O_CREAT))
    left_out: dict[str, list[str]] = {}
    found = files_in([Path("texts")], left_out=left_out)
    assert found == [Path("texts/README"), Path("texts/b.MD"), Path("texts/deep/a.txt")]
    named = {name for names in left_out.values() for name in names}
    for name, why in JUNK.items():
        assert any(Path("texts", name).is_relative_to(one) for one in left_out[why]), name
    assert {"texts/noise", "texts/out.txt", "texts/gone.txt", "texts/caf\udce9.txt"} <= named
    assert r"caf\udce9.txt" in told_left_out(left_out)
    for include, name in (
        (".git", ".git/x.md"),
        ("*.xyz", "a.xyz"),
        (".trash/*", ".trash/old.txt"),
    ):
        assert Path("texts", name) in files_in([Path("texts")], include=[include])
    assert [one.text for one in DocumentFiles([Path("texts/a.xyz")], include=["*.xyz"])] == [
        "Text."
    ]
    assert files_in([Path("texts/**/*")]) == found


def test_a_path_that_is_no_readable_file_is_refused() -> None:
    for name in ("texts/none.txt", "texts/c.bin", "texts", "\0.txt", "x" * 5000 + ".txt"):
        with pytest.raises(DataError):
            read_document(Path(name))


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


def test_what_cannot_be_read_is_refused_in_a_sentence_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lease, empty, bomb = pdf_of(["The lease."]), docx_of(docx.Document()), bytes(8 * 10**7)
    refused("a.pdf", pdf_of(["", " "]), r"'a\.pdf' has no text: its pages are pictures")
    refused("a.pdf", encrypted(lease, "secret"), r"'a\.pdf' is encrypted; save a copy without")
    refused("a.pdf", pdf_of(["x"], zlib.compress(bomb, 1)), r"'a\.pdf' cannot be read as PDF")
    for keep in (0, 4, 100, 400):
        refused("a.pdf", lease[:keep], "'a.pdf' cannot be read as PDF|has no text")
    for content in (b"", b"Text.", archive_of({"a.txt": "Text."}), empty[:-100], empty[:5000]):
        refused("a.docx", content, r"'a\.docx' cannot be read as Word document")
    refused("a.htm", b"<div>" * 5000 + b"deep", r"'a\.htm' cannot be read as HTML.*depth")
    for name in ("a.epub", "a.eml", "a.ipynb", "a.xlsx", "a.pptx"):
        refused(name, b"junk", rf"'{name}' cannot be read as ")
    assert capfd.readouterr() == ("", "")


# PDF


def test_a_pdf_has_its_text_and_its_pages() -> None:
    text, pages, _ = parse(Path("a.PDF"), pdf_of(["The lease.", "The rent.", "The cellar."]), None)
    assert text.split() == ["The", "lease.", "The", "rent.", "The", "cellar."]
    assert [text[page:].split()[1] for page in pages] == ["lease.", "rent.", "cellar."]


def test_pages_of_a_pdf_without_text_are_named() -> None:
    found = parse(Path("a.pdf"), pdf_of(["", "Text."]), None)
    assert found.pages == (0, 2) and found.notes[0].startswith("page 1 has no text in 'a.pdf'")
    for pages, named in ((["One.", "", ""], "pages 2, 3 have"), (["One.", " "], "page 2 has")):
        assert parse(Path("a.pdf"), pdf_of(pages), None).notes[0].startswith(named)


def test_a_pdf_that_needs_no_password_to_be_read_is_read() -> None:
    assert read("a.pdf", encrypted(pdf_of(["The lease."]), "")).strip() == "The lease."


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
    assert read("a.htm", b"") == read("a.htm", b"<!-- no -->") == ""
    monkeypatch.setattr(document_formats, "HTML_BYTES", 10)
    refused("a.htm", b"<p>" * 10, r"'a\.htm' has 30 bytes of HTML, at most 10 bytes are read")


# All


@pytest.mark.parametrize(
    ("name", "library"),
    [("a.pdf", "pypdf"), ("a.docx", "lxml"), ("a.html", "lxml"), ("a.xlsx", "openpyxl")],
)
def test_a_parser_that_is_not_installed_is_named(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    content = docx_of(docx.Document()) if "x" in name else b"x"
    refused(name, content, rf"needs the library '{library}'; .* pip install 'sedem\[documents\]'")


@pytest.mark.parametrize(
    "name", ["a.md", "a.markdown", "a.text", "README", "a.org", "a.adoc", "a.asciidoc"]
)
def test_text_is_read_as_it_is(name: str) -> None:
    assert read(name, "\ufeff# Café\n\n<b>".encode()) == "# Café\n\n<b>"


ROWS = [
    ("Name", "Rent", "Deposit"),
    *((f"Tenant {n}", str(900 + n), str(n * 37)) for n in range(80)),
]


def word_table() -> bytes:
    document = docx.Document()
    table = document.add_table(len(ROWS), 3)
    for cell, text in zip(table._cells, (text for row in ROWS for text in row), strict=True):
        cell.text = text
    return docx_of(document)


def sheet() -> bytes:
    book, file = openpyxl.Workbook(), io.BytesIO()
    for row in ROWS:
        book.active.append([int(text) if text.isdecimal() else text for text in row])
    book.save(file)
    return file.getvalue()


TABLES: dict[str, Callable[[], bytes]] = {
    "a.csv": lambda: "\n".join(map(",".join, ROWS)).encode(),
    "b.csv": lambda: "\n".join(map(";".join, ROWS)).encode("utf-16"),
    "a.tsv": lambda: "\n".join(map("\t".join, ROWS)).encode(),
    "a.md": lambda: "\n".join(["|".join(ROWS[0]), "-|-|-", *map("|".join, ROWS[1:])]).encode(),
    "a.html": lambda: (
        "<table>" + "".join(f"<tr><td>{'<td>'.join(row)}" for row in ROWS) + "</table>"
    ).encode(),
    "a.docx": word_table,
    "a.xlsx": sheet,
}


@pytest.mark.parametrize("name", TABLES)
def test_a_row_carries_the_header_of_its_table(name: str) -> None:
    lines = read_any(name, TABLES[name]()).split("\n")
    assert "Name: Tenant 77 | Rent: 977 | Deposit: 2849" in lines


def read_any(name: str, content: bytes) -> str:
    return parse(Path(name), content, None).text


@pytest.mark.parametrize(
    "text",
    [b"1,2\n3,4", b"<table><tr><td>Rent<td>900<tr><td>Deposit<td>1,800</table>", b"a|b\nno rule"],
)
def test_a_table_without_a_header_gets_none(text: bytes) -> None:
    for name in ("a.csv", "a.html", "a.md"):
        assert ": " not in read_any(name, text)


def test_books_mail_notebooks_and_source_are_read() -> None:
    chapters = {f"o/{n}.xhtml": f"<html><body><p>Chapter {n}.</p></body></html>" for n in (1, 2, 3)}
    items = "".join(f'<item id="i{n}" href="{n}.xhtml"/>' for n in (1, 2, 3))
    refs = "".join(f'<itemref idref="i{n}"/>' for n in (2, 1, 3))
    book = {
        "META-INF/container.xml": '<c><rootfile full-path="o/b.opf"/></c>',
        "o/b.opf": f"<package>{items}{refs}</package>",
        **chapters,
    }
    assert read_any("a.epub", archive_of(book)) == "Chapter 2.\n\nChapter 1.\n\nChapter 3."
    mail = (
        "From: ida@example.org\nSubject: =?utf-8?b?QsO8cm8=?=\nMIME-Version: 1.0\n"
        "Content-Type: text/html; charset=cp1252\nContent-Transfer-Encoding: quoted-printable\n\n"
        "<p>The caf=E9 costs 900.</p>"
    )
    told = "From: ida@example.org\nSubject: Büro\n\nThe café costs 900."
    assert read_any("a.eml", mail.encode()) == told
    cells = [
        {"cell_type": "markdown", "source": ["# Rent\n", "It is due."]},
        {"cell_type": "code", "source": "print(9)", "outputs": [{"text": ["9\n"]}]},
        {"cell_type": "code", "source": "p", "outputs": [{"data": {"image/png": "iVBO"}}]},
    ]
    told = "# Rent\nIt is due.\n\nprint(9)\n\n9\n\n\np"
    assert read_any("a.ipynb", json.dumps({"cells": cells}).encode()) == told
    for name in ("a.py", "Makefile", "b.rs", "Dr. Smith"):
        assert read_any(name, b"# The rent\n\tx = 1") == "# The rent\n\tx = 1"


SLIDE = (
    '<p:sld xmlns:p="p" xmlns:a="a"><a:p><a:r><a:t>{}</a:t></a:r><a:br/><a:fld type="slidenum">'
    "<a:t>7</a:t></a:fld></a:p></p:sld>"
)


def test_slides_are_pages_in_their_order() -> None:
    kind = 'Type="http://x/{}" Target="{}"'
    files = {
        "_rels/.rels": f'<r><x Id="1" {kind.format("officeDocument", "ppt/p.xml")}/></r>',
        "ppt/p.xml": '<p xmlns:r="r"><sldId id="256" r:id="b"/><sldId id="257" r:id="a"/></p>',
        "ppt/_rels/p.xml.rels": f'<r><x Id="a" {kind.format("slide", "s/1.xml")}/>'
        f'<x Id="b" {kind.format("slide", "/ppt/s/2.xml")}/></r>',
        "ppt/s/1.xml": SLIDE.format("One"),
        "ppt/s/2.xml": SLIDE.format("Two"),
        "ppt/s/_rels/1.xml.rels": f'<r><x Id="n" {kind.format("notesSlide", "../n.xml")}/></r>',
        "ppt/n.xml": SLIDE.format("Speak slowly"),
    }
    found = parse(Path("a.pptx"), archive_of(files), None)
    assert found.text.split() == ["Two", "One", "Speak", "slowly"]
    assert found.text[found.pages[1] :].startswith("One")


RANDOM = random.Random(1).randbytes(6000)


@pytest.mark.parametrize(
    "data",
    [
        "![x](data:image/png;base64," + base64.b64encode(RANDOM).decode() + ")",
        base64.encodebytes(RANDOM).decode(),
        RANDOM.hex(),
        "x=" + base64.urlsafe_b64encode(RANDOM).decode(),
    ],
)
def test_data_of_programs_is_left_out_with_a_note(data: str) -> None:
    for name in ("a.txt", "a.md", "a.py"):
        found = parse(Path(name), f"The key.\n\n{data}\n\nThe ladder.".encode(), None)
        assert len(found.text) < 120 and found.text.startswith("The key.")
        assert found.text.endswith("The ladder.")
        assert "characters of encoded data (such as base64)" in found.notes[0]


def test_long_lines_of_words_stay() -> None:
    for text in ("The rent is due. " * 9000, "家賃" * 4000, '{"a":1,"b":2},' * 900):
        assert parse(Path("a.txt"), text.encode(), None) == (text, (), ())


RUN = "<w:r><w:t>{}</w:t></w:r>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("<w:sdt><w:sdtContent><w:p>{}</w:p></w:sdtContent></w:sdt>", "Rent"),
        ("<w:p><w:ins>{}</w:ins><w:del><w:r><w:delText>18</w:delText></w:r></w:del></w:p>", "Rent"),
        ("<w:p><w:moveTo>{}</w:moveTo></w:p><w:p><w:moveFrom>{}</w:moveFrom></w:p>", "Rent\n"),
        ("<w:p><w:smartTag>{}</w:smartTag><w:r><w:noBreakHyphen/></w:r></w:p>", "Rent-"),
        ("<w:p><w:r><w:instrText>DATE</w:instrText></w:r>{}</w:p>", "Rent"),
        ("<w:p>{}<w:r><w:pict><w:txbxContent><w:p>{}</w:p></w:txbxContent></w:pict></w:r></w:p>",
         "Rent\nRent"),
        ("<w:tbl><w:sdt><w:sdtContent><w:tr><w:tc><w:p>{}</w:p></w:tc></w:tr></w:sdtContent>"
         "</w:sdt></w:tbl>", "Rent"),
        ("<w:tbl><w:tr><w:trPr><w:del/></w:trPr><w:tc><w:p>{}</w:p></w:tc></w:tr></w:tbl>", ""),
    ],
)  # fmt: skip
def test_hidden_parts_of_word_are_read(body: str, text: str) -> None:
    assert read("a.docx", docx_with(body.replace("{}", RUN.format("Rent")))) == text


def test_headers_and_footers_of_word_are_read_once() -> None:
    document = docx.Document()
    document.add_paragraph("The rent.")
    for section in (document.sections[0], document.add_section()):
        section.header.paragraphs[0].text = "Contract 77-B"
        section.footer.is_linked_to_previous = False
        section.footer.paragraphs[0].text = "Lind & Co"
    assert read("a.docx", docx_of(document)).splitlines() == [
        "Contract 77-B", "The rent.", "", "Lind & Co",
    ]  # fmt: skip

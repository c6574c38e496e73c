"""Extracts the text of files as people have them, by the parser of their format.

Text whose encoding nobody has told is decoded by its mark, as UTF-8, as its HTML says, or by a
guess.

A file may come from anyone, so its parser runs in a process with limits of time and memory. A file
that a parser cannot read is refused with a short message, and content that would unpack to far more
than the size of the file is not unpacked.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from itertools import accumulate, chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from sedem.durable_files import bytes_text
from sedem.errors import DataError
from sedem.reading import office, pdf
from sedem.reading.office import BREAK, SPANNED
from sedem.reading.tables import Row, csv_lines, markdown_tables, table_lines
from sedem.untrusted import (
    DOCUMENT_BYTES,
    LimitError,
    apart,
    check_file,
    parser_limits,
    read_bytes,
)


class Parsed(NamedTuple):
    """What was read of a file.

    Attributes:
        pages: the first character of each page; empty if the format has no pages.
        notes: sentences on what was left out or guessed.
    """

    text: str
    pages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


HTML_BYTES = 2**24
"""Maximum bytes of an HTML file; its tree takes many times as much memory."""
MARKUP_BYTES = 2**25
"""Maximum unpacked markup in an archive; a Word document of a thousand pages has about 10 MB."""
PACKED = 2
"""Parts of an archive that compress by more than this are markup; images hardly shrink."""
PLAIN = ("", ".txt", ".text", ".md", ".markdown")
"""Endings of files that are only decoded, so they need no process of their own."""
CODE = tuple(
    ".adoc .asciidoc .asm .bash .bat .c .cc .cfg .clj .cmake .conf .cpp .cs .css .cxx .dart "
    ".erl .ex .f90 .fs .go .gradle .groovy .h .hpp .hs .ini .java .jl .js .json .jsx .kt "
    ".less .lisp .log .lua .m .mjs .ml .nix .org .pas .php .pl .proto .ps1 .py .pyi .r .rb "
    ".rs .rst .sass .scala .scss .sh .sql .swift .tex .toml .ts .tsx .vb .vue .xml .yaml "
    ".yml .zig .zsh".split()
)
"""Endings of source code and of other text that programs read too."""
HEADS = ("From", "To", "Cc", "Date", "Subject")
"""Lines of the head of a message that are read."""
SHORT_PAGE = 20
"""Most characters of a page that may be only white space."""
NO_MEMORY = 2
"""The number of libxml2's error for too little memory."""

_LEFT_OUT = ("script", "style", "nav", "template", "noscript", "title")
_BLOCKS = frozenset(
    "address article aside blockquote body br caption dd div dl dt figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr li main ol p pre section table tr ul".split()
)
_CELLS = ("td", "th")
_INNER = ("table", *_BLOCKS.intersection("blockquote dl h1 h2 h3 h4 ol section ul".split()))
_ENDING = re.compile(r"\.[A-Za-z][\w+-]{0,15}|\.7z")
# An embedded file, and a word or lines of letters and digits longer than any that people write.
_DATA = re.compile(
    r"(?<=;base64,)[A-Za-z0-9+/=_%-]{64,}|(?<![A-Za-z0-9+/=_%-])[A-Za-z0-9+/=_%-]{400,}"
    r"|(?m:^(?:[A-Za-z0-9+/]{60,76}\r?\n){4,}[A-Za-z0-9+/]*={0,2}$)"
)


def ending_of(name: str) -> str:
    """Return the ending that says the format of a file, in small letters; empty if it has none."""
    suffix = PurePosixPath(name).suffix
    return suffix.lower() if _ENDING.fullmatch(suffix) else ""


def parse(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """Return the text of a file and where its pages begin.

    Args:
        encoding: encoding of text and HTML, or None to find it out; other formats name their own.

    Raises:
        DataError: the file is damaged, encrypted, in another encoding or too large unpacked, has
            no text, or its parser is not installed.
    """
    try:
        found = PARSERS.get(ending_of(path.name), _plain)(path, content, encoding)
    except ModuleNotFoundError as error:
        raise DataError(
            f"'{path}' needs the library '{error.name}'; install it with "
            "pip install 'sedem[documents]'"
        ) from None
    # What is data of programs and not text of people, such as embedded pictures, is left out.
    text, count = ("", 0) if found.pages else _DATA.subn("", found.text)
    if not count:
        return found
    lost = len(found.text) - len(text)
    note = f"{lost:,} characters of encoded data (such as base64) in '{path}' were left out"
    return found._replace(text=text, notes=(*found.notes, note))


def parse_file(
    place: Path,
    name: str,
    encoding: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Parsed:
    """Return the text of a file and where its pages begin, within limits of time and memory.

    Args:
        place: the file, whatever its name there.
        name: its name for messages; the ending says its format.
        encoding: as in `parse`.
        stopped: as in `untrusted.apart`.

    Raises:
        DataError: as in `parse`, or the file is no file, too large, or needs too much to be read.
        FileNotFoundError: there is no such file.
        StoppedError: `stopped` returned true.
    """
    if ending_of(name) in (*PLAIN, *CODE):
        return parse(Path(name), read_bytes(place, DataError, DOCUMENT_BYTES), encoding)
    check_file(place, DataError, DOCUMENT_BYTES)
    call, given = f"{__name__}:_parse_apart", (os.path.abspath(place), name, encoding)
    try:
        text, pages, notes = apart(call, *given, **parser_limits(), stopped=stopped)
    except LimitError as error:
        raise DataError(f"'{name}' {error} to be read; split it or save it as plain text") from None
    except ValueError as error:
        raise DataError(f"'{name}' stopped its parser ({error}); save it as plain text") from None
    return Parsed(text, tuple(pages), tuple(notes))


def _parse_apart(place: str, name: str, encoding: str | None) -> Parsed:
    return parse(Path(name), read_bytes(Path(place), DataError, DOCUMENT_BYTES), encoding)


def _plain(path: Path, content: bytes, encoding: str | None) -> Parsed:
    text, notes = decode(path, content, encoding)
    return Parsed(text, notes=notes)


def _markdown(path: Path, content: bytes, encoding: str | None) -> Parsed:
    found = _plain(path, content, encoding)
    return found._replace(text=markdown_tables(found.text))


def _csv(path: Path, content: bytes, encoding: str | None) -> Parsed:
    found = _plain(path, content, encoding)
    with _parsing(path, "CSV"):
        return found._replace(text="\n".join(csv_lines(found.text, path.suffix.lower() == ".tsv")))


def _notebook(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """The cells of a notebook, and the text that they printed."""
    text, notes = decode(path, content, encoding)
    with _parsing(path, "notebook"):
        texts: list[str] = []
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            texts.append(markdown_tables(source) if cell["cell_type"] == "markdown" else source)
            for output in cell.get("outputs", ()):
                printed = output.get("text") or output.get("data", {}).get("text/plain", "")
                texts.append("".join(printed))
    return Parsed(BREAK.join(filter(str.strip, texts)), notes=notes)


def _email(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """The head and the text of a message; attachments are named."""
    with _parsing(path, "e-mail"):
        message = message_from_bytes(content, policy=default)
        assert isinstance(message, EmailMessage)
        heads = [f"{name}: {message[name]}" for name in HEADS if message[name]]
        if not heads:
            raise ValueError("it has no head")
        files = [one.get_filename() or "a message" for one in message.iter_attachments()]
        heads += [f"Attachment: {name}" for name in files]
        body = message.get_body(("plain", "html"))
        text = body.get_content() if body else ""
        if body and body.get_content_subtype() == "html":
            text = _html(Path("body.html"), text.encode(), "utf-8").text
    note = f"the attachments of '{path}' were not read ({', '.join(files)}); save them as files"
    return Parsed(BREAK.join(["\n".join(heads), text]), notes=(note,) if files else ())


def _html(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """The text of a page, paragraph by paragraph, without menus and scripts.

    The title comes first, unless the page has an identical paragraph: most pages repeat the title
    as their heading.
    """
    from lxml import etree

    if len(content) > HTML_BYTES:
        raise _too_large(path, "HTML", len(content), HTML_BYTES)
    text, notes = decode(path, content, encoding)
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    pieces: list[str] = []
    with _parsing(path, "HTML"):
        root = etree.fromstring(text.encode(), parser)
        # lxml returns what it has read before a fatal error, such as too deeply nested tags.
        for problem in parser.error_log.filter_from_fatals():
            if problem.type == NO_MEMORY:
                raise MemoryError
            raise ValueError(problem.message)
        if root is None:
            return Parsed("")
        # An SVG image inside the page may also have a title, which is not part of the text.
        titles = root.xpath("//title[not(ancestor::svg)]")
        title = " ".join("".join(titles[0].itertext()).split()) if titles else ""
        etree.strip_elements(root, *_LEFT_OUT, with_tail=False)
        for table in root.xpath("//table"):
            _name_cells(table)
        for event, tag in etree.iterwalk(root, events=("start", "end")):
            # Decoded text never contains NUL, so NUL can mark the end of a paragraph.
            gap = "\0" if tag.tag in _BLOCKS else " " if tag.tag in _CELLS else ""
            pieces += gap, (tag.text if event == "start" else tag.tail) or ""
    lines = (" ".join(paragraph.split()) for paragraph in "".join(pieces).split("\0"))
    paragraphs = [line for line in lines if line]
    if title and title.casefold() not in map(str.casefold, paragraphs):
        paragraphs.insert(0, title)
    return Parsed(BREAK.join(paragraphs), notes=notes)


def _name_cells(table: Any) -> None:
    """Put a line in the place of each row of a table with a header; one for layout stays."""
    elements = table.xpath("./tr|./thead/tr|./tbody/tr|./tfoot/tr")
    if not elements or table.xpath("|".join(f".//{name}" for name in _INNER)):
        return
    rows: list[Row] = []
    spans: Row = {}
    below: dict[int, tuple[int, str]] = {}  # cells that span rows: how many more, and their text
    for element in elements:
        row: Row = {column: text for column, (_, text) in below.items()}
        below = {column: (left - 1, text) for column, (left, text) in below.items() if left > 1}
        column = 0
        for cell in element.xpath("./td|./th"):
            while column in row:
                column += 1
            row[column] = " ".join(" ".join(cell.itertext()).split())
            given = (cell.get(name, "1").strip() for name in ("colspan", "rowspan"))
            wide, high = (
                min(max(int(one), 1), SPANNED) if one.isascii() and one.isdecimal() else 1
                for one in given
            )
            if high > 1:
                below[column] = (high - 1, row[column])
            if not rows:
                spans |= dict.fromkeys(range(column, column + wide), row[column])
            column += wide
        rows.append(dict(sorted(row.items())))
    marked = all(cell.tag == "th" for cell in elements[0]) or elements[0].getparent().tag == "thead"
    for element, line in zip(
        elements, table_lines(rows, header=marked or None, names=spans) or (), strict=False
    ):
        element[:] = ()
        element.text = line


def _pdf(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """The text of all pages; one that is only an image has none, and a note names it."""
    # pypdf warns of every oddity that it can handle; we report what it cannot handle.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    with _parsing(path, "PDF"):
        texts = pdf.pages_of(content)
        if texts is None:
            raise DataError(f"'{path}' is encrypted; save a copy without a password")
        found = _paged(path, map(_unicode, texts))
    if not found.text.strip():
        raise DataError(
            f"'{path}' has no text: its pages are pictures (scans); give a copy with "
            "recognised text (OCR)"
        )
    characters, part = len(found.text), found.text.__getitem__
    return found._replace(notes=told_empty(str(path), found.pages, characters, part))


def _paged(path: Path, texts: Iterable[str]) -> Parsed:
    pages: list[str] = []
    size = 0
    for text in texts:
        pages.append(text)
        size += len(text)
        if size > DOCUMENT_BYTES:
            raise _too_large(path, "text", size, DOCUMENT_BYTES)
    starts = accumulate((len(page) + len(BREAK) for page in pages[:-1]), initial=0)
    return Parsed(BREAK.join(pages), tuple(starts))


@contextmanager
def _archive(path: Path, content: bytes, kind: str) -> Iterator[zipfile.ZipFile]:
    """Open an archive of markup, unless it unpacks to far more than its size."""
    with _parsing(path, kind), zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(
            entry.file_size
            for entry in archive.infolist()
            if entry.file_size > PACKED * entry.compress_size
        )
        if size > MARKUP_BYTES:
            raise _too_large(path, "markup", size, MARKUP_BYTES)
        yield archive


def _docx(path: Path, content: bytes, encoding: str | None) -> Parsed:
    with _archive(path, content, "Word document") as archive:
        return Parsed(office.word_text(archive))


def _pptx(path: Path, content: bytes, encoding: str | None) -> Parsed:
    with _archive(path, content, "presentation") as archive:
        return _paged(path, office.slides(archive))


def _xlsx(path: Path, content: bytes, encoding: str | None) -> Parsed:
    with _archive(path, content, "Excel workbook"):
        return Parsed(office.workbook(content))


def _epub(path: Path, content: bytes, encoding: str | None) -> Parsed:
    """The chapters of a book in their order."""
    with _archive(path, content, "EPUB") as archive:
        box = office.opened(archive, "META-INF/container.xml")
        name = next(box.iter("{*}rootfile")).get("full-path")
        book = office.opened(archive, name)
        files = {one.get("id"): unquote(one.get("href")) for one in book.iter("{*}item")}
        order = [files[one.get("idref")] for one in book.iter("{*}itemref")]
        places = [posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in order]
        return Parsed(BREAK.join(_html(path, archive.read(one), None).text for one in places))


PARSERS: dict[str, Callable[[Path, bytes, str | None], Parsed]] = {
    ".txt": _plain,
    ".text": _plain,
    ".md": _markdown,
    ".markdown": _markdown,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".docx": _docx,
    ".xlsx": _xlsx,
    ".pptx": _pptx,
    ".csv": _csv,
    ".tsv": _csv,
    ".epub": _epub,
    ".eml": _email,
    ".ipynb": _notebook,
    **dict.fromkeys(CODE, _plain),
}
"""The parser of each ending; text may also have none."""


@contextmanager
def _parsing(path: Path, kind: str) -> Iterator[None]:
    """Turn any parser error into a DataError: a damaged file can fail anywhere in a parser."""
    try:
        yield
    except (DataError, ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:
        if getattr(error, "code", None) == NO_MEMORY:
            raise MemoryError from None
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise DataError(
            f"'{path}' cannot be read as {kind}, it is damaged, too large or of another type "
            f"({reason}); save it again or as plain text"
        ) from None


def _unicode(text: str) -> str:
    """Text with U+FFFD for NUL and for lone surrogates, which fonts of PDFs may produce."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\ufffd")


def _too_large(path: Path, what: str, size: int, most: int) -> DataError:
    return DataError(
        f"'{path}' has {bytes_text(size)} of {what}, at most {bytes_text(most)} are read; split it "
        "or save it as plain text"
    )


def told_empty(
    name: str, pages: Sequence[int], characters: int, part: Callable[[slice], str]
) -> tuple[str, ...]:
    """Return a sentence on the pages of a document that have no text; none if all have.

    Args:
        part: returns a part of the text.
    """
    bounds = pairwise((*pages, characters))
    # White space between pages is short, so only short pages are looked at.
    empty = [
        number
        for number, (start, end) in enumerate(bounds, start=1)
        if end - start <= SHORT_PAGE and not part(slice(start, end)).strip()
    ]
    if not empty:
        return ()
    numbers = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
    which = f"page {numbers} has" if len(empty) == 1 else f"pages {numbers} have"
    return (f"{which} no text in '{name}'; a picture (scan) needs recognised text (OCR)",)


# Encodings

MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and their encodings; the mark of UTF-32 begins with one of UTF-16."""
GUESSED = (
    "cp1252 utf_16_le utf_16_be cp1250 cp1251 koi8_r cp1253 cp1254 cp1255 cp1256 cp932 euc_jp "
    "gb18030 big5 cp949 mac_roman cp850"
).split()
"""Encodings that are guessed, the most usual first."""
JOINING = "\u2019\u00ad\u2010\u2011\u00b7"
"""Symbols that stand inside words."""
SAMPLE = 2**16
"""Bytes that a guess looks at."""
HEAD = 2**12
"""Bytes of HTML that may name its encoding."""

_META = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)


def decode(path: Path, content: bytes, encoding: str | None) -> tuple[str, tuple[str, ...]]:
    """Decode text, without its byte order mark.

    Args:
        encoding: its encoding, if it has no byte order mark; None finds it out.

    Returns:
        The text, and a note if its encoding was guessed.

    Raises:
        DataError: the content is binary or in another encoding, or the encoding is unknown.
    """
    marked = next((name for mark, name in MARKS if content.startswith(mark)), None)
    binary = DataError(f"'{path}' holds binary data, not text; save it as plain text")
    if given := marked or encoding:
        try:
            text = content.decode(given).removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            if not marked and b"\0" in content:
                raise binary from None
            advice = "name its encoding, such as --encoding latin-1, or leave it out"
            raise DataError(
                f"'{path}' is not {given.removesuffix('-sig')} text (byte {error.start}); "
                f"{'save it again as UTF-8' if marked else advice}"
            ) from None
        # A name with NUL raises ValueError, and some encodings raise errors of their own.
        except (LookupError, ValueError):
            raise DataError(
                f"'{path}' cannot be read as '{given}', or there is no such encoding; "
                "try utf-8 or latin-1"
            ) from None
        if "\0" in text:
            raise binary
        return text, ()
    # A page of HTML may name its encoding.
    is_html = path.suffix.lower() in (".html", ".htm")
    declared = _META.search(content[:HEAD]) if is_html else None
    told = ["utf-8", *([declared[1].decode()] if declared else [])]
    for name in chain(told, _guesses(content)):
        try:
            text = content.decode(name)
        except (LookupError, ValueError):
            continue
        if "\0" not in text:
            guess = f"'{path}' does not say its encoding; it was read as {name}"
            return text, () if name in told else (guess,)
    raise binary


def is_text(head: bytes) -> bool:
    """Whether the first bytes of a file look like text."""
    if not head or any(head.startswith(mark) for mark, _ in MARKS):
        return bool(head)
    if b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its last character may be cut
    except UnicodeDecodeError:
        return any(_guesses(head))
    return True


def _guesses(content: bytes) -> Iterator[str]:
    """Encodings of some bytes, the likeliest first; none for binary data."""
    from charset_normalizer import from_bytes

    sample = content[:SAMPLE]
    if b"\0" not in sample:
        # ASCII says nothing, and the first letter beyond it may come late.
        sample = b"\n".join(line for line in content.splitlines() if not line.isascii())
        sample = sample if len(sample) <= SAMPLE else sample[:SAMPLE].rpartition(b"\n")[0]
    found = from_bytes(sample, cp_isolation=GUESSED, enable_fallback=False)
    # A match names one of several encodings that give the same text.
    known = [
        (min(names, key=GUESSED.index), one)
        for one in found
        if (names := {one.encoding, *one.could_be_from_charset}.intersection(GUESSED))
    ]

    def rank(guess: tuple[str, Any]) -> tuple[float, ...]:
        name, one = guess
        usual = 0.02 if name == GUESSED[0] else 0
        return _odd(str(one)), round(one.chaos, 1), -one.coherence - usual, GUESSED.index(name)

    for name, _ in sorted(known, key=rank):
        yield name


def _odd(text: str) -> int:
    """Count what no language has: a symbol inside a word, or a capital letter after small ones."""
    pairs = [*pairwise(text)]
    return sum(
        b > "\x7f" and a.isalpha() and c.isalpha()
        and (b.isupper() and a.islower() if b.isalpha() else b not in JOINING)
        for (a, b), (_, c) in pairwise(pairs)
    )  # fmt: skip

"""Extracts the text of plain text, HTML, PDF and Word files, each with its own parser.

A file may come from anyone, so its parser runs in a process with limits of time and memory. A file
that a parser cannot read is refused with a short message, and content that would unpack to far more
than the size of the file is not unpacked.
"""

from __future__ import annotations

import io
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from sedem.durable_files import bytes_text
from sedem.errors import DataError
from sedem.untrusted import (
    DOCUMENT_BYTES,
    LimitError,
    apart,
    check_file,
    parser_limits,
    read_bytes,
)

if TYPE_CHECKING:
    from docx.blkcntnr import BlockItemContainer
    from docx.document import Document as WordDocument

Parsed = tuple[str, tuple[int, ...]]
"""A text, and the first character of each of its pages; no pages if the format has none."""

HTML_BYTES = 2**24
"""Maximum bytes of an HTML file; its tree takes many times as much memory."""
MARKUP_BYTES = 2**25
"""Maximum unpacked markup in a Word document; a thousand pages have about 10 MB."""
PACKED = 2
"""Parts of a Word document that compress by more than this are markup; images hardly shrink."""
PLAIN = (".txt", ".md")
"""Endings of files that are only decoded, so they need no process of their own."""
BREAK = "\n\n"
"""Separator between paragraphs and between pages."""

NO_MEMORY = 2
"""The number of libxml2's error for too little memory."""

_LEFT_OUT = ("script", "style", "nav", "template", "noscript", "title")
_BLOCKS = frozenset(
    "address article aside blockquote body br caption dd div dl dt figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr li main ol p pre section table tr ul".split()
)
_CELLS = ("td", "th")


def parse(path: Path, content: bytes, encoding: str) -> Parsed:
    """Return the text of a file and where its pages begin.

    Args:
        encoding: encoding of plain text and HTML; the other formats name their own.

    Raises:
        DataError: the file is damaged, encrypted, in another encoding or too large unpacked, has
            no text, or its parser is not installed.
    """
    try:
        return PARSERS[path.suffix.lower()](path, content, encoding)
    except ModuleNotFoundError as error:
        raise DataError(
            f"'{path}' needs the library '{error.name}'; install it with "
            "pip install 'sedem[documents]'"
        ) from None


def parse_file(
    place: Path,
    name: str,
    encoding: str = "utf-8",
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
    if Path(name).suffix.lower() in PLAIN:
        return parse(Path(name), read_bytes(place, DataError, DOCUMENT_BYTES), encoding)
    check_file(place, DataError, DOCUMENT_BYTES)
    call, given = f"{__name__}:_parse_apart", (os.path.abspath(place), name, encoding)
    try:
        text, pages = apart(call, *given, **parser_limits(), stopped=stopped)
    except LimitError as error:
        raise DataError(f"'{name}' {error} to be read; split it or save it as plain text") from None
    except ValueError as error:
        raise DataError(f"'{name}' stopped its parser ({error}); save it as plain text") from None
    return text, tuple(pages)


def _parse_apart(place: str, name: str, encoding: str) -> Parsed:
    return parse(Path(name), read_bytes(Path(place), DataError, DOCUMENT_BYTES), encoding)


def decode(path: Path, content: bytes, encoding: str) -> str:
    """Decode text, without its byte order mark.

    Raises:
        DataError: the content is binary or in another encoding, or the encoding is unknown.
    """
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        if b"\0" in content:
            raise _binary(path) from None
        raise DataError(
            f"'{path}' is not {encoding} text (byte {error.start}); "
            "name its encoding, such as --encoding latin-1"
        ) from None
    # A name with NUL raises ValueError, and some encodings raise errors of their own.
    except (LookupError, ValueError):
        raise DataError(
            f"'{path}' cannot be read as '{encoding}', or there is no such encoding; "
            "try utf-8 or latin-1"
        ) from None
    if "\0" in text:
        raise _binary(path)
    return text.removeprefix("\ufeff")


def _plain(path: Path, content: bytes, encoding: str) -> Parsed:
    return decode(path, content, encoding), ()


def _html(path: Path, content: bytes, encoding: str) -> Parsed:
    """The text of a page, paragraph by paragraph, without menus and scripts.

    The title comes first, unless the page has an identical paragraph: most pages repeat the title
    as their heading.
    """
    from lxml import etree

    if len(content) > HTML_BYTES:
        raise _too_large(path, "HTML", len(content), HTML_BYTES)
    text = decode(path, content, encoding)
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
            return "", ()
        # An SVG image inside the page may also have a title, which is not part of the text.
        titles = root.xpath("//title[not(ancestor::svg)]")
        title = " ".join("".join(titles[0].itertext()).split()) if titles else ""
        etree.strip_elements(root, *_LEFT_OUT, with_tail=False)
        for event, tag in etree.iterwalk(root, events=("start", "end")):
            # Decoded text never contains NUL, so NUL can mark the end of a paragraph.
            gap = "\0" if tag.tag in _BLOCKS else " " if tag.tag in _CELLS else ""
            pieces += gap, (tag.text if event == "start" else tag.tail) or ""
    lines = (" ".join(paragraph.split()) for paragraph in "".join(pieces).split("\0"))
    paragraphs = [line for line in lines if line]
    if title and title.casefold() not in map(str.casefold, paragraphs):
        paragraphs.insert(0, title)
    return BREAK.join(paragraphs), ()


def _pdf(path: Path, content: bytes, encoding: str) -> Parsed:
    """The text of all pages; a page that is only an image has none."""
    from pypdf import PdfReader

    # pypdf warns of every oddity that it can handle; we report what it cannot handle.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    pages: list[str] = []
    with _parsing(path, "PDF"):
        reader = PdfReader(io.BytesIO(content))
        # If only printing is forbidden, the password is empty.
        if reader.is_encrypted and not reader.decrypt(""):
            raise DataError(f"'{path}' is encrypted; save a copy without a password")
        for page in reader.pages:
            pages.append(_unicode(page.extract_text()))
            if (size := sum(map(len, pages))) > DOCUMENT_BYTES:
                raise _too_large(path, "text", size, DOCUMENT_BYTES)
    if not any(map(str.strip, pages)):
        raise DataError(
            f"'{path}' has no text: its pages are pictures (scans); give a copy with "
            "recognised text (OCR)"
        )
    starts = accumulate((len(page) + len(BREAK) for page in pages[:-1]), initial=0)
    return BREAK.join(pages), tuple(starts)


def _docx(path: Path, content: bytes, encoding: str) -> Parsed:
    """The paragraphs and tables of the body, in document order."""
    import docx

    with _parsing(path, "Word document"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(
                entry.file_size
                for entry in archive.infolist()
                if entry.file_size > PACKED * entry.compress_size
            )
        if size > MARKUP_BYTES:
            raise _too_large(path, "markup", size, MARKUP_BYTES)
        document = docx.Document(io.BytesIO(content))
        return "\n".join(_lines(document)), ()


def _lines(container: WordDocument | BlockItemContainer) -> Iterator[str]:
    """The paragraphs of a part of a Word document; each table row is one line."""
    from docx.table import _Cell
    from docx.text.paragraph import Paragraph

    for item in container.iter_inner_content():
        if isinstance(item, Paragraph):
            yield item.text
            continue
        # Not `row.cells`, which lists a cell once per column that it says it spans.
        above: dict[int, str] = {}
        for row in item.rows:
            column, texts, below = row._tr.grid_before, [], {}
            for cell in row._tr.tc_lst:
                if cell.vMerge == "continue":
                    text = above.get(column, "")
                else:
                    text = " ".join(filter(None, _lines(_Cell(cell, item))))
                texts.append(text)
                below[column] = text
                column += cell.grid_span
            above = below
            yield "\t".join(texts)


PARSERS: dict[str, Callable[[Path, bytes, str], Parsed]] = {
    ".txt": _plain,
    ".md": _plain,
    ".html": _html,
    ".htm": _html,
    ".pdf": _pdf,
    ".docx": _docx,
}
"""The parser of each file suffix."""


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


def _binary(path: Path) -> DataError:
    return DataError(f"'{path}' holds binary data, not text; save it as plain text")


def _too_large(path: Path, what: str, size: int, most: int) -> DataError:
    return DataError(
        f"'{path}' has {bytes_text(size)} of {what}, at most {bytes_text(most)} are read; split it "
        "or save it as plain text"
    )

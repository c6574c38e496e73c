"""Extracts the text of plain text, HTML, PDF and Word files, each with its own parser.

A file may come from anyone. A file that a parser cannot read is refused with a short message, and
content that would unpack to far more than the size of the file is not unpacked.
"""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from sedem.durable_files import bytes_text
from sedem.errors import DataError
from sedem.untrusted import DOCUMENT_BYTES

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
BREAK = "\n\n"
"""Separator between paragraphs and between pages."""

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
    from docx.text.paragraph import Paragraph

    for item in container.iter_inner_content():
        if isinstance(item, Paragraph):
            yield item.text
            continue
        for row in item.rows:
            # A cell that spans columns is listed once per column.
            cells = {cell._tc: cell for cell in row.cells}.values()
            yield "\t".join(" ".join(filter(None, _lines(cell))) for cell in cells)


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
    except (DataError, ModuleNotFoundError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise DataError(
            f"'{path}' cannot be read as {kind}, it is damaged or of another type ({reason}); save "
            "it again or as plain text"
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

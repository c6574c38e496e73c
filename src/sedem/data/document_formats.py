"""The text in a document's file: plain text, HTML, PDF and Word, each read by its own parser.

A file may come from anybody. What a parser cannot read is refused in one sentence, and what would
unpack to far more than the file itself is not unpacked.
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
"""A text, and the first character of each of its pages; no page if the format has none."""

HTML_BYTES = 2**24
"""Limit of an HTML file; its tree takes many times as much memory."""
MARKUP_BYTES = 2**25
"""Limit of the markup in a Word document, unpacked; a thousand pages have some 10 MB."""
PACKED = 2
"""What shrinks by more than this in a Word document is markup; pictures hardly shrink."""
BREAK = "\n\n"
"""Between two paragraphs and between two pages."""

_LEFT_OUT = ("script", "style", "nav", "template", "noscript", "title")
_BLOCKS = frozenset(
    "address article aside blockquote body br caption dd div dl dt figcaption figure footer form "
    "h1 h2 h3 h4 h5 h6 header hr li main ol p pre section table tr ul".split()
)
_CELLS = ("td", "th")


def parse(path: Path, content: bytes, encoding: str) -> Parsed:
    """Return the text of a file and where its pages begin.

    Args:
        path: name of the file, whose ending tells the format.
        content: its bytes.
        encoding: of plain text and HTML; the other formats name theirs.

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
        DataError: it is binary or in another encoding, or there is no such encoding.
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
    # A name with NUL is a ValueError, and some encodings raise errors of their own.
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
    """The words of a page, paragraph by paragraph, without menus and scripts.

    Its title comes first, unless a paragraph of the page is the same: most pages repeat it as their
    heading.
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
        # It gives what it has read up to a fatal error, such as tags too deep inside each other.
        for problem in parser.error_log.filter_from_fatals():
            raise ValueError(problem.message)
        if root is None:
            return "", ()
        # A picture (SVG) inside the page may have a title, too, which is no word of the text.
        titles = root.xpath("//title[not(ancestor::svg)]")
        title = " ".join("".join(titles[0].itertext()).split()) if titles else ""
        etree.strip_elements(root, *_LEFT_OUT, with_tail=False)
        for event, tag in etree.iterwalk(root, events=("start", "end")):
            # No text that was decoded has a NUL, so it can mark where a paragraph ends.
            gap = "\0" if tag.tag in _BLOCKS else " " if tag.tag in _CELLS else ""
            pieces += gap, (tag.text if event == "start" else tag.tail) or ""
    lines = (" ".join(paragraph.split()) for paragraph in "".join(pieces).split("\0"))
    paragraphs = [line for line in lines if line]
    if title and title.casefold() not in map(str.casefold, paragraphs):
        paragraphs.insert(0, title)
    return BREAK.join(paragraphs), ()


def _pdf(path: Path, content: bytes, encoding: str) -> Parsed:
    """The text of all pages; a page that is only a picture has none."""
    from pypdf import PdfReader

    # It warns of every oddity that it can live with; what it cannot is our error.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    pages: list[str] = []
    with _parsing(path, "PDF"):
        reader = PdfReader(io.BytesIO(content))
        # Without a password if only printing is forbidden.
        if reader.is_encrypted and not reader.decrypt(""):
            raise DataError(f"'{path}' is encrypted; save a copy without a password")
        for page in reader.pages:
            pages.append(_unicode(page.extract_text()))
            if (size := sum(map(len, pages))) > DOCUMENT_BYTES:
                raise _too_large(path, "text", size, DOCUMENT_BYTES)
    if not any(map(str.strip, pages)):
        raise DataError(
            f"'{path}' has no text: its pages are pictures, as of a scanner; give a copy whose "
            "text was recognised (OCR)"
        )
    starts = accumulate((len(page) + len(BREAK) for page in pages[:-1]), initial=0)
    return BREAK.join(pages), tuple(starts)


def _docx(path: Path, content: bytes, encoding: str) -> Parsed:
    """The paragraphs and tables of the body, in their order."""
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
    """The paragraphs of a part of a Word document; a row of a table is one line."""
    from docx.text.paragraph import Paragraph

    for item in container.iter_inner_content():
        if isinstance(item, Paragraph):
            yield item.text
            continue
        for row in item.rows:
            # A cell that spans columns is listed once for each of them.
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
"""What reads a file, by its ending."""


@contextmanager
def _parsing(path: Path, kind: str) -> Iterator[None]:
    """Raise whatever a parser raises as one sentence: damaged files take them anywhere."""
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
    """Text with U+FFFD for NUL and for halves of surrogate pairs, which fonts of PDFs may give."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\ufffd")


def _binary(path: Path) -> DataError:
    return DataError(f"'{path}' holds binary data, not text; save it as plain text")


def _too_large(path: Path, what: str, size: int, most: int) -> DataError:
    return DataError(
        f"'{path}' has {bytes_text(size)} of {what}, at most {bytes_text(most)} are read; split it "
        "or save it as plain text"
    )

"""Documents as files of other formats than text."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence

import docx
from docx.document import Document


def pdf_of(pages: Sequence[str], stream: bytes | None = None) -> bytes:
    """A PDF with a line of text on each page; `stream` replaces what is on the pages."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        drawn = stream or zlib.compress(f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode())
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Resources << /Font "
            b"<< /F1 3 0 R >> >> /Contents %d 0 R >>" % (5 + 2 * number),
            b"<< /Filter /FlateDecode /Length %d >>\nstream\n%b\nendstream" % (len(drawn), drawn),
        ]
    content, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(content))
        content += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return content + (
        b"xref\n0 %d\n0000000000 65535 f \n%btrailer << /Size %d /Root 1 0 R >>\n"
        b"startxref\n%d\n%%%%EOF\n" % (size, table, size, len(content))
    )


def docx_of(document: Document) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def archive_of(files: Mapping[str, str | bytes]) -> bytes:
    """An archive of files."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def docx_with(body: str) -> bytes:
    """A Word file with elements that docx does not write."""
    with zipfile.ZipFile(io.BytesIO(docx_of(docx.Document()))) as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    name, start = "word/document.xml", b"<w:body>"
    files[name] = files[name].replace(start, start + body.encode(), 1)
    return archive_of(files)

"""Extracts the text of Word, Excel and PowerPoint files: archives of XML."""

from __future__ import annotations

import io
import posixpath
import zipfile
from collections.abc import Iterator
from datetime import datetime, time
from itertools import chain
from typing import Any

from sedem.reading.tables import Row, sheet_lines, table_lines

BREAK = "\n\n"
"""Separator between slides and between sheets."""
SPANNED = 64
"""Most columns that a cell of a header names."""

_LEFT_OUT = frozenset(
    "del moveFrom Fallback instrText delText delInstrText pPr rPr sdtPr sectPr tblPr rt".split()
)
"""Elements without text to be read: what was deleted or moved away, a copy for old programs,
commands, properties, and readings above other characters."""
_CHARACTERS = {"tab": "\t", "ptab": "\t", "cr": "\n", "noBreakHyphen": "-"}
_NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes"}


def opened(archive: zipfile.ZipFile, name: str) -> Any:
    """Return the root of an XML file in an archive."""
    from lxml import etree

    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, huge_tree=True, remove_comments=True,
        remove_pis=True,
    )  # fmt: skip
    return etree.fromstring(archive.read(name), parser)


def related(archive: zipfile.ZipFile, name: str = "") -> dict[str, tuple[str, str]]:
    """Return what belongs to a part: by its id, what it is and the name of the part."""
    folder, file = posixpath.split(name)
    place = posixpath.join(folder, "_rels", f"{file}.rels")
    if place not in archive.namelist():
        return {}
    return {
        one.get("Id"): (
            one.get("Type", "").rpartition("/")[2],
            posixpath.normpath(posixpath.join("/", folder, one.get("Target", ""))).lstrip("/"),
        )
        for one in opened(archive, place)
    }


def word_text(archive: zipfile.ZipFile) -> str:
    """The headers, the body with its tables, boxes and notes, and the footers of a document."""
    parts = [name for kind, name in related(archive).values() if kind == "officeDocument"]
    root = opened(archive, parts[0])
    beside = [*related(archive, parts[0]).values()]
    notes = {
        (kind, _attribute(note, "id")): [*_lines(note, {})]
        for kind, name in beside
        if kind in _NOTES.values()
        for note in opened(archive, name)
    }

    def edges(wanted: str) -> Iterator[str]:
        every = (_lines(opened(archive, name), notes) for kind, name in beside if kind == wanted)
        return (line for line in dict.fromkeys(chain.from_iterable(every)) if line.strip())

    body = next(child for child in root if _tag(child) == "body")
    return "\n".join(chain(edges("header"), _lines(body, notes), edges("footer")))


def _lines(node: Any, notes: dict[Any, list[str]]) -> Iterator[str]:
    """The paragraphs of a part of a Word document; each table row is one line."""
    for child in node:
        match _tag(child):
            case "p":
                boxes: list[str] = []
                yield "".join(_characters(child, notes, boxes))
                yield from boxes
            case "tbl":
                yield from _table(child, notes)
            case tag if tag not in _LEFT_OUT:
                yield from _lines(child, notes)


def _characters(node: Any, notes: dict[Any, list[str]], boxes: list[str]) -> Iterator[str]:
    """The text of a paragraph; boxes and notes in it are added to `boxes`."""
    for child in node:
        match tag := _tag(child):
            case "t":
                yield child.text or ""
            case "br":
                yield "\n" if _attribute(child, "type", "textWrapping") == "textWrapping" else ""
            case "txbxContent":
                boxes += _lines(child, notes)
            case "footnoteReference" | "endnoteReference":
                boxes += notes.get((_NOTES[tag], _attribute(child, "id")), [])
            case _ if tag not in _LEFT_OUT:
                yield _CHARACTERS.get(tag, "")
                yield from _characters(child, notes, boxes)


def _table(table: Any, notes: dict[Any, list[str]]) -> Iterator[str]:
    rows: list[Row] = []
    above: Row = {}
    spans: Row = {}
    for element in _inside(table, "tr"):
        column, row = _number(_property(element, "gridBefore"), 0), Row()
        for cell in _inside(element, "tc"):
            merged, span = _property(cell, "vMerge"), _number(_property(cell, "gridSpan"), 1)
            if merged is not None and _attribute(merged, "val", "continue") == "continue":
                row[column] = above.get(column, "")
            else:
                row[column] = " ".join(filter(None, _lines(cell, notes)))
            if not rows:
                spans |= dict.fromkeys(range(column, column + min(span, SPANNED)), row[column])
            column += span
        rows.append(row)
        above = row
    marked = next((_property(one, "tblHeader") for one in _inside(table, "tr")), None)
    lines = table_lines(rows, header=None if marked is None else True, names=spans)
    yield from lines or ("\t".join(row.values()) for row in rows)


def _inside(node: Any, wanted: str) -> Iterator[Any]:
    """The rows of a table or the cells of a row, also those in controls, without deleted ones."""
    for child in node:
        tag = _tag(child)
        if tag == wanted and _property(child, "del") is None:
            yield child
        elif tag != wanted and tag not in _LEFT_OUT:
            yield from _inside(child, wanted)


def _property(node: Any, name: str) -> Any:
    """A property of a row or a cell; None if it has none of this name."""
    every = (one for part in node if _tag(part) in ("trPr", "tcPr") for one in part)
    return next((one for one in every if _tag(one) == name), None)


def _number(element: Any, usual: int) -> int:
    return usual if element is None else max(int(_attribute(element, "val", "0")), usual)


def _tag(element: Any) -> str:
    return element.tag.rpartition("}")[2]


def _attribute(element: Any, name: str, usual: str = "") -> str:
    """An attribute in the namespace of its element."""
    return str(element.get(f"{element.tag.rpartition('}')[0]}}}{name}", usual))


def slides(archive: zipfile.ZipFile) -> list[str]:
    """The text of each slide of a presentation, with its tables and its notes."""
    parts = [name for kind, name in related(archive).values() if kind == "officeDocument"]
    beside = related(archive, parts[0])
    ids = (one for one in opened(archive, parts[0]).iter("{*}sldId"))
    names = [beside[value][1] for one in ids for key, value in one.items() if key.endswith("}id")]
    texts = []
    for name in names:
        notes = [one for kind, one in related(archive, name).values() if kind == "notesSlide"]
        lines = (line for one in (name, *notes) for line in _shapes(opened(archive, one)))
        texts.append("\n".join(filter(str.strip, lines)))
    return texts


def _shapes(node: Any) -> Iterator[str]:
    """The paragraphs of a slide; each table row is one line."""
    for child in node:
        match _tag(child):
            case "p":
                yield "".join(
                    "\n" if _tag(one) == "br" else one.text or ""
                    for one in child.iter("{*}t", "{*}br")
                    if one.getparent().get("type") != "slidenum"
                )
            case "tbl":
                rows = [
                    {n: " ".join(filter(None, _shapes(cell))) for n, cell in enumerate(row)}
                    for row in child.findall("{*}tr")
                ]
                yield from table_lines(rows) or ("\t".join(row.values()) for row in rows)
            case tag if tag not in _LEFT_OUT:
                yield from _shapes(child)


def workbook(content: bytes) -> str:
    """The name of each sheet that has cells, and its rows."""
    import openpyxl

    book = openpyxl.load_workbook(io.BytesIO(content), read_only=True, data_only=True)
    texts: list[str] = []
    for sheet in book.worksheets:
        sheet.reset_dimensions()
        lines = [*sheet_lines([_value(cell) for cell in row] for row in sheet.iter_rows())]
        texts += ["\n".join([sheet.title, *lines])] if lines else []
    return BREAK.join(texts)


def _value(cell: Any) -> str:
    """The value of a cell as text: whole numbers, shares and dates as they are usually shown."""
    value = cell.value
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    if isinstance(value, int | float) and "%" in (cell.number_format or ""):
        return f"{value * 100:.10g}%"
    if isinstance(value, float):
        return f"{value:.15g}"
    return "" if value is None else str(value)

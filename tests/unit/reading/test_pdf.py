"""Pages of PDFs: forms and comments beside their labels, two columns, turned pages."""

from __future__ import annotations

import io
import zlib
from typing import Any

import pypdf
import pytest
from document_files import pdf_of
from pypdf.generic import ArrayObject, DictionaryObject, FloatObject, NameObject, TextStringObject

from sedem.reading.pdf import pages_of

LEFT = [f"Left line {n} has some words" for n in range(6)]
RIGHT = [f"Right line {n} has other words" for n in range(6)]


def page_of(drawn: str, *boxes: dict[str, Any], turned: int = 0) -> str:
    """The text of a page with annotations."""
    writer = pypdf.PdfWriter(io.BytesIO(pdf_of(["x"], zlib.compress(drawn.encode()))))
    page, file = writer.pages[0], io.BytesIO()
    for box in boxes:
        entries = {
            NameObject(name): ArrayObject(map(FloatObject, value))
            if isinstance(value, tuple)
            else NameObject(value) if value.startswith("/") else TextStringObject(value)
            for name, value in box.items()
        }  # fmt: skip
        given = page.setdefault(NameObject("/Annots"), ArrayObject())
        given.append(writer._add_object(DictionaryObject(entries)))
    page.rotate(turned)
    writer.write(file)
    [text] = pages_of(file.getvalue()) or ()
    return text.strip()


def shown(text: str, x: float, y: float) -> str:
    return f"BT /F1 10 Tf 1 0 0 1 {x} {y} Tm ({text}) Tj ET "


def field(y: float, value: str, kind: str = "/Tx", x: float = 150) -> dict[str, Any]:
    return {"/Subtype": "/Widget", "/FT": kind, "/V": value, "/Rect": (x, y - 3, x + 90, y + 12)}


def test_values_of_a_form_stand_beside_their_labels() -> None:
    drawn = shown("Name:", 50, 700) + shown("Rent:", 50, 670) + shown("Gas", 50, 640)
    fields = [field(670, "1,240"), field(700, "Ida Bauer"), field(640, "/Yes", "/Btn")]
    assert page_of(drawn, *fields).split("\n") == ["Name: Ida Bauer", "Rent: 1,240", "Gas \u2612"]
    two = "BT /F1 10 Tf 50 700 Td (Name:) Tj 200 0 Td (Rent:) Tj ET"
    text = page_of(two, field(700, "Ida", x=90), field(700, "1,240", x=290))
    assert text == "Name: Ida Rent: 1,240"
    ticks = shown("Yes", 70, 700) + shown("No", 170, 700)
    boxes = [field(700, "/Off", "/Btn", 50), field(700, "/On", "/Btn", 150)]
    assert page_of(ticks, *boxes).split() == ["\u2610", "Yes", "\u2612", "No"]
    assert page_of(drawn, field(670, "")) == "Name:\nRent:\nGas"


def test_comments_stand_beside_what_they_are_about() -> None:
    drawn = shown("Heating is extra.", 50, 700) + shown("The end.", 50, 600)
    for kind in ("/Text", "/FreeText", "/Highlight"):
        note = {"/Subtype": kind, "/Contents": "Ask first.", "/Rect": (200.0, 695.0, 220.0, 710.0)}
        assert page_of(drawn, note) == "Heating is extra. Ask first.\nThe end."
    link = {"/Subtype": "/Link", "/Contents": "Go", "/Rect": (50.0, 695.0, 90.0, 710.0)}
    assert page_of(drawn, link) == "Heating is extra.\nThe end."


LINES = [
    (left, right, 700 - 14 * n) for n, (left, right) in enumerate(zip(LEFT, RIGHT, strict=True))
]


@pytest.mark.parametrize(
    "drawn",
    [
        "".join(shown(a, 50, y) + shown(b, 300, y) for a, b, y in LINES),
        "BT /F1 10 Tf 50 700 Td "
        + " ".join(f"({a}) Tj 250 0 Td ({b}) Tj -250 -14 Td" for a, b, _ in LINES)
        + " ET",
        "".join(shown(a, 50, y) for a, _, y in LINES)
        + "".join(shown(b, 300, y) for _, b, y in LINES),
    ],
)
def test_two_columns_are_read_one_after_the_other(drawn: str) -> None:
    head = shown("A headline that goes across both of the columns of this page, all of it", 50, 750)
    lines = page_of(head + drawn).split("\n")
    assert lines[0].startswith("A headline") and lines[1:] == [*LEFT, *RIGHT]


def test_rows_of_a_table_stay_rows() -> None:
    drawn = "".join(
        shown(f"Name {n}", 50, y) + shown(f"{n}", 300, y) for n, (_, _, y) in enumerate(LINES)
    )
    assert "Name 3" in page_of(drawn).split("\n3")[0] and page_of(drawn).index("Name 1") > 3


@pytest.mark.parametrize("turned", [90, 180, 270])
def test_a_turned_page_is_read_line_by_line(turned: int) -> None:
    drawn = "".join(shown(a, 50, y) for a, _, y in LINES)
    assert page_of(drawn, turned=turned).split("\n") == LEFT

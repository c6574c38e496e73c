"""Extracts the text of the pages of a PDF, with what stands in its forms and its comments."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import hypot
from typing import Any, NamedTuple

ROWS = 4
"""Least lines that stand beside each other in two columns of a page."""
ALIGNED = 0.8
"""Least share of such lines whose right part begins where the right column does."""
LENGTH = 20
"""Least average characters of such lines; the cells of tables are shorter."""
NEAR = 3.0
"""Points that a line may lie beside another one and still be the same one."""
LETTER = 0.5
"""About the width of a letter, as a share of the size of its font."""
WIDE = 0.8
"""A line goes across both columns if this share of its width reaches into the right one."""
SHOWING = (b"Tj", b"TJ", b"'", b'"')
"""Operators that draw text."""
TICKED, UNTICKED = "\u2612", "\u2610"

_LEFT_OUT = ("/Link", "/Popup")


class Piece(NamedTuple):
    """A piece of the text of a page: where it is on the page as it is shown, and about how wide."""

    text: str
    x: float
    y: float
    width: float


class FormEntry(NamedTuple):
    """What somebody has written into a field or as a comment, and where its box is."""

    text: str
    left: float
    low: float
    high: float


def pages_of(content: bytes) -> Iterator[str] | None:
    """Return the texts of the pages of a PDF; None if it needs a password."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(content))
    # If only printing is forbidden, the password is empty.
    if reader.is_encrypted and not reader.decrypt(""):
        return None
    return map(_page, reader.pages)


def _page(page: Any) -> str:
    shown: list[tuple[float, float]] = []

    def see(operator: bytes, _: object, matrix: Any, text_matrix: Any) -> None:
        if operator in SHOWING:
            shown.append(_place(page, matrix, text_matrix))

    text = page.extract_text(visitor_operand_before=see)
    entries, middle = [*_entries(page)], _middle(shown)
    if not entries and middle is None:
        return text
    pieces = _pieces(page)
    if "".join(piece.text for piece in pieces) != text:
        return "\n".join([text, *(entry.text for entry in entries)])
    pieces = _with_entries(pieces, entries)
    ordered = None if middle is None else _by_columns(pieces, middle)
    return ordered or "".join(piece.text for piece in pieces)


def _pieces(page: Any) -> list[Piece]:
    """The text of a page in as many pieces as the page draws."""
    from pypdf.generic import NameObject

    def take(text: str, matrix: Any, text_matrix: Any, _: object, size: float) -> None:
        scale = hypot(*matrix[:2]) * hypot(*text_matrix[:2])
        width = len(text.strip()) * size * scale * LETTER
        pieces.append(Piece(text, *_place(page, matrix, text_matrix), width))

    pieces: list[Piece] = []
    if (content := page.get_contents()) is not None:
        drawn = []
        for operands, operator in content.operations:
            # After a change of the matrix, even one that changes nothing, a new piece begins.
            drawn += [([1, 0, 0, 1, 0, 0], b"cm")] if operator in SHOWING else []
            drawn.append((operands, operator))
        content.operations = drawn
        page[NameObject("/Contents")] = content
        page.extract_text(visitor_text=take)
    return pieces


def _place(page: Any, matrix: Sequence[float], text_matrix: Sequence[float]) -> tuple[float, float]:
    """Where text begins on a page as it is shown."""
    a, b = text_matrix[4:6]
    x, y = (a * matrix[n] + b * matrix[n + 2] + matrix[n + 4] for n in (0, 1))
    return _turned(x, y, page.rotation)


def _turned(x: float, y: float, rotation: int) -> tuple[float, float]:
    """Where a point of a page is once the page is turned."""
    turns = {90: (y, -x), 180: (-x, -y), 270: (-y, x)}
    return turns.get(rotation % 360, (x, y))


# Columns


def _middle(shown: Iterable[tuple[float, float]]) -> float | None:
    """Where the right one of two columns begins, if their lines are drawn side by side."""
    lines: list[tuple[float, list[float]]] = []
    for x, y in shown:
        if not lines or abs(y - lines[-1][0]) >= NEAR:
            lines.append((y, []))
        lines[-1][1].append(x)
    starts = Counter(round(x / NEAR) for _, line in lines for x in line[1:])
    middle = max(starts, key=lambda place: starts[place], default=0) * NEAR - NEAR
    rows = [line for _, line in lines if line[0] < middle <= max(line)]
    aligned = sum(any(0 <= x - middle < 2 * NEAR for x in line) for line in rows)
    return middle if aligned >= max(ROWS, ALIGNED * len(rows)) else None


def _by_columns(pieces: Sequence[Piece], middle: float) -> str | None:
    """The lines of two columns, the left one first; None if a page has no two columns.

    A line across both columns stands between what is above and what is below it.
    """
    lines: list[list[Piece]] = []
    for piece in pieces:
        if lines and (not piece.text.strip() or abs(piece.y - lines[-1][0].y) < NEAR):
            lines[-1].append(piece)
        elif piece.text.strip():
            lines.append([piece])
    sides = [
        ([one for one in line if one.x < middle], [one for one in line if one.x >= middle])
        for line in lines
    ]
    rows = [(_joined(left), _joined(right)) for left, right in sides if left and right]
    if any(sum(map(len, side)) < LENGTH * len(rows) for side in zip(*rows, strict=True)):
        return None
    done: list[str] = []
    columns: tuple[list[str], list[str]] = ([], [])
    for left, right in sides:
        if not right and max(one.x + one.width * WIDE for one in left) > middle:
            done += *columns[0], *columns[1], _joined(left)
            columns = ([], [])
            continue
        for column, side in zip(columns, (left, right), strict=True):
            column += [_joined(side)] if side else []
    return "\n".join([*done, *columns[0], *columns[1]])


def _joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces).strip()


# Forms and comments


def _entries(page: Any) -> Iterator[FormEntry]:
    """What is written into the fields of a page, and the comments on it."""
    for reference in page.get("/Annots") or ():
        one = reference.get_object()
        if one.get("/Subtype") in _LEFT_OUT or "/Rect" not in one:
            continue
        value = one.get("/Contents")
        if one.get("/Subtype") == "/Widget":
            kind, value = _inherited(one, "/FT"), _inherited(one, "/V")
            if kind == "/Btn":
                pushed = int(_inherited(one, "/Ff") or 0) & 2**16
                ticked = one.get("/AS", value) not in (None, "/Off")
                value = None if pushed else TICKED if ticked else UNTICKED
            elif kind not in ("/Tx", "/Ch"):
                value = None
            elif isinstance(value, list):
                value = ", ".join(map(str, value))
        text = " ".join(str(value or "").split())
        if text:
            x0, y0, x1, y1 = map(float, one["/Rect"])
            (left, low), (right, high) = (
                _turned(*at, page.rotation) for at in ((x0, y0), (x1, y1))
            )
            yield FormEntry(text, min(left, right), min(low, high), max(low, high))


def _inherited(field: Any, name: str) -> Any:
    """A property of a field, or of the fields that it belongs to."""
    for _ in range(8):
        if name in field:
            return field[name]
        if "/Parent" not in field:
            break
        field = field["/Parent"].get_object()
    return None


def _with_entries(pieces: Sequence[Piece], entries: Sequence[FormEntry]) -> list[Piece]:
    """The pieces of a page with each entry behind the piece that it stands beside, or below."""
    after: dict[int, list[FormEntry]] = {}
    before: dict[int, list[FormEntry]] = {}
    for entry in sorted(entries, key=lambda one: one.left):
        beside = [
            (abs(piece.x - entry.left), number)
            for number, piece in enumerate(pieces)
            if piece.text.strip() and entry.low - NEAR <= piece.y <= entry.high + NEAR
        ]
        lefts = [one for one in beside if pieces[one[1]].x <= entry.left]
        rights = [one for one in beside if pieces[one[1]].x > entry.left]
        is_box = entry.text in (TICKED, UNTICKED)
        if rights and (not lefts or (is_box and min(rights) < min(lefts))):
            before.setdefault(min(rights)[1], []).append(entry)
            continue
        above = [
            (piece.y - entry.high, number)
            for number, piece in enumerate(pieces)
            if piece.text.strip() and piece.y > entry.high
        ]
        place = min(lefts or above, default=(0.0, len(pieces) - 1))[1]
        after.setdefault(place, []).append(entry)
    done: list[Piece] = []
    for number, piece in enumerate(pieces):
        kept = piece.text.rstrip()
        first = "".join(f"{entry.text} " for entry in before.get(number, ()))
        last = "".join(f" {entry.text}" for entry in after.get(number, ()))
        done.append(piece._replace(text=first + kept + last + piece.text[len(kept) :]))
    return done

"""Tables as lines of text that carry their header to every cell: "Name: Ida | Rent: 1,240"."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

Row = dict[int, str]
"""The texts of a row by the number of their column; cells that span others are named once."""

CELL = " | "
"""Separator of cells that carry their header."""
SNIFFED = 2**14
"""Characters of a file that tell its delimiter."""

_VALUE = re.compile(r"[^\w]*\d")
_YEAR = re.compile(r"(19|20)\d\d")
_RULE = re.compile(r" {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*")
_FENCE = re.compile(r" {0,3}(```|~~~)")
_BAR = re.compile(r"(?<!\\)\|")


def table_lines(
    rows: Sequence[Row], *, header: bool | None = None, names: Row | None = None
) -> list[str] | None:
    """Return the lines of a table, the first one its header; None if it has no header.

    Args:
        header: whether the first row is a header; None decides by its cells: no value may be among
            them, and it must be plain that the rows below are others.
        names: the names of columns, if cells of the header span several.
    """
    if header is False or (header is None and not _is_header(rows)):
        return None
    names = names or rows[0]
    lines = [CELL.join(filter(None, rows[0].values()))]
    for row in rows[1:]:
        cells = (
            f"{name}: {text}" if (name := names.get(column, "").rstrip(":")) else text
            for column, text in row.items()
            if text
        )
        lines.append(CELL.join(cells))
    return lines


def _is_header(rows: Sequence[Row]) -> bool:
    """Whether the first row of a table names its columns.

    In a table of two columns the first row may also be a name and its value, so all of the second
    column must be values.
    """
    if len(rows) < 2 or len(rows[0]) < 2:
        return False
    corner, *names = rows[0].values()
    if not all(names) or (corner and not _are_names([corner, *names])):
        return False
    if len(names) > 1:
        return len({corner, *names}) == len(names) + 1
    values = [row[column] for row in rows[1:] for column in (max(rows[0]),) if row.get(column)]
    return len(rows) > 2 and bool(values) and all(map(_VALUE.match, values))


def _are_names(cells: Sequence[str]) -> bool:
    """Whether cells may name columns: no value is among them, or all but the first are years."""
    return not any(map(_VALUE.match, cells)) or (
        len(cells) > 2 and all(map(_YEAR.fullmatch, cells[1:])) and not _VALUE.match(cells[0])
    )


def sheet_lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a sheet or of a CSV file; empty rows separate tables.

    The first row with several cells is a header, unless a value is among them.
    """
    filled = ({n: " ".join(text.split()) for n, text in enumerate(row)} for row in rows)
    first = True
    for empty, group in groupby(filled, lambda row: not any(row.values())):
        if empty:
            continue
        if not first:
            yield ""
        first = False
        table = list(group)
        wide = max(sum(map(bool, row.values())) for row in table) > 1
        while wide and sum(map(bool, table[0].values())) == 1:
            yield "".join(table.pop(0).values())  # a title
        named = wide and len(table) > 1 and _are_names([*table[0].values()])
        lines = table_lines(table, header=named)
        yield from lines or ("\t".join(row.values()).strip("\t") for row in table)


def csv_lines(text: str, tabs: bool) -> Iterator[str]:
    """The lines of a table whose cells are separated by commas, semicolons, bars or tabs."""
    try:
        delimiter = csv.Sniffer().sniff(text[:SNIFFED], ",;|\t").delimiter
    except csv.Error:
        delimiter = ","
    csv.field_size_limit(len(text) + 1)
    lines = text.splitlines(keepends=True)
    return sheet_lines(csv.reader(lines, delimiter="\t" if tabs else delimiter))


def markdown_tables(text: str) -> str:
    """Return a text of Markdown in which the rows of tables carry their header."""
    lines = text.splitlines(keepends=True)
    done: list[str] = []
    fence, at = "", 0
    while at < len(lines):
        mark = _FENCE.match(lines[at])
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        header, rule = lines[at], lines[at + 1].rstrip("\r\n") if at + 1 < len(lines) else ""
        is_table = not fence and "|" in header and "-" in rule and _RULE.fullmatch(rule)
        if not is_table or len(_cells(rule)) != len(_cells(header)):
            done.append(lines[at])
            at += 1
            continue
        end = at + 2
        while end < len(lines) and "|" in lines[end]:
            end += 1
        kept = [lines[at], *lines[at + 2 : end]]
        rows = table_lines([_cells(line) for line in kept], header=True) or []
        done += (
            row + line[len(line.rstrip("\r\n")) :] for row, line in zip(rows, kept, strict=True)
        )
        at = end
    return "".join(done)


def _cells(line: str) -> Row:
    inner = line.strip().removeprefix("|")
    inner = inner[:-1] if inner.endswith("|") and not inner.endswith("\\|") else inner
    return {n: cell.strip().replace("\\|", "|") for n, cell in enumerate(_BAR.split(inner))}

"""Pages that show studies: the text between two marks is written from the committed results.

A block begins with `<!-- study NAME -->` for the nano scale, or with `<!-- study NAME SCALE -->`.
It ends with `<!-- end -->`. `<!-- study NAME: table 2, rows 1 5, columns 1 3 -->` shows one table
of the study, and of it the given rows and columns, counted from 1. A link to `SCALE-NAME.svg` is
the picture of a study.
"""

from __future__ import annotations

import re
from pathlib import Path

from experiments import (
    ablations,
    controls,
    costs,
    plan,
    quality,
    selection,
    shipped,
    speed,
)
from experiments.system.scales import ROOT, SCALES, SHIPPED, Scale
from experiments.system.tables import Study

MODULES = (
    quality, controls, selection, ablations, costs, shipped, speed, plan
)  # fmt: skip
STUDIES = {
    name: one for module in MODULES for name, one in vars(module).items() if isinstance(one, Study)
}
"""Every study by name."""

CARD = SHIPPED / "README.md"
REAL_CARD = SHIPPED.with_name("sedem-smol") / "README.md"
RESULTS = ROOT / "experiments" / "results-nano.md"
PERFORMANCE = ROOT / "experiments" / "performance.md"
_SITE = tuple(
    ROOT / "docs" / f"{name}.md"
    for name in ("results-smol", "results-nano", "performance", "scale", "agents")
)
PAGES = (ROOT / "README.md", REAL_CARD, CARD, RESULTS, PERFORMANCE, *_SITE)

_BLOCK = re.compile(
    r"(?P<mark><!-- study (?P<name>\w+)(?: (?P<scale>\w+))?(?:: (?P<part>[\w ,]+?))? -->)\n"
    r".*?<!-- end -->",
    re.DOTALL,
)
_PICTURE = re.compile(rf"\]\((?P<path>[\w/.-]*?(?P<scale>{'|'.join(SCALES)})-(?P<name>\w+)\.svg)\)")


def rendered(text: str) -> str:
    """A page with every block updated."""

    def renewed(block: re.Match[str]) -> str:
        shown = STUDIES[block["name"]].markdown(SCALES[block["scale"] or "nano"])
        if block["part"]:
            shown = _part(shown, block["part"])
        return f"{block['mark']}\n{shown}\n<!-- end -->"

    return _BLOCK.sub(renewed, text)


def _part(shown: str, part: str) -> str:
    """One table of a study, or some of its rows and columns."""
    chosen = {key: [int(n) for n in numbers] for key, *numbers in map(str.split, part.split(","))}
    table = re.findall(r"(?:^\|.*\n?)+", shown, re.MULTILINE)[chosen.get("table", [1])[0] - 1]
    head, rule, *rows = [line.strip("|\n").split("|") for line in table.splitlines()]
    rows = [rows[number - 1] for number in chosen.get("rows", range(1, len(rows) + 1))]
    columns = [0, *chosen.get("columns", range(1, len(head)))]
    return "\n".join(f"|{'|'.join(line[i] for i in columns)}|" for line in (head, rule, *rows))


def studies_of(text: str) -> list[str]:
    """Names of the studies that a page shows."""
    return [block["name"] for block in _BLOCK.finditer(text)]


def pictures_of(text: str) -> list[tuple[str, str, str]]:
    """Path, study and scale of every picture that a page links to."""
    return [(link["path"], link["name"], link["scale"]) for link in _PICTURE.finditer(text)]


def write_tables(scale: Scale) -> Path:
    """Write the tables of every study of a scale to one page beside its runs."""
    shown = [f"# Tables, {scale.name} scale"]
    if scale.stand_in:
        shown.append(
            "Measured on stand-ins: tiny random backbones and made records. They mean nothing."
        )
    for one in STUDIES.values():
        if one.numbers(scale):
            shown += [f"## {one.title}", *filter(None, [one.note]), one.table(scale)]
    path = scale.runs / "tables.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    return path


def write(path: Path) -> None:
    """Update the blocks of a page and draw its pictures."""
    text = rendered(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    for picture, name, scale in pictures_of(text):
        STUDIES[name].plot(SCALES[scale], path.parent / picture)

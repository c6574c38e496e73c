"""Pages that show studies: the text between two marks is written from the committed results.

A block begins with `<!-- study NAME -->` for the nano scale, or with `<!-- study NAME SCALE -->`.
It ends with `<!-- end -->`. A link to `SCALE-NAME.svg` is the picture of a study.
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
    training,
)
from experiments.system.scales import ROOT, SCALES, SHIPPED
from experiments.system.tables import Study

MODULES = (quality, controls, selection, ablations, training, costs, shipped, speed, plan)
STUDIES = {
    name: one for module in MODULES for name, one in vars(module).items() if isinstance(one, Study)
}
"""Every study by name."""

CARD = SHIPPED / "README.md"
RESULTS = ROOT / "docs" / "results-nano.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    CARD,
    RESULTS,
    PERFORMANCE,
    ROOT / "docs" / "scale.md",
)

_BLOCK = re.compile(
    r"(?P<mark><!-- study (?P<name>\w+)(?: (?P<scale>\w+))? -->)\n.*?<!-- end -->", re.DOTALL
)
_PICTURE = re.compile(rf"\]\((?P<path>[\w/.-]*?(?P<scale>{'|'.join(SCALES)})-(?P<name>\w+)\.svg)\)")


def rendered(text: str) -> str:
    """A page with every block updated."""

    def renewed(block: re.Match[str]) -> str:
        shown = STUDIES[block["name"]].markdown(SCALES[block["scale"] or "nano"])
        return f"{block['mark']}\n{shown}\n<!-- end -->"

    return _BLOCK.sub(renewed, text)


def studies_of(text: str) -> list[str]:
    """Names of the studies that a page shows."""
    return [block["name"] for block in _BLOCK.finditer(text)]


def pictures_of(text: str) -> list[tuple[str, str, str]]:
    """Path, study and scale of every picture that a page links to."""
    return [(link["path"], link["name"], link["scale"]) for link in _PICTURE.finditer(text)]


def write(path: Path) -> None:
    """Update the blocks of a page and draw its pictures."""
    text = rendered(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    for picture, name, scale in pictures_of(text):
        STUDIES[name].plot(SCALES[scale], path.parent / picture)

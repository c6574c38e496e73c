"""Figures saved as small files, with one setup, so that equal figures give equal files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

_PLACES = re.compile(r' (?:x|y|d|transform)="[^"]*"')
_IDLE = re.compile(r' transform="rotate\(-?0 [^"]*"| id="[a-z0-9.]+_\d+"')
"""Rotations by 0, and ids of parts that nothing refers to."""
_STYLE = re.compile(r' style="([^"]*)"')
_DIGITS = re.compile(r"(\.\d)\d+")
_GROUP = re.compile(r"<g[ >].*?\n|</g>\n")

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
"""Without any of them, an SVG has no metadata block, which is half a kilobyte."""


def pyplot_module() -> Any:
    """Return matplotlib's pyplot, set up to draw into files."""
    import matplotlib

    matplotlib.use("agg")
    # Ids inside an SVG are derived from this instead of being random.
    matplotlib.rcParams["svg.hashsalt"] = "sedem"
    # Text stays text: it can be searched and read aloud, and the file is half as large.
    matplotlib.rcParams["svg.fonttype"] = "none"
    # Every text element lists its fonts.
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure without its date and creator, and close it."""
    from matplotlib.layout_engine import PlaceHolderLayoutEngine

    is_svg = path.suffix == ".svg"
    # A finished layout would make savefig draw the figure twice, once for nothing.
    if isinstance(figure.get_layout_engine(), PlaceHolderLayoutEngine):
        figure.set_layout_engine(None)
    figure.savefig(path, metadata=_NO_METADATA if is_svg else None, dpi=130)
    pyplot_module().close(figure)
    if is_svg:
        lines = map(str.lstrip, path.read_text("utf-8").splitlines(keepends=True))
        picture = _IDLE.sub("", _PLACES.sub(_rounded, "".join(lines)))
        picture = picture.replace(" \nL ", "L")  # line commands need no line of their own
        path.write_text(_with_classes(_without_plain_groups(picture)), "utf-8")


def _with_classes(picture: str) -> str:
    """Replace repeated styles by named classes; they are a third of a file."""
    counts = Counter(_STYLE.findall(picture))
    repeated = [style for style, count in counts.items() if count > 1]
    names = {style: f"s{number}" for number, style in enumerate(repeated)}
    rules = "".join(f".{name}{{{style}}}" for style, name in names.items())

    def named(style: re.Match[str]) -> str:
        return f' class="{names[style[1]]}"' if style[1] in names else style[0]

    return _STYLE.sub(named, picture).replace("</style>", f"{rules}</style>", 1)


def _without_plain_groups(picture: str) -> str:
    """Remove groups without attributes, which change nothing; they are a tenth of a file."""
    open_groups: list[str] = []

    def kept(tag: re.Match[str]) -> str:
        if tag[0].startswith("<g"):
            open_groups.append(tag[0])
            return "" if tag[0] == "<g>\n" else tag[0]
        return "" if open_groups.pop() == "<g>\n" else tag[0]

    return _GROUP.sub(kept, picture)


def _rounded(place: re.Match[str]) -> str:
    """Round coordinates to tenths of a point; six digits are a fifth of a file."""
    return _DIGITS.sub(r"\1", place[0])

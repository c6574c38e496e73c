"""Pictures in files: set up once, so that equal pictures are equal files, and small ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PLACES = re.compile(r' (?:x|y|d|transform)="[^"]*"')
_DIGITS = re.compile(r"(\.\d)\d+")


def pyplot_module() -> Any:
    """Return matplotlib's pyplot, set up to draw into files."""
    import matplotlib

    matplotlib.use("agg")
    # Names inside an SVG are made from this and not at random.
    matplotlib.rcParams["svg.hashsalt"] = "sedem"
    # Words stay words: they can be searched and read aloud, and the file is half as large.
    matplotlib.rcParams["svg.fonttype"] = "none"
    # Every word names its fonts.
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure without its date, and close it.

    Args:
        figure: from `pyplot_module`.
        path: the file; its ending sets the format.
    """
    is_svg = path.suffix == ".svg"
    figure.savefig(path, metadata={"Date": None} if is_svg else None, dpi=130)
    pyplot_module().close(figure)
    if is_svg:
        lines = map(str.lstrip, path.read_text("utf-8").splitlines(keepends=True))
        path.write_text(_PLACES.sub(_rounded, "".join(lines)), "utf-8")


def _rounded(place: re.Match[str]) -> str:
    """A place in tenths of a point; six digits are a fifth of a file."""
    return _DIGITS.sub(r"\1", place[0])

"""Pictures in files: set up once, so that equal pictures are equal files, and small ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot_module() -> Any:
    """Return matplotlib's pyplot, set up to draw into files."""
    import matplotlib

    matplotlib.use("agg")
    # Names inside an SVG are made from this and not at random.
    matplotlib.rcParams["svg.hashsalt"] = "sedem"
    # Words stay words: they can be searched and read aloud, and the file is half as large.
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure without its date, and close it.

    Args:
        figure: from `pyplot_module`.
        path: the file; its ending sets the format.
    """
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    pyplot_module().close(figure)

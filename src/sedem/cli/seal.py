"""The command `sedem seal`: the manifest of a checkpoint that was changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sedem.cli.output import write


def seal(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Its folder.")],
) -> None:
    """Accept the files of a checkpoint as they are.

    Their sizes and hashes are written to its manifest, against which every opening checks them.
    Do this after a change by hand, and to a checkpoint that has no manifest.
    """
    from sedem.checkpoint.folder import seal
    from sedem.checkpoint.manifest import MANIFEST

    seal(checkpoint)
    write(f"{checkpoint / MANIFEST}: written")

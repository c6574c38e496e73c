"""The command `sedem push`: share a checkpoint on the hub."""

from __future__ import annotations

from typing import Annotated

import typer

from sedem.cli.output import write


def push(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder, such as runs/mine/final.")
    ],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="As OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    with_backbone: Annotated[
        bool,
        typer.Option("--with-backbone", help="Include a backbone that is a local folder."),
    ] = False,
) -> None:
    """Upload a checkpoint to the Hugging Face hub, with a model card.

    The card tells the budget, data and scores of its training. A card already in the folder or
    repository is kept.
    """
    from sedem.checkpoint.folder import locate
    from sedem.checkpoint.hub import push_folder

    folder = locate(checkpoint)
    write(push_folder(folder, repository, private=private, with_backbone=with_backbone))

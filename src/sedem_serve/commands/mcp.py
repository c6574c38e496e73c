"""The command `sedem mcp`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sedem.cli.options import (
    EngineOption,
    Model,
    ReaderModelOption,
    ReaderOption,
    reader_at,
)
from sedem.config import DEFAULT_MODEL, FOLDER_BANKS
from sedem.errors import ConfigError

if TYPE_CHECKING:
    from sedem.model import SeDeM


def mcp(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="BANK|FOLDER",
            help="Banks, and folders of documents, which are read in the background.",
        ),
    ],
    write: Annotated[
        bool,
        typer.Option("--write", help="Let the agent keep notes: the tools remember and forget."),
    ] = False,
    model: Model = None,
    home: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the banks of folders are kept.")
    ] = FOLDER_BANKS,
    engine: EngineOption = "auto",
    reader: ReaderOption = None,
    reader_model: ReaderModelOption = None,
) -> None:
    """Serve banks as tools to an agent, over the Model Context Protocol on stdin and stdout.

    The tools search, read and quote documents, and answer from them. A client such as Claude,
    Cursor or VS Code starts this command itself. Files of a folder are never changed; notes are
    kept in the bank, or for a folder in its bank under --home.
    """
    if find_spec("mcp") is None:
        raise ConfigError("`sedem mcp` needs the package mcp; run pip install 'sedem[tools]'")
    from sedem.reading.followed import FollowedBank
    from sedem.reading.places import banks_at
    from sedem_serve.tools.mcp import LocalBackend, ToolServer

    banks = banks_at(places, home, model or DEFAULT_MODEL)

    def opened() -> SeDeM:
        from sedem.checkpoint.folder import model_of
        from sedem.model import SeDeM

        built = all(not isinstance(bank, FollowedBank) for bank in banks)
        name = model or (model_of(places[0]) if built else DEFAULT_MODEL)
        return SeDeM.from_pretrained(name, engine=engine)

    own = reader_at(reader, reader_model)
    backend = LocalBackend(banks, opened, writable=write, reader=own)
    ToolServer(backend, backend.lifespan).run("stdio")
    # A host waits two seconds. What still runs has committed or will be read again.
    sys.stdout.flush()
    os._exit(0)

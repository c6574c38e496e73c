"""Options that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sedem.errors import ConfigError

OPENING = ("records", "revision", "schema", "source", "split", "streaming")
"""What says which set is opened, and so is no option of its reader."""

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Checkpoint: a folder or a hub id. [default: sedem-nano]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
BudgetOption = Annotated[
    str | None,
    typer.Option("-k", help="Blocks to use: a number, or 'all'. [default: the model's own]"),
]
EngineOption = Annotated[
    str, typer.Option("--engine", help="What runs the model: auto, eager, static or graphs.")
]
OptionEntries = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="An option of the set, such as length=4096.",
    ),
]


def budget(text: str | None) -> int | str | None:
    """What -k says as a selection budget.

    Raises:
        ConfigError: it is neither a number nor "all".
    """
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        message = f"k is '{text}'; it must be a whole number of at least 1, or 'all'"
        raise ConfigError(message) from None


def parse_options(entries: Sequence[str] | None) -> dict[str, Any]:
    """KEY=VALUE entries as options of a set; values are JSON (a number, true), or else text.

    Raises:
        ConfigError: an entry has no key or no value, or its key is no option of a set.
    """
    options: dict[str, Any] = {}
    for entry in entries or ():
        key, equals, text = entry.partition("=")
        if not key or not equals:
            raise ConfigError(f"option '{entry}' is not of the form KEY=VALUE")
        if key in OPENING:
            raise ConfigError(
                f"option '{key}' is none of a set's; schema, records and split have their own flags"
            )
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options

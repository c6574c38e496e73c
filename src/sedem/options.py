"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from sedem.errors import ConfigError

DEFAULT_MODEL = "sedem-nano"

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Checkpoint: a folder or a hub id. [default: sedem-nano]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
BudgetOption = Annotated[
    str | None,
    typer.Option("-k", help="Blocks to use: a number, or 'all'. [default: the model's own]"),
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

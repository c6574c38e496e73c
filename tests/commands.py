"""The command line, run in the process of a test."""

from __future__ import annotations

import json
import re
from typing import Any

from typer.testing import CliRunner, Result

from sedem.cli.main import app


def sedem(*arguments: object, stdin: str | None = None, color: bool = False) -> Result:
    """Run a command; re-raise an error that it does not handle.

    Args:
        color: click takes escapes out of the output otherwise.
    """
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, input=stdin, color=color)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def succeeds(*arguments: object, stdin: str | None = None) -> str:
    """Run a command that must succeed, and return its stdout."""
    result = sedem(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def prints_json(*arguments: object, stdin: str | None = None) -> Any:
    """Run a command that prints one JSON value and nothing else, and return the value."""
    return json.loads(succeeds(*arguments, stdin=stdin))


def error_of(*arguments: object, stdin: str | None = None) -> str:
    """Return the sentence of a command that exits with 1, one line on stderr and no stdout."""
    result = sedem(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return str(line).removeprefix("error: ")


def refused(*arguments: object, words: str) -> None:
    """Check the sentence of a command that fails; `words` is a pattern."""
    sentence = error_of(*arguments)
    assert re.search(words, sentence), sentence

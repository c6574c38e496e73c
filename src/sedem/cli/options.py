"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sedem.cli.output import note
from sedem.config import DEFAULT_MODEL
from sedem.errors import ConfigError
from sedem.untrusted import parse_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from sedem.endpoint import Reader

AS_TEXT, RESERVED = ("records", "split"), ("revision", "schema", "source", "streaming")
"""Options of data that are text, such as "5"; and names that are no options of data."""

BankPlace = Annotated[
    str,
    typer.Argument(metavar="BANK", help="File of the bank, or a place such as s3://BUCKET/NAME."),
]
AskedPlace = Annotated[
    str,
    typer.Argument(
        metavar="BANK|FOLDER",
        help="File of the bank, a place such as s3://BUCKET/NAME, or a folder of documents.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help=f"Folder, GGUF file or hub id. [default: {DEFAULT_MODEL}]",
    ),
]
BackboneName = Annotated[
    str,
    typer.Argument(
        metavar="BACKBONE",
        help="Folder, GGUF file or hub id; ollama:NAME is a model that Ollama has here.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="N|all|auto",
        help="Blocks to use; auto takes as many as a question needs. [default: the model's own]",
    ),
]
ConditionOption = Annotated[
    str | None,
    typer.Option(
        "--condition",
        metavar="NAME",
        help="How blocks are read: memory, text or both. [default: the model's own]",
    ),
]
SelectionOption = Annotated[
    str | None,
    typer.Option(
        "--selection",
        metavar="NAME",
        help="What blocks are selected by: states, words or both. [default: the model's own]",
    ),
]
HopsOption = Annotated[
    str | None,
    typer.Option(
        "--hops",
        metavar="1|2|auto",
        help="2 selects again by what the best block says; auto does so if that leaves something "
        "open. [default: the model's own]",
    ),
]
AnswerOption = Annotated[
    str | None,
    typer.Option(
        "--answer",
        metavar="NAME",
        help="free decodes any words, span quotes the documents, auto quotes them unless the "
        "question needs other words. [default: the model's own]",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="What runs the model: auto, eager, static, graphs, or int8 for faster tokens on a "
        "CPU: decoding steps run with int8 matrices.",
    ),
]
ReaderOption = Annotated[
    str | None,
    typer.Option(
        "--reader",
        metavar="URL",
        envvar="SEDEM_READER",
        help="Let your own model write the answer from the passages that are found: the address "
        "of Ollama, LM Studio, llama.cpp, vLLM or another OpenAI API, such as "
        "http://127.0.0.1:11434/v1. Its key, if any, is in SEDEM_READER_KEY.",
    ),
]
ReaderModelOption = Annotated[
    str | None,
    typer.Option(
        "--reader-model",
        metavar="NAME",
        envvar="SEDEM_READER_MODEL",
        help="Name of that model at its server, such as qwen3:4b. [default: the only one]",
    ),
]
OptionEntries = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="How data is read: split=train, records=:1000, or an option of the set, such as "
        "length=4096; repeatable.",
    ),
]


def reader_at(url: str | None, name: str | None) -> Reader | None:
    """Return the reader of two options, and say if passages leave the machine; None without one."""
    if url is None:
        if name is not None:
            raise ConfigError("--reader-model names a model of --reader; give its address")
        return None
    from sedem.endpoint import Reader

    reader = Reader(url, name)
    if not reader.is_local:
        note(f"questions and the passages found for them are sent to {reader.host}")
    return reader


def option_of(settings: type[BaseModel], name: str, metavar: str | None = None, *flags: str) -> Any:
    """Return the option of a setting, whose help is its description."""
    return typer.Option(*flags, metavar=metavar, help=settings.model_fields[name].description)


def parse_entries(entries: Sequence[str] | None, text: Sequence[str] = ()) -> dict[str, Any]:
    """Parse KEY=VALUE entries; a value that is JSON, such as 4096 or true, is read as JSON.

    Args:
        text: keys whose values are text, whatever they look like.

    Raises:
        ConfigError: an entry is not KEY=VALUE.
    """
    found: dict[str, Any] = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        if not key or not equals:
            raise ConfigError(f"option '{entry}' is not of the form KEY=VALUE")
        found[key] = value
        if key not in text:
            with suppress(ConfigError):
                found[key] = parse_json(value, f"option '{key}'", ConfigError)
    return found


def data_options(entries: Sequence[str] | None) -> dict[str, Any]:
    """Parse the entries of --option.

    Raises:
        ConfigError: an entry is not KEY=VALUE, or its key is no option of data.
    """
    found = parse_entries(entries, AS_TEXT)
    for name in found:
        if name in RESERVED:
            raise ConfigError(f"'{name}' is not an option of the data; a schema is --schema NAME")
    return found


def settings_of(entries: Sequence[str] | None, what: str, known: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE entries, each of which is one of the known.

    Raises:
        ConfigError: an entry is not KEY=VALUE, or its key is not known.
    """
    found = parse_entries(entries)
    for name in found:
        if name not in known:
            raise ConfigError(f"'{name}' is not a {what}; give one of {', '.join(known)}")
    return found

"""Opening a set of examples: by the name of its schema, or by looking into the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from sedem.data import cloze, facts, multihop, own, qasper, squad
from sedem.data.examples import ExampleSet
from sedem.data.files import open_text
from sedem.errors import ConfigError, DataError

Loader = Callable[..., ExampleSet]

SETS: dict[str, Loader] = {
    "own": own.load,
    "squad": squad.load,
    "covidqa": squad.load_papers,
    "hotpotqa": multihop.load_hotpot,
    "2wikimultihopqa": multihop.load_2wiki,
    "musique": multihop.load_musique,
    "qasper": qasper.load,
    "exact-facts": facts.load,
    "cloze": cloze.load,
}

LOOKED_AT = 200_000
"""Characters that are enough to tell the schemas apart."""


def open_examples(
    path: Path, schema: str | None = None, *, records: str | None = None, **options: Any
) -> ExampleSet:
    """Read a file of examples.

    Args:
        path: the file.
        schema: one of `SETS`; None means that it is found out.
        records: "start:stop" of the file's records (articles of SQuAD, papers of COVID-QA, else
            questions); None means all.
        options: of the schema's loader.

    Raises:
        DataError: the file cannot be read or its schema is not known.
        ConfigError: the schema, the records or an option is not known.
    """
    name = schema or sniff(path)
    if name not in SETS:
        raise ConfigError(f"there is no schema '{name}'; known are {', '.join(SETS)}")
    load = SETS[name]
    try:
        signature(load).bind(path, **options)
    except TypeError as error:
        raise ConfigError(f"'{path}' as {name}: {error}") from None
    try:
        return load(path, records=parse_records(records), **options)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"'{path}' is not in the schema of {name}: {error!r}") from None


def sniff(path: Path) -> str:
    """The schema of a file, from the fields near its beginning.

    Raises:
        DataError: none is recognised.
    """
    with open_text(path) as file:
        start = file.read(LOOKED_AT)
    fields = {name for name in _TELLING if json.dumps(name) in start}
    if "full_text" in fields and "qas" in fields:
        return "qasper"
    if "document_id" in fields and "qas" in fields:
        return "covidqa"
    if "qas" in fields:
        return "squad"
    if "paragraph_text" in fields:
        return "musique"
    if "supporting_facts" in fields:
        return "2wikimultihopqa" if "evidences" in fields else "hotpotqa"
    if "documents" in fields and "answers" in fields:
        return "own"
    raise DataError(
        f"'{path}' is in no schema that can be told from its fields (name it: {', '.join(SETS)}); "
        "own questions are JSON lines of {documents, question, answers, evidence}"
    )


_TELLING = (
    "answers",
    "document_id",
    "documents",
    "evidences",
    "full_text",
    "paragraph_text",
    "qas",
    "supporting_facts",
)


def parse_records(text: str | None) -> slice:
    """ "70:" or ":400" as a slice.

    Raises:
        ConfigError: it is neither.
    """
    if text is None:
        return slice(None)
    parts = text.split(":")
    try:
        if len(parts) == 2:
            return slice(*(int(part) if part else None for part in parts))
    except ValueError:
        pass
    raise ConfigError(f"records is '{text}'; it must be 'start:stop', such as '70:' or ':400'")

"""Opening a set of examples: a file, a folder of shards, or a public set by its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from sedem.data import cloze, facts, multihop, qasper, ruler, squad
from sedem.data import custom_questions as own
from sedem.data.examples import ExampleSet
from sedem.data.files import kind, open_text
from sedem.data.hub import HOMES, checked_split, commit, held_commit, read_home
from sedem.data.record_validation import shown
from sedem.data.records import Records, read_records, shards
from sedem.durable_files import sha256
from sedem.errors import ConfigError, DataError


@dataclass(frozen=True)
class Schema:
    """How a set is read, whatever road its records come by.

    Attributes:
        read: makes examples of records; its options are the set's.
        units: cuts what a file or the hub holds into the records that are counted.
    """

    read: Callable[..., ExampleSet]
    units: Callable[[Records], Records] = iter


SETS: dict[str, Schema] = {
    "own": Schema(own.read),
    "squad": Schema(squad.read, squad.articles),
    "covidqa": Schema(squad.read_papers, squad.articles),
    "hotpotqa": Schema(multihop.read_hotpot, multihop.rows),
    "2wikimultihopqa": Schema(multihop.read_2wiki, multihop.rows),
    "musique": Schema(multihop.read_musique),
    "qasper": Schema(qasper.read, qasper.papers),
    "ruler-qa2": Schema(ruler.read, multihop.rows),
    "exact-facts": Schema(facts.read),
    "cloze": Schema(cloze.read),
}

LOOKED_AT = 200_000
"""Characters that are mostly enough to tell the schemas apart."""


def open_examples(
    source: str | Path,
    schema: str | None = None,
    *,
    records: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    **options: Any,
) -> ExampleSet:
    """Read a set of examples; all roads to a set give the same ones.

    Args:
        source: a file, a folder of the shards of one split, or a public name of `HOMES`.
        schema: one of `SETS`; None means that of the name, or that it is found out.
        records: "start:stop" of the records (articles of SQuAD, papers of COVID-QA and QASPER,
            else questions); None means all.
        split: of a public set, "train" or "validation"; None means "validation".
        revision: of a public set, the commit to read; None means the newest.
        streaming: read no further than `records` says and keep no copy of a public set.
        options: of the set's reader.

    Raises:
        DataError: the source cannot be read or its schema is not known.
        ConfigError: the schema, the records, the split or an option is not known, or a file is to
            have a revision.
    """
    path, chosen = Path(source), parse_records(records)
    name = schema or sniff(source)
    if name not in SETS:
        raise ConfigError(f"there is no schema '{name}'; known are {', '.join(SETS)}")
    read = SETS[name].read
    if not path.exists():
        given = read_home(_public(source), split, revision=revision, streaming=streaming)
    else:
        if revision is not None:
            raise ConfigError(f"revision is '{revision}', but '{source}' is a file: leave it out")
        given = read_records(path)
        if split is not None:
            if "split" not in signature(read).parameters:
                raise ConfigError(f"split is '{split}', but '{source}' is a file: leave it out")
            options["split"] = split
    try:
        signature(read).bind(given, **options)
    except TypeError as error:
        raise ConfigError(f"'{source}' as {name}: {error}") from None
    _check_types(read, options)
    examples = read(_some(SETS[name].units(given), chosen, streaming), **options)
    if name == "own":
        examples.name = path.stem
    return examples


def identify(source: str | Path, split: str | None = None) -> dict[str, str | None]:
    """What decides the content of a source.

    Args:
        source: as in `open_examples`.
        split: of a public set; None means "validation".

    Returns:
        Name and digest of a file or of a folder's files; or repository, split and commit, which
        `open_examples` takes as `revision`: the newest, or that of the copy here where the hub is
        out of reach, or None and why.

    Raises:
        DataError: the source is neither, or the hub cannot be reached and there is no copy here.
    """
    path = Path(source)
    if path.exists():
        digests = [sha256(shard) for shard in shards(path)]
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        return {"data": path.name, "data_sha256": joined if path.is_dir() else digests[0]}
    name = _public(source)
    home, meant = HOMES[name], checked_split(name, split)
    found: dict[str, str | None] = {"data": home.repository, "split": meant}
    try:
        found["revision"] = commit(home)
    except DataError:
        found["revision"] = held_commit(home, meant)
    if found["revision"] is None:
        found["revision_unknown"] = "the hub is out of reach and the copy here names no commit"
    return found


def sniff(source: str | Path) -> str:
    """The schema of a source: that of a public name, or told from the fields of its beginning.

    Raises:
        DataError: none is recognised.
    """
    path = Path(source)
    if not path.exists():
        return _public(source)
    for start in _beginnings(shards(path)[0]):
        schema = _schema({name for name in _TELLING if json.dumps(name) in start})
        if schema is not None:
            return schema
    raise DataError(
        f"'{path}' is in no schema that can be told from its fields (name it: {', '.join(SETS)}); "
        "own questions are JSON lines of {documents, question, answers, evidence}"
    )


def _schema(fields: set[str]) -> str | None:
    """The schema that has these fields; None where none is recognised."""
    if "full_text" in fields and "qas" in fields:
        return "qasper"
    if "document_id" in fields and fields & {"qas", "answer_start"}:
        return "covidqa"
    if fields & {"qas", "answer_start"}:
        return "squad"
    if "paragraph_text" in fields:
        return "musique"
    if "supporting_facts" in fields:
        return "2wikimultihopqa" if fields & {"evidences", "entity_ids"} else "hotpotqa"
    if "documents" in fields and "answers" in fields:
        return "own"
    return None


def counts_tokens(schema: str) -> bool:
    """Whether the examples of a schema depend on a tokenizer."""
    return schema in SETS and "tokenizer" in signature(SETS[schema].read).parameters


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


_TELLING = (
    "answer_start",
    "answers",
    "document_id",
    "documents",
    "entity_ids",
    "evidences",
    "full_text",
    "paragraph_text",
    "qas",
    "supporting_facts",
)


def _beginnings(path: Path) -> Iterator[str]:
    """What a file begins with: some characters, then all of its first record if that is longer."""
    if kind(path) != ".parquet":
        with open_text(path) as file:
            start = file.read(LOOKED_AT)
        yield start
        if len(start) < LOOKED_AT:
            return
    # Behind a long document, or the first column of a table, stand the names of other fields.
    yield json.dumps(next(read_records(path), ("", {}))[1], default=str)


_OPTIONS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    NoneType: ("null", (NoneType,)),
}
"""What a type in a reader's signature is called, and what passes for it."""


def _check_types(read: Callable[..., ExampleSet], options: dict[str, Any]) -> None:
    """Refuse options of another type than a reader's signature says; named words are its own."""
    wanted = get_type_hints(read)
    for name, value in options.items():
        kinds = [_OPTIONS[k] for k in get_args(wanted[name]) or (wanted[name],) if k in _OPTIONS]
        if kinds and not any(type(value) in types for _, types in kinds):
            needed = " or ".join(words for words, _ in kinds)
            raise ConfigError(f"{name} is {shown(value)}; it must be {needed}")


def _public(source: str | Path) -> str:
    """A public name, or an error that says what there is."""
    if str(source) in HOMES:
        return str(source)
    if str(source) == "covidqa":
        raise DataError(
            "covidqa has no home on the hub that loads without running a script; "
            "download COVID-QA.json and give its path"
        )
    raise DataError(
        f"there is no file '{source}' and no public set of that name; "
        f"the names are {', '.join(HOMES)}"
    )


def _some(records: Records, chosen: slice, streaming: bool) -> Records:
    """The records of a slice; what comes after it is not read."""
    if min(chosen.start or 0, chosen.stop or 0) >= 0:
        return islice(records, chosen.start, chosen.stop)
    if streaming:
        raise ConfigError(
            "records counts from the end, which a stream does not know; count from its start"
        )
    return iter(list(records)[chosen])

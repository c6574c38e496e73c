"""Opening a set of examples from a file, a folder of shards, or a public set by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import create_model

from sedem.config import LARGEST, Settings
from sedem.durable_files import sha256
from sedem.errors import ConfigError, DataError
from sedem.untrusted import check_file, exists, is_folder
from sedem_lab.data import (
    cloze,
    custom_questions,
    facts,
    longmemeval,
    multihop,
    paperwork,
    qasper,
    reports,
    ruler,
    squad,
    two_steps,
)
from sedem_lab.data.examples import ExampleSet
from sedem_lab.data.hub import HOMES, cached_commit, checked_split, commit, read_home
from sedem_lab.data.records import Records, first_field_names, read_records, shards


@dataclass(frozen=True)
class Schema:
    """How a set is read, from a file or from the hub.

    Attributes:
        read: turns records into examples; its keyword arguments are the set's options.
        units: splits what a file or the hub yields into the records that `records` counts.
    """

    read: Callable[..., ExampleSet]
    units: Callable[[Records], Records] = iter


SETS: dict[str, Schema] = {
    "own": Schema(custom_questions.read),
    "squad": Schema(squad.read, squad.articles),
    "covidqa": Schema(squad.read_papers, squad.articles),
    "hotpotqa": Schema(multihop.read_hotpot, multihop.rows),
    "2wikimultihopqa": Schema(multihop.read_2wiki, multihop.rows),
    "musique": Schema(multihop.read_musique),
    "qasper": Schema(qasper.read, qasper.papers),
    "govreport": Schema(reports.read),
    "longmemeval": Schema(longmemeval.read),
    "ruler-qa2": Schema(ruler.read, multihop.rows),
    "exact-facts": Schema(facts.EXACT_FACTS.read),
    "paperwork": Schema(paperwork.PAPERWORK.read),
    "two-steps": Schema(two_steps.TWO_STEPS.read),
    "cloze": Schema(cloze.read),
}


SCHEMA_FIELDS: tuple[tuple[str, set[str], set[str]], ...] = (
    ("qasper", {"full_text", "qas"}, set()),
    ("covidqa", {"document_id"}, {"qas", "answer_start"}),
    ("squad", set(), {"qas", "answer_start"}),
    ("musique", {"paragraph_text"}, set()),
    ("2wikimultihopqa", {"supporting_facts"}, {"evidences", "entity_ids"}),
    ("hotpotqa", {"supporting_facts"}, set()),
    ("longmemeval", {"haystack_sessions"}, set()),
    ("govreport", {"report", "summary"}, set()),
    ("own", {"documents", "answers"}, set()),
)
"""Schemas that are detected, the first that fits: fields of a record, and others of which it has
one."""


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
    """Read a set of examples; every source of a set gives the same examples.

    Args:
        source: a file, a folder with the shards of one split, or a public name of `HOMES`.
        schema: one of `SETS`; None means the schema of the name, or the one that `sniff` detects.
        records: "start:stop" of the records (articles of SQuAD, papers of COVID-QA and QASPER,
            questions of the others); None means all.
        split: split of a public set, "train" or "validation"; None means "validation".
        revision: commit of a public set to read; None means the newest.
        streaming: read no further than `records` needs, and keep no copy of a public set.
        options: options of the set, such as `seed`.

    Raises:
        DataError: the source cannot be read, or its schema is not recognised.
        ConfigError: the schema, the records, the split or an option is unknown or not allowed, or
            a revision is given for a file.
    """
    path, chosen = Path(source), parse_records(records)
    name = schema or sniff(source)
    if name not in SETS:
        raise ConfigError(f"there is no schema '{name}'; known are {', '.join(SETS)}")
    read = SETS[name].read
    # The options of a reader are those that its signature declares.
    _, *parameters = signature(read).parameters.values()
    hints = get_type_hints(read, include_extras=True)
    fields: dict[str, Any] = {p.name: (hints[p.name], p.default) for p in parameters}
    known = create_model("Options", __base__=Settings, **fields)
    if not exists(path):
        given = read_home(_public(source), split, revision=revision, streaming=streaming)
    else:
        if revision is not None:
            raise ConfigError(f"revision is '{revision}', but '{source}' is a file: leave it out")
        given = read_records(path)
        if split is not None:
            if "split" not in known.model_fields:
                raise ConfigError(f"split is '{split}', but '{source}' is a file: leave it out")
            options["split"] = split
    checked = dict(known.from_entries(options, f"'{source}' as {name}"))
    units = SETS[name].units(given)
    if min(chosen.start or 0, chosen.stop or 0) >= 0:
        # Records after the slice are not read.
        some: Records = islice(units, chosen.start, chosen.stop)
    elif streaming:
        raise ConfigError(
            "records counts from the end, which a stream does not know; count from its start"
        )
    else:
        some = iter(list(units)[chosen])
    examples = read(some, **checked)
    if name == "own":
        examples.name = path.stem
    return examples


def identify(source: str | Path, split: str | None = None) -> dict[str, str | None]:
    """What determines the content of a source.

    Returns:
        For a file or folder, its name and digest. For a public set, its repository, split and
        commit, which `open_examples` takes as `revision`. The commit is the newest. Without the
        hub, it is that of the local copy, or None with the reason.

    Raises:
        DataError: there is no such file or public set, or the hub cannot be reached and there is no
            local copy.
    """
    path = Path(source)
    if exists(path):
        files = shards(path)
        for file in files:
            check_file(file, DataError)
        digests = [sha256(file) for file in files]
        joined = hashlib.sha256("".join(digests).encode()).hexdigest()
        return {"data": path.name, "data_sha256": joined if is_folder(path) else digests[0]}
    name = _public(source)
    home, meant = HOMES[name], checked_split(name, split)
    found: dict[str, str | None] = {"data": home.repository, "split": meant}
    try:
        found["revision"] = commit(home)
    except DataError:
        found["revision"] = cached_commit(home, meant)
    if found["revision"] is None:
        found["revision_unknown"] = "the hub is out of reach and the local copy names no commit"
    return found


def sniff(source: str | Path) -> str:
    """The schema of a public name, or of a file by the field names of its first record.

    Raises:
        DataError: no schema is recognised.
    """
    path = Path(source)
    if not exists(path):
        return _public(source)
    fields = first_field_names(shards(path)[0])
    for schema, needed, one_of in SCHEMA_FIELDS:
        if needed <= fields and (not one_of or one_of & fields):
            return schema
    raise DataError(
        f"the fields of '{path}' fit no schema; name it ({', '.join(SETS)}), or give JSON lines of "
        "{documents, question, answers, evidence}"
    )


def counts_tokens(schema: str) -> bool:
    """Whether the examples of a schema depend on a tokenizer."""
    return schema in SETS and "tokenizer" in signature(SETS[schema].read).parameters


def parse_records(text: str | None) -> slice:
    """Parse "start:stop", such as "70:" or ":400".

    Raises:
        ConfigError: the text has another form.
    """
    if text is None:
        return slice(None)
    parts = text.split(":")
    try:
        if len(parts) == 2:
            ends = [int(part) if part else None for part in parts]
            if all(end is None or abs(end) <= LARGEST for end in ends):
                return slice(*ends)
    except ValueError:
        pass
    raise ConfigError(f"records is '{text}'; it must be 'start:stop', such as '70:' or ':400'")


def _public(source: str | Path) -> str:
    """Check a public name; otherwise raise an error that lists the names."""
    if str(source) in HOMES:
        return str(source)
    if str(source) == "covidqa":
        raise DataError(
            "covidqa cannot be loaded from the hub without running a script; "
            "download COVID-QA.json and give its path"
        )
    raise DataError(
        f"there is no file '{source}' and no public set of that name; "
        f"the names are {', '.join(HOMES)}"
    )

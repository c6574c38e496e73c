"""Public sets by name: where each lives on the hub, and its records, downloaded or streamed.

Repositories that hold a script are not run: their rows are read from the hub's own parquet copy, or
from their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sedem.data.records import Records
from sedem.errors import ConfigError, DataError

PARQUET = "refs/convert/parquet"
"""The revision at which the hub keeps a parquet copy of a set."""

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Home:
    """Where a set lives.

    Attributes:
        repository: its hub id.
        config: the configuration.
        revision: the revision to read; None means the main one.
        fallback: the revision to read when the main one turns out to be a script.
        files: parquet file of each split, for a repository that cannot be loaded by its id.
    """

    repository: str
    config: str | None = None
    revision: str | None = None
    fallback: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


HOMES: dict[str, Home] = {
    "hotpotqa": Home("hotpotqa/hotpot_qa", "distractor", fallback=PARQUET),
    "2wikimultihopqa": Home(
        "xanhho/2WikiMultihopQA", files={"train": "train.parquet", "validation": "dev.parquet"}
    ),
    "musique": Home("dgslibisey/MuSiQue"),
    "qasper": Home("allenai/qasper", "qasper", revision=PARQUET),
    "squad": Home("rajpurkar/squad"),
    "ruler-qa2": Home("hotpotqa/hotpot_qa", "distractor", fallback=PARQUET),
}
"""Every public name."""


def read_home(
    name: str,
    split: str | None = None,
    *,
    revision: str | None = None,
    streaming: bool = False,
) -> Records:
    """Records of a public set.

    Args:
        name: one of `HOMES`.
        split: "train" or "validation"; None means "validation".
        revision: the commit to read; None means the newest, or without the hub the newest copy.
        streaming: read over the network without keeping a copy.

    Raises:
        ConfigError: there is no such split.
        DataError: the hub cannot be reached and holds no copy here.
    """
    home, split = HOMES[name], checked_split(name, split)
    with _reaching(home.repository):
        rows = _load(home, split, streaming, revision)
    yield from numbered(rows, home.repository)


def stream(repository: str, revision: str | None = None) -> Records:
    """Records of the training split of any set, streamed.

    Raises:
        DataError: the hub cannot be reached.
    """
    with _reaching(repository):
        rows = _datasets().load_dataset(
            repository, split="train", revision=revision, streaming=True
        )
    yield from numbered(rows, repository)


def numbered(rows: Any, repository: str) -> Records:
    """Rows with their places; a network that fails midway is told of as well."""
    left, number = iter(rows), 0
    while True:
        with _reaching(repository):
            row = next(left, None)
        if row is None:
            return
        number += 1
        yield f"{repository}, record {number}", row


def checked_split(name: str, split: str | None) -> str:
    """The split that is meant.

    Raises:
        ConfigError: there is no such split.
    """
    split = split or "validation"
    if split not in SPLITS:
        raise ConfigError(f"split of {name} is '{split}'; it can be {' or '.join(SPLITS)}")
    return split


def commit(home: Home) -> str:
    """The commit of the revision that is read, as the hub tells it.

    Raises:
        DataError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _reaching(home.repository):
        told = HfApi().dataset_info(home.repository, revision=home.revision)
        script = f"{home.repository.rpartition('/')[2]}.py"
        if home.fallback and script in {file.rfilename for file in told.siblings or ()}:
            told = HfApi().dataset_info(home.repository, revision=home.fallback)
    return str(told.sha)


def cached_commit(home: Home, split: str) -> str | None:
    """The commit of the copy that is read without the hub; None where the copy does not tell.

    Raises:
        DataError: there is no copy here.
    """
    with _reaching(home.repository):
        files = _load(home, split, streaming=False).cache_files
    # The library keeps a copy in a folder that is named by its commit.
    folders = {Path(file["filename"]).parent.name for file in files}
    return next((folder for folder in folders if _COMMIT.fullmatch(folder)), None)


_COMMIT = re.compile(r"[0-9a-f]{40}")


def _load(home: Home, split: str, streaming: bool, revision: str | None = None) -> Any:
    load_dataset = _datasets().load_dataset
    if home.files:
        at = f"@{revision}" if revision else ""
        file = f"hf://datasets/{home.repository}{at}/{home.files[split]}"
        return load_dataset("parquet", data_files={split: file}, split=split, streaming=streaming)
    names = [home.repository] if home.config is None else [home.repository, home.config]
    options: dict[str, Any] = {"split": split, "streaming": streaming}
    if revision or home.revision:
        options["revision"] = revision or home.revision
    try:
        return load_dataset(*names, **options)
    except RuntimeError as error:
        if revision or home.fallback is None or "scripts are no longer supported" not in str(error):
            raise
    return load_dataset(*names, revision=home.fallback, **options)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "public sets are read with the library 'datasets'; install 'sedem[train]', or give a "
            "downloaded file"
        ) from None
    return datasets


@contextmanager
def _reaching(repository: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    # The libraries let whatever their transport raises through, and it has no root of its own.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"'{repository}' cannot be had from the hub ({reason}); go online, or download a file "
            "of the set and give its path"
        ) from None

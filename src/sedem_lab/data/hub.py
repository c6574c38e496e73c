"""Public sets by name: their location on the hub, and their records, downloaded or streamed.

Scripts in repositories are not run: rows are read from the hub's own parquet copy, or from files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sedem.errors import ConfigError, DataError
from sedem_lab.data.records import Records

PARQUET = "refs/convert/parquet"
"""The revision with the hub's own parquet copy of a set."""

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Home:
    """Location of a set on the hub.

    Attributes:
        revision: the revision to read; None means the main one.
        files: parquet file of each split, for a repository that cannot be loaded by its id.
        records: records of the training split (papers of QASPER, articles of SQuAD); 0 if unknown.
    """

    repository: str
    config: str | None = None
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    records: int = 0
    questions: int = 0


HOMES: dict[str, Home] = {
    "hotpotqa": Home(
        "hotpotqa/hotpot_qa", "distractor", revision=PARQUET, records=90_447, questions=90_447
    ),
    "2wikimultihopqa": Home(
        "xanhho/2WikiMultihopQA",
        files={"train": "train.parquet", "validation": "dev.parquet"},
        records=167_454,
        questions=167_454,
    ),
    "musique": Home("dgslibisey/MuSiQue", records=19_938, questions=19_938),
    "qasper": Home("allenai/qasper", "qasper", revision=PARQUET, records=888, questions=2_593),
    "squad": Home("rajpurkar/squad", records=442, questions=87_599),
    "govreport": Home("ccdv/govreport-summarization", "document", records=17_517, questions=17_517),
    "ruler-qa2": Home("hotpotqa/hotpot_qa", "distractor", revision=PARQUET),
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
        split: None means "validation".
        revision: the commit to read; None means the newest, or the newest local copy if the hub is
            unreachable.
        streaming: read over the network without keeping a copy.

    Raises:
        ConfigError: there is no such split.
        DataError: the hub cannot be reached and there is no local copy.
    """
    home, split = HOMES[name], checked_split(name, split)
    with _reaching(home.repository):
        rows = _load(home, split, streaming, revision)
    yield from numbered(rows, home.repository)


def stream(repository: str, revision: str | None = None, seed: int | None = None) -> Records:
    """Records of the training split of any dataset, streamed.

    Args:
        seed: seed of the order in which shards are read, so that the first records are not all from
            one source; None keeps the stored order. The records of a shard stay in order.

    Raises:
        DataError: the hub cannot be reached.
    """
    with _reaching(repository):
        rows = _datasets().load_dataset(
            repository, split="train", revision=revision, streaming=True
        )
        if seed is not None:
            # With a buffer of one record, only the shards are shuffled, not the records in a shard.
            rows = rows.shuffle(seed=seed, buffer_size=1)
    yield from numbered(rows, repository)


def numbered(rows: Any, repository: str) -> Records:
    """Rows with their places; a network error midway also becomes a `DataError`."""
    remaining, number = iter(rows), 0
    while True:
        with _reaching(repository):
            row = next(remaining, None)
        if row is None:
            return
        number += 1
        yield f"{repository}, record {number}", row


def checked_split(name: str, split: str | None) -> str:
    """The split, with its default.

    Raises:
        ConfigError: there is no such split.
    """
    split = split or "validation"
    if split not in SPLITS:
        raise ConfigError(f"split of {name} is '{split}'; it can be {' or '.join(SPLITS)}")
    return split


def commit(home: Home) -> str:
    """The newest commit, according to the hub.

    Raises:
        DataError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _reaching(home.repository):
        return str(HfApi().dataset_info(home.repository, revision=home.revision).sha)


def cached_commit(home: Home, split: str) -> str | None:
    """The commit of the local copy, which is read without the hub; None if the copy names none.

    Raises:
        DataError: there is no local copy.
    """
    with _reaching(home.repository):
        files = _load(home, split, streaming=False).cache_files
    # The library names the folder of a copy after its commit.
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
    return load_dataset(*names, **options)


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
    """Turn every error of the hub's libraries into a `DataError`."""
    try:
        yield
    except DataError:
        raise
    # The libraries pass on the errors of their transport, which have no common base class.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"'{repository}' cannot be read from the hub ({reason}); go online, or download a file "
            "of the set and give its path"
        ) from None

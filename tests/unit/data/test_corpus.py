from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from sedem.data.corpus import read_texts
from sedem.errors import DataError

Write = Callable[[str, Any], Path]


def test_texts_of_every_kind_of_file_are_read_in_the_order_of_their_names(
    tmp_path: Path, write: Write
) -> None:
    write("b.txt", "text of b\nand more")
    write("a.md", "# text of a")
    write("c.jsonl", [{"text": "first of c"}, {"text": "second of c", "title": "Ada"}])
    write("ignored.csv", "not,read")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "d.txt.gz").write_bytes(gzip.compress(b"text of d"))
    assert list(read_texts(tmp_path)) == [
        "# text of a",
        "text of b\nand more",
        "first of c",
        "second of c",
        "text of d",
    ]
    assert list(read_texts(tmp_path / "b.txt")) == ["text of b\nand more"]


def test_excluded_titles_are_left_out(path: Path, texts: list[str]) -> None:
    kept = list(read_texts(path, ["2", "7"]))
    assert kept == [text for i, text in enumerate(texts) if i not in (2, 7)]


def test_files_that_hold_no_text_are_refused(tmp_path: Path, write: Write) -> None:
    with pytest.raises(
        DataError, match=r"table\.csv' is not a text file; give \.txt, \.md, \.jsonl, \.parquet,"
    ):
        list(read_texts(write("table.csv", "a,b")))
    with pytest.raises(DataError, match=r"lines\.jsonl', line 2: a string field 'text' is needed"):
        list(read_texts(write("lines.jsonl", [{"text": "a"}, {"text": 1}])))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"folder '.*empty' holds no \.txt, \.md, \.jsonl, \.parquet file"
    ):
        list(read_texts(tmp_path / "empty"))


def test_parquet_files_hold_texts_in_a_column(tmp_path: Path, texts: list[str]) -> None:
    rows = [{"text": t, "meta": {"set": "a"}, "title": str(i)} for i, t in enumerate(texts)]
    folder = tmp_path / "texts"
    folder.mkdir()
    Dataset.from_list(rows[:4]).to_parquet(folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
    assert list(read_texts(folder)) == texts
    assert list(read_texts(folder / "a.parquet", ["1"])) == [texts[0], *texts[2:4]]
    Dataset.from_list([{"words": "a"}]).to_parquet(folder / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet', row 1: a string field 'text' is needed"):
        list(read_texts(folder))


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_shards_are_read_in_the_order_of_a_seed(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, on_the_hub: bool
) -> None:
    """Local files stand in for the shards on the hub; each is of one source."""
    files = [
        write(f"{shard}.jsonl", [{"text": f"{shard} {line}"} for line in range(3)])
        for shard in "abcdefgh"
    ]
    source: str | Path = "hub:owner/set" if on_the_hub else tmp_path
    load = datasets.load_dataset

    def load_dataset(repository: str, **options: Any) -> Any:
        paths = [str(file) for file in files]
        return load("json", data_files=paths, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    in_order, shuffled = list(read_texts(source)), list(read_texts(source, shard_seed=1))
    assert shuffled != in_order == sorted(in_order)
    assert sorted(shuffled) == in_order
    assert shuffled == list(read_texts(source, shard_seed=1))
    assert shuffled != list(read_texts(source, shard_seed=2))
    for shard in "abcdefgh":
        assert [text[2:] for text in shuffled if text[0] == shard] == ["0", "1", "2"]

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from sedem.data import records
from sedem.data.records import read_records
from sedem.errors import DataError

Write = Callable[[str, Any], Path]

ENTRIES = [{"id": i, "text": "ö, [1] \n" * i, "parts": [{"a": "]"}]} for i in range(5)]


def places(path: Path) -> list[str]:
    return [place.rpartition("/")[2] for place, _ in read_records(path)]


def entries(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_records(path)]


@pytest.mark.parametrize("before", ["", "\n \t"])
def test_every_form_holds_the_same_records(tmp_path: Path, before: str) -> None:
    lines = before + "".join(json.dumps(entry) + "\n" for entry in ENTRIES)
    (tmp_path / "array.json").write_text(before + json.dumps(ENTRIES, indent=1) + "\n")
    (tmp_path / "lines.json").write_text(lines)
    (tmp_path / "lines.jsonl").write_text(lines)
    Dataset.from_list(ENTRIES).to_parquet(tmp_path / "rows.parquet")
    for name in ("array.json", "lines.json", "lines.jsonl", "rows.parquet"):
        assert entries(tmp_path / name) == ENTRIES, name
    assert places(tmp_path / "array.json")[1] == "array.json', entry 2"
    assert places(tmp_path / "rows.parquet")[4] == "rows.parquet', row 5"


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "gaps.jsonl").write_text('\n{"id": 1}\n\n{"id": 2}\n')
    assert places(tmp_path / "gaps.jsonl") == ["gaps.jsonl', line 2", "gaps.jsonl', line 4"]


def test_an_object_over_many_lines_is_one_record(write: Write, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(ENTRIES[1], indent=2))
    assert entries(tmp_path / "one.json") == [ENTRIES[1]]
    assert entries(write("line.json", ENTRIES[1])) == [ENTRIES[1]]
    assert entries(write("none.json", "")) == []


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_an_array_is_read_in_pieces_of_any_size(
    write: Write, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(records, "CHARACTERS", size)
    path = write("array.json", {"unused": 1})
    path.write_text(json.dumps(ENTRIES, indent=1, ensure_ascii=False), encoding="utf-8")
    assert entries(path) == ENTRIES


def test_an_array_is_not_read_further_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CHARACTERS", 64)
    path = tmp_path / "array.json"
    # What stands behind the first records is broken, and nobody looks at it.
    path.write_text(json.dumps([{"id": i, "text": "x" * 30} for i in range(9)])[:-1] + ", oops")
    found = read_records(path)
    assert [next(found)[1]["id"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"array\.json' is not JSON: .* at line 1"):
        list(found)


@pytest.mark.parametrize("text", ['[{"id": 1}, 2]', "[[]]"])
def test_an_array_of_other_things_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(DataError, match=r"entry \d: a JSON object is needed, this is (int|list)"):
        entries(tmp_path / "odd.json")


@pytest.mark.parametrize("text", ['[{"id": 1}', '[{"id": 1}] and more', '[{"id": }]'])
def test_a_broken_array_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(DataError, match=r"broken\.json' is not JSON: .* at line 1, column \d+"):
        entries(tmp_path / "broken.json")


def test_a_folder_is_its_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n')
    (tmp_path / "a.json").write_text('[{"id": 0}, {"id": 1}]')
    Dataset.from_list([{"id": 3}]).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "README.md").write_text("no records")
    (tmp_path / "d.jsonl").mkdir()
    assert entries(tmp_path) == [{"id": i} for i in range(4)]
    assert places(tmp_path) == ["a.json', entry 1", "a.json', entry 2", "b.jsonl', line 1",
                                "c.parquet', row 1"]  # fmt: skip


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("no records")
    with pytest.raises(DataError, match=r"holds no \.json, \.jsonl, \.parquet file; give a file"):
        entries(tmp_path)


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.parquet"
    Dataset.from_list(ENTRIES).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"half\.parquet' cannot be read as parquet: \w+"):
        entries(path)
    with pytest.raises(DataError, match=r"there is no file '.*no\.parquet'"):
        entries(tmp_path / "no.parquet")

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from sedem.data import records
from sedem.data.records import first_field_names, read_records
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


def test_a_large_array_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    opened = records.open_text

    @contextmanager
    def counting(path: Path) -> Iterator[Any]:
        with opened(path) as file:

            def read(size: int) -> str:
                chunk = file.read(size)
                sizes.append(len(chunk))
                return chunk

            yield SimpleNamespace(read=read, readline=file.readline)

    path = tmp_path / "large.json"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(f'{"," if number else "["}{{"id": {number}, "text": "{"x" * 1000}"}}\n')
        file.write("]")
    monkeypatch.setattr(records, "open_text", counting)
    found = read_records(path)
    assert [next(found)[1]["id"] for _ in range(3)] == [0, 1, 2]
    assert first_field_names(path) == {"id", "text"}
    assert 0 < sum(sizes) < path.stat().st_size / 50
    tracemalloc.start()
    assert sum(1 for _ in read_records(path)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 10


def test_an_array_is_streamed_up_to_a_malformed_entry(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    entries = [{"id": i, "text": "x" * 30_000} for i in range(9)]
    path.write_text(json.dumps(entries)[:-1] + ", oops")
    found = read_records(path)
    assert [next(found)[1]["id"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"array\.json' is not JSON: .* at column 270\d\d\d"):
        list(found)


VALUES = [
    '0, -1, 1.5, 1e-7, 0.1, 1E3, -0.0, true, null, "", {}, []',
    "123456789012345678901234567890",
    "NaN, Infinity, -Infinity, 1E400",
    r'"\u0000 \" \\ \/ \n \ud83e\udd67 \\ud83e ö"',
    r'"\ud83e"',
]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("before", [0, 65_520, 65_530])
def test_values_of_an_array_are_those_of_json(tmp_path: Path, values: str, before: int) -> None:
    # An entry may be split between the 65,536 characters that are read at a time.
    text = f'[{{"id": 1}},{" " * before}{{"values": [{values}]}}, {{"id": 2}}]'
    (tmp_path / "array.json").write_text(text, encoding="utf-8")
    assert repr(entries(tmp_path / "array.json")) == repr(json.loads(text))


@pytest.mark.parametrize("name", ["array.json", "lines.jsonl", "object.json", "rows.parquet"])
def test_field_names_are_those_of_the_first_record(tmp_path: Path, name: str) -> None:
    first = {"id": 1, "text": "'b': 2", "parts": [{"a": 1}, {"c": [[]]}]}
    (tmp_path / "array.json").write_text(json.dumps([first, {"z": 1}]))
    (tmp_path / "lines.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps({'z': 1})}\n")
    (tmp_path / "object.json").write_text(json.dumps(first, indent=1))
    Dataset.from_list([first]).to_parquet(tmp_path / "rows.parquet")
    assert first_field_names(tmp_path / name) == {"id", "text", "parts", "a", "c"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"id": 1}, 2]', "entry 2: a JSON object is needed, this is int"),
        ("[[]]", "entry 1: a JSON object is needed, this is list"),
        ('[{"id": 1}', r"odd\.json' is not JSON: .* at column \d+"),
        ('[{"id": 1}] and more', r"odd\.json' is not JSON: .* at column \d+"),
        ('[{"id": }]', r"odd\.json' is not JSON: .* at column \d+"),
        ('[{"id": 1, "id": 2}]', r"odd\.json', entry 1 has an object with the key 'id' twice"),
        ("[" * 9999, "nests lists or objects more than 64 deep"),
    ],
)
def test_an_array_of_other_things_or_a_broken_one_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(DataError, match=message):
        entries(tmp_path / "odd.json")


def test_a_folder_is_its_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n')
    (tmp_path / "a.json").write_text('[{"id": 0}, {"id": 1}]')
    Dataset.from_list([{"id": 3}]).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "README.md").write_text("no records")
    (tmp_path / "d.jsonl").mkdir()
    assert entries(tmp_path) == [{"id": i} for i in range(4)]
    assert places(tmp_path) == ["a.json', entry 1", "a.json', entry 2", "b.jsonl', line 1",
                                "c.parquet', row 1"]  # fmt: skip
    with pytest.raises(DataError, match=r"holds no \.json, \.jsonl, \.parquet file; give a file"):
        entries(tmp_path / "d.jsonl")


def test_a_parquet_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.parquet"
    Dataset.from_list(ENTRIES).to_parquet(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"half\.parquet' cannot be read as parquet: \w+"):
        entries(path)
    with pytest.raises(DataError, match=r"there is no file '.*no\.parquet'"):
        entries(tmp_path / "no.parquet")

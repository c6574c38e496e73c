from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from unit.data.conftest import Write

from sedem.errors import DataError
from sedem_lab.data.records import open_text, read_records

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


def test_lines_keep_their_numbers_and_an_object_over_many_lines_is_one_record(
    write: Write, tmp_path: Path
) -> None:
    gaps = write("gaps.jsonl", '\n{"id": 1}\n\n{"id": 2}\n')
    assert places(gaps) == ["gaps.jsonl', line 2", "gaps.jsonl', line 4"]
    (tmp_path / "one.json").write_text(json.dumps(ENTRIES[1], indent=2))
    assert entries(tmp_path / "one.json") == [ENTRIES[1]]
    assert entries(write("line.json", ENTRIES[1])) == [ENTRIES[1]]
    assert entries(write("none.json", "")) == []


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


# Compressed files


TEXT = 'Görlitz liegt an der Neiße.\n{"rent": 900}\n' * 200


def zstd(content: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").compress(content))


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}


def text_of(path: Path) -> str:
    with open_text(path) as file:
        return file.read()


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_compressed_file_is_read_whole_or_refused(tmp_path: Path, ending: str) -> None:
    compress = COMPRESSED[ending]
    path = tmp_path / f"text.txt{ending}"
    whole = compress(TEXT.encode())
    path.write_bytes(whole)
    assert text_of(path) == TEXT
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"text\.txt.+cannot be read: .*(ended before|runcated)"):
        text_of(path)
    path = tmp_path / f"lines.jsonl{ending}"
    whole = compress(b'{"a": 1}\n' * 5000)
    damaged = whole[:20] + bytes(255 - byte for byte in whole[20:40]) + whole[40:]
    for content in (b'{"a": 1}\n', damaged):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"lines\.jsonl\{ending}' cannot be read: \w+"):
            list(read_records(path))
    path.write_bytes(compress(b'{"a": 1}\n\n{"a": 2}\n'))
    found = [(place.rpartition(" ")[2], record) for place, record in read_records(path)]
    assert found == [("1", {"a": 1}), ("3", {"a": 2})]


def test_a_zstd_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "frames.txt.zst"
    frames = [zstd(part.encode()) for part in ("Görlitz ", "", "liegt", " an der Neiße")]
    path.write_bytes(b"".join(frames))
    assert text_of(path) == "Görlitz liegt an der Neiße"
    path.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(DataError, match="runcated"):
        text_of(path)


def test_zstd_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "text.txt.zst").touch()
    with pytest.raises(DataError, match=r"install 'sedem\[train\]' to read a file that zstd"):
        text_of(tmp_path / "text.txt.zst")


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder; give a file"):
        text_of(tmp_path)
    for name in ("nowhere.json", "nowhere.json.gz"):
        with pytest.raises(DataError, match=rf"there is no file '.*{name}'"):
            text_of(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"id": 1}, 2]', "entry 2: a JSON object is needed, this is int"),
        ("a.json", b"[[]]", "entry 1: a JSON object is needed, this is list"),
        ("a.json", b'[{"id": 1}', r"a\.json' is not JSON: .* at column \d+"),
        ("a.json", b'[{"id": 1}] and more', r"a\.json' is not JSON: .* at column \d+"),
        ("a.json", b'[{"id": }]', r"a\.json' is not JSON: .* at column \d+"),
        ("a.json", b'[{"id": 1, "id": 2}]', r"a\.json' has an object with the key 'id' twice"),
        ("a.json", b"[" * 9999, "nests lists or objects more than 64 deep"),
        ("a.json", b'{"a": 1,\n "b": oops}', r"a\.json' is not JSON: .* at line 2, column 7"),
        ("a.jsonl", b'{"a": "G\xf6rlitz"}\n', r"a\.jsonl' is not UTF-8 text \(invalid .* byte 8\)"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2\n', r"a\.jsonl', line 3 is not JSON: .* at column 8"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "line 2: a JSON object is needed, this is list"),
    ],
)
def test_broken_files_are_named_with_the_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        entries(tmp_path / name)

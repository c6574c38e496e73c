from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from sedem.data.compression import open_text
from sedem.data.records import read_records
from sedem.errors import DataError

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
    with pytest.raises(DataError, match=r"text\.txt\.\w+' cannot be read: .*ended before"):
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
    with pytest.raises(DataError, match="ended before"):
        text_of(path)


def test_zstd_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "text.txt.zst").touch()
    with pytest.raises(DataError, match="compressed with zstd; install 'zstandard'"):
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
        ("a.jsonl", b'{"a": "G\xf6rlitz"}\n', r"a\.jsonl' is not UTF-8 text \(invalid .* byte 8\)"),
        ("a.json", b'{"a": 1,\n "b": oops}', r"a\.json' is not JSON: .* at line 2, column 7"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2\n', r"a\.jsonl', line 3 is not JSON: .* at column 8"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "line 2: a JSON object is needed, this is list"),
    ],
)
def test_broken_json_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_records(tmp_path / name))

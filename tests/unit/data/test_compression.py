from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from sedem.data.compression import open_text
from sedem.data.records import read_json, read_records
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


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_compressed_file_reads_as_its_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"text.txt{ending}"
    path.write_bytes(COMPRESSED[ending](TEXT.encode()))
    with open_text(path) as file:
        assert file.read() == TEXT


@pytest.mark.parametrize("ending", COMPRESSED)
def test_lines_of_a_compressed_file_keep_their_numbers(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"lines.jsonl{ending}"
    path.write_bytes(COMPRESSED[ending](b'{"a": 1}\n\n{"a": 2}\n'))
    assert [(place[-6:], record) for place, record in read_records(path)] == [
        ("line 1", {"a": 1}),
        ("line 3", {"a": 2}),
    ]


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_file_that_only_claims_to_be_compressed_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plain.jsonl{ending}"
    COMPRESSED[ending](b"skips here when the library is missing")
    path.write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=rf"plain\.jsonl\{ending}' cannot be read: \w+"):
        list(read_records(path))


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"damaged.jsonl{ending}"
    whole = COMPRESSED[ending](b'{"a": 1}\n' * 5000)
    path.write_bytes(whole[:20] + bytes(255 - byte for byte in whole[20:40]) + whole[40:])
    with pytest.raises(DataError, match=rf"damaged\.jsonl\{ending}' cannot be read"):
        list(read_records(path))


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_compressed_file_that_ends_early_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"half.txt{ending}"
    whole = COMPRESSED[ending](TEXT.encode())
    path.write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(DataError, match=r"half\.txt\.\w+' cannot be read: .*ended before"),
        open_text(path) as file,
    ):
        file.read()


def test_a_zstd_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "frames.txt.zst"
    frames = [zstd(part.encode()) for part in ("Görlitz ", "", "liegt", " an der Neiße")]
    path.write_bytes(b"".join(frames))
    with open_text(path) as file:
        assert file.read() == "Görlitz liegt an der Neiße"
    path.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(DataError, match="ended before"), open_text(path) as file:
        file.read()


def test_a_zstd_file_of_jsonl_that_ends_early_is_no_end_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl.zst"
    whole = zstd(b"".join(b'{"text": "%d"}\n' % number for number in range(50_000)))
    path.write_bytes(whole[: len(whole) - 20])
    with pytest.raises(DataError, match=r"lines\.jsonl\.zst' cannot be read: .*ended before"):
        list(read_records(path))


def test_zstd_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    path = tmp_path / "text.txt.zst"
    path.touch()
    with (
        pytest.raises(DataError, match="compressed with zstd; install 'zstandard'"),
        open_text(path),
    ):
        pass


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder; give a file"), open_text(tmp_path):
        pass
    with (
        pytest.raises(DataError, match=r"there is no file '.*nowhere\.json'"),
        open_text(tmp_path / "nowhere.json"),
    ):
        pass
    with (
        pytest.raises(DataError, match=r"there is no file '.*nowhere\.json\.gz'"),
        open_text(tmp_path / "nowhere.json.gz"),
    ):
        pass


def test_text_that_is_not_utf8_is_refused_with_its_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"a": "G\xf6rlitz"}\n')
    with pytest.raises(
        DataError, match=r"latin\.jsonl' is not UTF-8 text \(invalid .* at byte 8\)"
    ):
        list(read_records(path))


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"a": 1,\n "b": oops}')
    with pytest.raises(DataError, match=r"broken\.json' is not JSON: .* at line 2, column 7"):
        read_json(path)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2\n')
    lines = read_records(path)
    assert next(lines)[1] == {"a": 1}
    with pytest.raises(DataError, match=r"broken\.jsonl', line 3 is not JSON: .* at column 8"):
        next(lines)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    path.write_text('{"a": 1}\n[1, 2]\n')
    with pytest.raises(DataError, match="line 2: a JSON object is needed, this is list"):
        list(read_records(path))

"""Tensors that are read give the rows of mapped ones, and say what is wrong with their file."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sedem.bank.store import tensor_files
from sedem.bank.store.shard import checksum
from sedem.bank.store.tensor_files import ReadFile, ReadTensor, ReadVectors, open_tensors
from sedem.errors import BankError
from sedem.quantization import Quantized

ROWS, SHAPE = 7, (3, 5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a tensor of each type."""
    tensors = {
        name: (torch.randn(ROWS, *SHAPE) * 50).to(dtype)
        for name, dtype in tensor_files.TYPES.items()
    }
    save_file({**tensors, "none": torch.zeros(0, 4)}, tmp_path / "a", {"about": "rows"})
    return tmp_path / "a"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    equal = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return equal and one.dtype == other.dtype and one.shape == other.shape


@pytest.mark.parametrize(
    "index", [2, slice(None), slice(2, 5), slice(6, 99), [3], [], [1, 2, 3, 6, 0, 0, 5, 4]]
)
def test_selected_rows_are_those_of_the_mapped_file(path: Path, index: Any) -> None:
    with safe_open(path, framework="pt") as mapped, ReadFile(path) as read:
        assert sorted(read.keys()) == sorted(mapped.keys())
        assert read.metadata() == mapped.metadata()
        for name in tensor_files.TYPES:
            assert same(read.get_tensor(name)[index], mapped.get_tensor(name)[index])
        assert same(read.get_tensor("none")[:], mapped.get_tensor("none"))


def test_a_file_that_cannot_be_mapped_is_read_and_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(tensor_files, "_WARNED", threading.Event())
    mapped = open_tensors(path).get_tensor("BF16")
    monkeypatch.setattr(mmap, "mmap", refuse)
    for _ in range(2):
        tensor = open_tensors(path).get_tensor("BF16")
        assert isinstance(tensor, ReadTensor)
        assert same(tensor[:], mapped)
    (message,) = caplog.messages
    assert "/a' cannot be mapped into memory ([Errno 19] No such device)" in message
    assert "slower; copy the bank to a local disk" in message


def test_the_environment_forbids_mapping_without_a_word(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not isinstance(open_tensors(path), ReadFile)
    monkeypatch.setenv("SEDEM_READ", "1")
    assert isinstance(open_tensors(path), ReadFile)
    assert not caplog.messages


def test_nothing_but_the_selected_rows_is_read_and_neighbours_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    real = os.preadv

    def counting(number: int, rooms: list[memoryview], place: int) -> int:
        sizes.append(len(rooms[0]))
        # A file system may give less than was asked for.
        return real(number, [rooms[0][:40]], place)

    file, mapped = ReadFile(path), safe_open(path, framework="pt").get_tensor("F32")
    monkeypatch.setattr(os, "preadv", counting)
    assert same(file.get_tensor("F32")[[1, 2, 5]], mapped[[1, 2, 5]])
    assert sizes == [120, 80, 40, 60, 20]


@pytest.mark.parametrize("index", [[ROWS], [-1], [0, 99], ROWS])
def test_rows_outside_are_refused(path: Path, index: Any) -> None:
    with pytest.raises(IndexError, match=rf"no row -?\d+ in '.*/a', it has {ROWS}"):
        ReadFile(path).get_tensor("I8")[index]


def test_checksums_in_parts_are_those_of_the_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, read = safe_open(path, framework="pt"), ReadFile(path)
    whole = checksum(Quantized(mapped.get_tensor("I8"), mapped.get_tensor("F32")))
    monkeypatch.setattr("sedem.bank.store.shard.PART", 130)
    assert checksum(ReadVectors(read.get_tensor("I8"), read.get_tensor("F32"))) == whole


# Files that change


def test_a_file_that_is_cut_while_it_is_open_is_an_error(path: Path) -> None:
    tensor = ReadFile(path).get_tensor("I64")
    os.truncate(path, 800)
    with pytest.raises(BankError, match=r"/a' cannot be read any more \(it ends at byte 800\)"):
        tensor[:]


def replace(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b"\0")


@pytest.mark.parametrize(
    ("change", "message"), [(replace, "it was changed"), (Path.unlink, "No such file")]
)
def test_an_open_file_may_be_exchanged_and_a_closed_one_may_not(
    path: Path, change: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = ReadFile(path).get_tensor("F16")
    before = tensor[:]
    change(path)
    assert same(tensor[:], before)
    monkeypatch.setattr(tensor_files, "OPEN_FILES", 1)
    save_file({"other": torch.zeros(2)}, path.with_name("b"))
    ReadFile(path.with_name("b"))
    with pytest.raises(BankError, match=message):
        tensor[:]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the files of this process")
def test_few_files_are_open_and_none_when_nobody_reads_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        return sum(os.path.samefile(f"/proc/self/fd/{n}", path) for n in numbers())

    def numbers() -> list[str]:
        return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]

    monkeypatch.setattr(tensor_files, "OPEN_FILES", 3)
    tensors = [ReadFile(path).get_tensor("F32") for _ in range(9)]
    assert count() == 3
    assert all(same(tensor[:], tensors[0][:]) for tensor in tensors)
    assert count() == 3
    tensors.clear()
    assert count() == 0


# Damaged headers


def header(text: str, data: int = 8) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + b"\0" * data


def one(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0, 8]") -> bytes:
    return header(f'{{"x": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}}}')


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 20,
        header("{", 0),
        header("[]"),
        header('{"x": 1}'),
        header('{"__metadata__": 7}'),
        header("[" * 100_000),
        one(dtype='"F4"'),
        one(dtype="[]"),
        one(shape="[]", offsets="[0, 4]"),
        one(shape="[3]", offsets="[0, 12]"),
        one(shape="[3]"),
        one(shape="[-1, -2]"),
        one(shape="[2.0]"),
        one(shape='["2"]'),
        one(offsets="[-8, 0]"),
        one(offsets="[0]"),
    ],
)
def test_a_damaged_header_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(SafetensorError, match="its header"):
        ReadFile(tmp_path / "a")


def test_a_tensor_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(one())
    assert len(ReadFile(tmp_path / "a").get_tensor("x")) == 2
    with pytest.raises(SafetensorError, match="no tensor 'y'"):
        ReadFile(tmp_path / "a").get_tensor("y")

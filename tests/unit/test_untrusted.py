"""Reading within limits: each refusal is one sentence that says what was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sedem.errors import DataError
from sedem.untrusted import (
    DEPTH,
    YAML_BYTES,
    exists,
    is_folder,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_text,
)


def test_a_file_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text('{"a": [1, 2.5, "ä"]}', "utf-8")
    assert (
        read_json(path, DataError)
        == parse_yaml(path.read_text(), "it is", DataError)
        == {"a": [1, 2.5, "ä"]}
    )
    assert read_text(path, DataError, 100).encode() == read_bytes(path, DataError, 100)


def test_files_are_refused_in_a_sentence_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(b"12345678901")
    for name, words in (
        ("pipe", "pipe' is a pipe; give a file"),
        ("long", "has 11 bytes, at most 10 bytes are read"),
        ("n" * 300, "cannot be read: "),
        ("a\0b", "cannot be read: "),
    ):
        with pytest.raises(DataError, match=words):
            read_bytes(tmp_path / name, DataError, 10)
    for name in ("n" * 300, "a\0b"):
        assert not is_folder(tmp_path / name) and not exists(tmp_path / name)
    with pytest.raises(FileNotFoundError):  # what it was needed for, only the caller knows
        read_bytes(tmp_path / "missing", DataError, 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "x is not JSON: .* at column 2"),
        ("[\n1,]", "x is not JSON: .* at line 2, column 3"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "x has an object with the key 'c' twice"),
        ("[" * 100_000, f"x nests lists or objects more than {DEPTH} deep"),
        ("[" * (DEPTH + 2) + "]" * (DEPTH + 2), f"x nests lists or objects more than {DEPTH} deep"),
        ("1" * 5000, "x has a number with too many digits; shorten it"),
    ],
)
def test_json_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        parse_json(text, "x", DataError)


def test_the_deepest_values_are_read() -> None:
    text = "[" * DEPTH + "]" * DEPTH
    assert parse_json(text, "x", DataError) == parse_yaml(text, "x is", DataError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "x is not YAML: "),
        ("a: &b 1\nc: *b", "aliases .* are not read"),
        ("- " * 200 + "1", f"nests more than {DEPTH} deep"),
        ("a: 2024-99-99", r"a value cannot be read \(month must be"),
        ("x" * (YAML_BYTES + 1), "x is YAML of more than 32,768 characters"),
        ("--- 1\n--- 2", "expected a single document"),
        ("a: {}\nb:\n- {c: 1, d: 2, c: 2}", "x is not YAML: key 'c' is given 2 times; keep one"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_yaml_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        parse_yaml(text, "x is", DataError)
    assert "\n" not in str(caught.value)

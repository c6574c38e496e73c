"""Sources of a build on many machines: files, records and objects; Ray is not started here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest
from document_files import pdf_of
from object_server import ObjectServer
from pyarrow import parquet

from sedem import Document
from sedem.errors import DataError
from sedem_serve.ray import sources as reading
from sedem_serve.ray.sources import SourceFile, Sources, rows_of


def file_at(path: Path) -> SourceFile:
    return SourceFile(path.name, str(path), path.stat().st_size)


def test_folders_hold_documents_and_records_and_files_are_taken_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c.jsonl", "sub/d.parquet", "e.zip", "f.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = Sources([str(tmp_path), str(tmp_path / "b.txt")])
    assert [Path(file.place).name for file in found.files] == [
        "a.md",
        "b.txt",
        "c.jsonl",
        "d.parquet",
    ]
    assert found.total == 16


def test_files_that_cannot_be_read_are_refused_or_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.xyz").write_text("text")
    names = [str(tmp_path / name) for name in ("a.txt", "b.xyz", "none.jsonl")]
    with pytest.raises(DataError, match=r"b\.xyz' is of the type '\.xyz'"):
        Sources(names, strict=True)
    found = Sources(names)
    assert [Path(file.place).name for file in found.files] == ["a.txt"]
    assert [sentence.partition("/")[0] for sentence in found.failed] == ["'", "there is no file '"]
    with pytest.raises(DataError, match="there is nothing to read"):
        Sources([])


def test_a_file_is_a_document_under_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf_of(["one", "two"]))
    [row] = rows_of(SourceFile("texts/a.pdf", str(tmp_path / "a.pdf"), 9))
    assert row == (Document("texts/a.pdf", "one\n\ntwo", (0, 5)), 9)
    (tmp_path / "b.txt").write_bytes("ä".encode("latin-1"))
    file = SourceFile("texts/b.txt", str(tmp_path / "b.txt"), 1)
    [(document, _)] = rows_of(file)
    assert document == Document("texts/b.txt", "ä") and not isinstance(document, str)
    assert document.notes == ("'texts/b.txt' does not say its encoding; it was read as cp1252",)
    [(error, _)] = rows_of(file, "utf-8")
    assert str(error).partition(";")[0] == "'texts/b.txt' is not utf-8 text (byte 0)"
    assert rows_of(file, "latin-1") == [(document, 1)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_records_are_documents(kind: str, tmp_path: Path) -> None:
    records = [{"name": "first", "text": "One."}, {"text": "Two."}, {"name": "empty", "text": " "}]
    path = tmp_path / f"r.{kind}"
    lines = "\n".join(json.dumps(record) for record in records)
    if kind == "parquet":
        named = [{"name": f"r.{kind}#2", **record} for record in records]
        parquet.write_table(pa.Table.from_pylist(named), path)
    elif kind == "jsonl":
        path.write_text(lines)
    else:
        path.write_bytes(gzip.compress(lines.encode()))
    first, second, third = rows_of(file_at(path))
    assert first == (Document("first", "One."), 4)
    assert second == (Document(f"r.{kind}#2", "Two."), 4)
    assert str(third[0]).startswith(f"'r.{kind}', record 3: document 'empty' holds no text")


def test_a_damaged_line_ends_its_file_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"text": "One."}\n{"text": \n{"text": "Three."}\n')
    first, second = rows_of(file_at(tmp_path / "r.jsonl"))
    assert first == (Document("r.jsonl#1", "One."), 4)
    assert str(second[0]).startswith("'r.jsonl', line 2")


def test_several_files_are_read_at_once_and_yielded_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"Line {n}."}) for n in range(5)]
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, "{}"]))
    for name in "acde":
        (tmp_path / f"{name}.txt").write_text(f"Text of {name}.")
    both, together = Barrier(2, timeout=60), reading.parse_file

    def parse_file(path: Path, *given: Any) -> Any:
        if path.name in ("a.txt", "c.txt"):
            both.wait()
        return together(path, *given)

    monkeypatch.setattr(reading, "parse_file", parse_file)
    monkeypatch.setattr(reading, "AHEAD", 3)
    found = Sources([str(tmp_path)])
    names = [Path(document.name).name for document in found]
    assert names == ["a.txt", *(f"b.jsonl#{n}" for n in range(1, 6)), "c.txt", "d.txt", "e.txt"]
    [failed] = found.failed
    assert failed.endswith("b.jsonl', record 6 needs 'text', and 'name' if given, as strings")
    assert found.sizes[f"{tmp_path}/a.txt"] == 10


def test_objects_are_listed_and_read(server: ObjectServer, tmp_path: Path) -> None:
    place = server.place()
    parquet.write_table(pa.table({"text": ["One.", "Two."]}), tmp_path / "c.parquet")
    server.put(place, "b/a.txt", b"text of a")
    server.put(place, "b/c.parquet", (tmp_path / "c.parquet").read_bytes())
    server.put(place, "b/d.bin", b"1,2")
    found = Sources([place])
    assert [file.name for file in found.files] == [f"{place}/b/a.txt", f"{place}/b/c.parquet"]
    assert [*found] == [
        Document(f"{place}/b/a.txt", "text of a"),
        Document(f"{place}/b/c.parquet#1", "One."),
        Document(f"{place}/b/c.parquet#2", "Two."),
    ]
    assert Sources([f"{place}/b/a.txt"]).total == 9
    with pytest.raises(DataError, match=r"none' holds no file that can be read \(\.txt"):
        Sources([f"{place}/none"])
    server.delete(place, "b/a.txt")
    removed = f"'{place}/b/a.txt' was removed or changed; build again"
    assert rows_of(found.files[0]) == [(removed, 0)]

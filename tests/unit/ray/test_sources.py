"""Sources of a build on many machines: files, records and objects; Ray is not started here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from document_files import pdf_of
from object_server import ObjectServer
from pyarrow import parquet

from sedem import Document
from sedem.errors import DataError
from sedem_serve.ray import sources as reading
from sedem_serve.ray.sources import Row, SourceFile, Sources, rows_of


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
    assert row == Row(Document("texts/a.pdf", "one\n\ntwo", (0, 5)), 9)
    (tmp_path / "b.txt").write_bytes("ä".encode("latin-1"))
    [row] = rows_of(SourceFile("texts/b.txt", str(tmp_path / "b.txt"), 1))
    assert row.document == Document("texts/b.txt", "ä")
    assert row.document.notes == ("'texts/b.txt' does not say its encoding; it was read as cp1252",)
    [row] = rows_of(SourceFile("texts/b.txt", str(tmp_path / "b.txt"), 1), "utf-8")
    assert row.error.partition(";")[0] == "'texts/b.txt' is not utf-8 text (byte 0)"
    [row] = rows_of(SourceFile("texts/b.txt", str(tmp_path / "b.txt"), 1), "latin-1")
    assert row.document == Document("texts/b.txt", "ä")


def test_a_file_that_only_the_driver_has_is_told_as_such(tmp_path: Path) -> None:
    [row] = rows_of(SourceFile("a.txt", str(tmp_path / "a.txt"), 1))
    assert row.error.startswith("'a.txt' is not on host '") and "object store" in row.error


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
    assert first == Row(Document("first", "One."), 4)
    assert second == Row(Document(f"r.{kind}#2", "Two."), 4)
    assert third.error.startswith(f"'r.{kind}', record 3: document 'empty' holds no text")


def test_a_damaged_line_ends_its_file_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"text": "One."}\n{"text": \n{"text": "Three."}\n')
    first, second = rows_of(file_at(tmp_path / "r.jsonl"))
    assert first.document == Document("r.jsonl#1", "One.")
    assert second.error.startswith("'r.jsonl', line 2")


def test_small_files_are_read_together_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "GROUP_BYTES", 10)
    monkeypatch.setattr(reading, "GROUP_FILES", 3)
    files = [SourceFile(str(n), str(n), size) for n, size in enumerate([1, 2, 3, 4, 20, 5, 5, 1])]
    groups = [[file.size for file in group] for group in reading._groups(files)]
    assert groups == [[1, 2, 3], [4], [20], [5, 5], [1]]


def test_a_task_hands_over_a_few_characters_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_CHARACTERS", 8)
    lines = [json.dumps({"name": str(n), "text": "four"}) for n in range(5)]
    (tmp_path / "r.jsonl").write_text("\n".join([*lines, "{}"]))
    group = json.dumps([["r.jsonl", str(tmp_path / "r.jsonl"), 1]])
    batches = list(reading._read_batch({"files": [group]}, "utf-8"))
    assert [len(batch["row"]) for batch in batches] == [2, 2, 2]
    rows = [json.loads(row) for batch in batches for row in batch["row"]]
    assert [row[0] for row in rows[:5]] == [[str(n), "four", [], []] for n in range(5)]
    assert rows[5][2] == "'r.jsonl', record 6 needs 'text', and 'name' if given, as strings"


def test_objects_are_listed_and_read(server: ObjectServer, tmp_path: Path) -> None:
    place = server.place()
    parquet.write_table(pa.table({"text": ["One.", "Two."]}), tmp_path / "c.parquet")
    server.put(place, "b/a.txt", b"text of a")
    server.put(place, "b/c.parquet", (tmp_path / "c.parquet").read_bytes())
    server.put(place, "b/d.bin", b"1,2")
    found = Sources([place])
    assert [file.name for file in found.files] == [f"{place}/b/a.txt", f"{place}/b/c.parquet"]
    documents = [row.document for file in found.files for row in rows_of(file)]
    assert documents == [
        Document(f"{place}/b/a.txt", "text of a"),
        Document(f"{place}/b/c.parquet#1", "One."),
        Document(f"{place}/b/c.parquet#2", "Two."),
    ]
    assert Sources([f"{place}/b/a.txt"]).total == 9
    with pytest.raises(DataError, match=r"none' holds no file that can be read \(\.txt"):
        Sources([f"{place}/none"])
    server.delete(place, "b/a.txt")
    [row] = rows_of(found.files[0])
    assert row.error == f"'{place}/b/a.txt' was removed or changed; build again"

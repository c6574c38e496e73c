"""Uploads: their limits, and what an interrupted or rejected one leaves."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from fastapi.testclient import TestClient
from unit.serve.conftest import finish, read_all

from sedem import SeDeM
from sedem.serve import uploads
from sedem.serve.building import Builder
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.settings import Settings

URL = "/v1/banks/new/documents"
FORM = {"Content-Type": "multipart/form-data; boundary=edge"}
PART = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'


def left(settings: Settings) -> list[Path]:
    return list((settings.folder / "uploads").iterdir())


def test_a_file_over_the_limit_is_rejected(
    make_client: Callable[..., TestClient], settings: Settings
) -> None:
    client = make_client(max_file_bytes=1000)
    assert client.post(URL, files={"file": ("a.txt", b"x" * 1000)}).status_code == 202
    read_all(client, "new")
    answer = client.post(URL, files={"file": ("a.txt", b"x" * 1_000_000)})
    assert answer.status_code == 413
    assert left(settings) == []


def test_what_is_no_upload_leaves_nothing(client: TestClient, settings: Settings) -> None:
    for headers, body, words in [
        (FORM, PART + b"half of a f", "no file"),
        (FORM, PART.replace(b"edge", b"other") + b"text", "invalid multipart"),
        (FORM, PART.replace(b'name="file"; ', b"") + b"text\r\n--edge--", '"name" must be'),
        (FORM, b"--edge--\r\n", "no file"),
        ({"Content-Type": "multipart/form-data"}, b"", "missing boundary"),
        ({"Content-Type": "application/json"}, b"{}", "is not multipart"),
        (FORM, PART + b"\r\n--edge--\r\n", "is empty"),
    ]:
        answer = client.post(URL, content=body, headers=headers)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert left(settings) == []
        assert client.get("/v1/banks").json()["data"] == []


def test_a_full_disk_is_reported(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uploads, "sync_folder", full)
    answer = client.post(URL, files={"file": ("a.txt", b"text")})
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "insufficient_storage"
    assert left(settings) == []
    monkeypatch.undo()
    assert client.post(URL, files={"file": ("a.txt", b"text")}).status_code == 202


EARLIER = """
DROP TABLE uploads; DROP TABLE removals; DROP TABLE banks;
CREATE TABLE banks (id INTEGER PRIMARY KEY, name TEXT UNIQUE, title TEXT, metadata TEXT,
    folder TEXT, created_at INTEGER);
CREATE TABLE files (id TEXT PRIMARY KEY, bytes INTEGER);
CREATE TABLE bank_files (id INTEGER PRIMARY KEY, bank INTEGER, file TEXT REFERENCES files,
    name TEXT, round INTEGER, status TEXT, error TEXT, characters INTEGER);
CREATE TABLE removals (id INTEGER PRIMARY KEY, bank INTEGER, name TEXT);
CREATE TABLE trash (folder TEXT);
INSERT INTO banks VALUES (1, 'flat', 'My flat', '{}', 'flat-00000000.bank', 7);
INSERT INTO files VALUES ('file-000000000000000000000001', 10),
    ('file-000000000000000000000002', 1), ('file-000000000000000000000003', 1);
INSERT INTO bank_files VALUES
    (1, 1, 'file-000000000000000000000001', 'old.txt', 1, 'completed', NULL, 9),
    (2, 1, 'file-000000000000000000000002', 'broken.pdf', 2, 'failed', 'it is broken', 0),
    (3, 1, 'file-000000000000000000000003', 'lease.txt', 2, 'in_progress', NULL, 0);
PRAGMA user_version = 1;
"""


def test_uploads_of_an_earlier_release_are_read(settings: Settings, model: SeDeM) -> None:
    Library(settings, model).close()
    with sqlite3.connect(settings.folder / "server.sqlite") as connection:
        connection.executescript(EARLIER)
    connection.close()
    files = settings.folder / "files"
    files.mkdir()
    (files / "file-000000000000000000000001").write_text(RECIPE)
    (files / "file-000000000000000000000003").write_text(LEASE)
    library = Library(settings, model)
    entry = library.get("flat")
    assert (entry.status, entry.created_at) == ("building", 7)
    finish(Builder(library, model, Metrics()))
    assert entry.bank is not None and entry.bank.documents[0].text == LEASE
    progress = entry.progress()
    assert (progress.status, progress.files, progress.files_done) == ("ready", 2, 2)
    assert [(one.filename, one.error) for one in progress.failed] == [
        ("broken.pdf", "it is broken")
    ]
    # The bytes of files that were read stay for their owner.
    assert [path.name for path in files.iterdir()] == ["file-000000000000000000000001"]
    library.close()

"""Uploaded files: whose they are, their limits, and what an interrupted upload leaves."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LEASE
from fastapi.testclient import TestClient
from serving import READER, SCOPED, bearer
from unit.serve.waiting import read_all

from sedem.serve import uploads
from sedem.serve.settings import Settings

FORM = {"Content-Type": "multipart/form-data; boundary=edge"}
PART = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'


def create(client: TestClient, name: str = "a.txt", text: bytes = b"text", **kwargs: object) -> str:
    answer = client.post("/v1/files", files={"file": (name, text)}, **kwargs)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def left(settings: Settings) -> list[str]:
    return [path.name for path in (settings.folder / "files").iterdir()]


def test_files_belong_to_the_key_that_uploaded_them(client: TestClient) -> None:
    id = create(client)
    other = bearer(SCOPED)
    assert client.get("/v1/files", headers=other).json()["data"] == []
    for method, url in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = client.request(method, f"/v1/files/{id}{url}", headers=other)
        assert answer.status_code == 404
    for body in ({"name": "mine-1", "file_ids": [id]}, {"name": "not-mine"}):
        answer = client.post("/v1/vector_stores", json=body, headers=other)
        assert answer.status_code in (403, 404)
    assert client.get("/v1/banks", headers=other).json()["data"] == []
    assert client.post("/v1/files", headers=bearer(READER)).status_code == 403
    assert client.get(f"/v1/files/{id}/content").content == b"text"


def test_a_deleted_file_leaves_its_banks_and_the_disk(
    client: TestClient, settings: Settings
) -> None:
    id = create(client, "lease.txt", LEASE.encode())
    client.post("/v1/vector_stores", json={"name": "flat", "file_ids": [id]})
    assert read_all(client, "flat")["status"] == "ready"
    assert client.delete(f"/v1/files/{id}").json()["deleted"] is True
    assert client.get("/v1/banks/flat/documents").json()["data"] == []
    assert client.get("/v1/banks/flat").json()["status"] == "empty"
    assert left(settings) == []


def test_a_file_over_the_limit_is_refused_and_leaves_nothing(
    make_client: Callable[..., TestClient], settings: Settings
) -> None:
    client = make_client(max_file_bytes=1000)
    assert create(client, text=b"x" * 1000)
    before = left(settings)
    for size in (1001, 1_000_000):
        answer = client.post("/v1/files", files={"file": ("a.txt", b"x" * size)})
        assert answer.status_code == 413
    assert left(settings) == before


@pytest.mark.parametrize(
    ("headers", "body", "words"),
    [
        (FORM, PART + b"half of a f", "ends in the middle"),
        (FORM, PART.replace(b"edge", b"other") + b"text", "is not multipart"),
        (FORM, PART.replace(b'name="file"; ', b"") + b"text\r\n--edge--", "no name"),
        (FORM, b"--edge--\r\n", "no file"),
        ({"Content-Type": "multipart/form-data"}, b"", "is not multipart"),
        ({"Content-Type": "application/json"}, b"{}", "is not multipart"),
        (FORM, PART + b"x\r\n" + PART + b"y\r\n--edge--\r\n", "more than 1 file"),
        (FORM, PART + b"\r\n--edge--\r\n", "is empty"),
    ],
)
def test_what_is_no_whole_upload_leaves_nothing(
    client: TestClient, settings: Settings, headers: dict[str, str], body: bytes, words: str
) -> None:
    answer = client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert left(settings) == []


def test_a_full_disk_is_told(
    client: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(uploads, "atomic_write", full)
    answer = client.post("/v1/files", files={"file": ("a.txt", b"text")})
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "insufficient_storage"
    assert left(settings) == []
    monkeypatch.undo()
    assert create(client)


def test_lists_are_paged_through(client: TestClient) -> None:
    ids = [create(client, f"{number}.txt") for number in range(5)]
    first = client.get("/v1/files?order=asc&limit=2").json()
    assert [one["id"] for one in first["data"]] == ids[:2]
    assert first["has_more"] is True
    rest = client.get(f"/v1/files?order=asc&after={first['last_id']}").json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (ids[2:], False)
    assert client.get("/v1/files?after=nothing").status_code == 400
    assert client.get("/v1/files?limit=0").status_code == 400

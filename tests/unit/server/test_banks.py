"""Uploading to a bank, watching it, looking into it; what an interrupted upload leaves."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import LEASE, RECIPE
from document_files import docx_of, pdf_of
from docx import Document
from fastapi.testclient import TestClient
from unit.server.conftest import read_all, send

from sedem import MemoryBank, SeDeM, types
from sedem.reading import building as building
from sedem_serve.server import library
from sedem_serve.server.served import document_name, file_name
from sedem_serve.server.settings import ServerSettings


def word(text: str) -> bytes:
    document = Document()
    document.add_paragraph(text)
    return docx_of(document)


@pytest.fixture
def lease(client: TestClient) -> TestClient:
    assert send(client, "flat", {"lease.txt": LEASE}).status_code == 202
    read_all(client, "flat")
    return client


def test_uploaded_files_become_documents(client: TestClient) -> None:
    files = {
        "lease.txt": LEASE,
        "recipe.md": RECIPE,
        "page.html": "<p>One</p><p>Two</p>",
        "two pages.pdf": pdf_of(["First page", "Second page"]),
        "letter.docx": word("Dear tenant"),
    }
    answer = send(client, "papers", files)
    assert answer.status_code == 202
    assert answer.json()["files"] == 5
    with client.stream("GET", "/v1/banks/papers/progress?stream=true") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    progress = client.get("/v1/banks/papers/progress").json()
    assert json.loads(lines[-1].removeprefix("data: ")) == progress
    assert (progress["status"], progress["files_done"], progress["error"]) == ("ready", 5, None)
    assert progress["characters_done"] == progress["characters"] > 0
    listed = client.get("/v1/banks/papers/documents").json()["data"]
    assert [one["name"] for one in listed] == [*files]
    assert sum(one["blocks"] for one in listed) == progress["blocks"]
    pdf = client.get("/v1/banks/papers/documents/3").json()
    assert pdf["text"] == "First page\n\nSecond page"
    assert pdf["pages"] == [0, 12]
    described = client.get("/v1/banks/papers").json()
    assert (described["status"], described["documents"]) == ("ready", 5)
    assert described["read_only"] is False


def test_damaged_files_do_not_stop_the_others(client: TestClient) -> None:
    broken = {"broken.pdf": b"%PDF-1.4 and no more"}
    send(client, "mixed", broken)
    assert read_all(client, "mixed")["status"] == "failed"
    assert "broken.pdf" in client.get("/v1/banks/mixed").json()["error"]
    latin = "Grüße".encode("latin-1")
    send(client, "mixed", broken | {"lease.txt": LEASE, "latin.txt": latin, "blank.txt": " \n "})
    progress = read_all(client, "mixed")
    assert progress["status"] == "ready"
    failed = {one["filename"]: one["error"] for one in progress["failed"]}
    assert set(failed) == {"broken.pdf", "blank.txt"}
    assert "cannot be read as PDF" in failed["broken.pdf"]
    assert progress["notes"] == ["'latin.txt' does not say its encoding; it was read as cp1252"]
    assert "holds no text" in failed["blank.txt"]
    assert [d["name"] for d in client.get("/v1/banks/mixed/documents").json()["data"]] == [
        "lease.txt",
        "latin.txt",
    ]


def test_what_cannot_be_read_is_refused_at_once(
    make_client: Callable[..., TestClient], settings: ServerSettings
) -> None:
    client = make_client(max_documents=3)
    texts = {f"{number}.txt": "x" for number in range(4)}
    for bank, files, words in [
        ("Upper", {"a.txt": "x"}, "cannot name a bank"),
        ("flat", {"a.exe": "x"}, "files can be read"),
        ("flat", {"a.txt": ""}, "is empty"),
        ("flat", {"x" * 300 + ".txt": "x"}, "shorten it"),
        ("flat", texts, "maximum number of files is 3"),
        ("flat", {"a.txt": "one", " a.txt": "two"}, "2 files are named 'a.txt'"),
    ]:
        answer = send(client, bank, files)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert list((settings.folder / "uploads").iterdir()) == []
    assert client.get("/v1/banks").json() == {"object": "list", "data": [], "writable": True}
    # A bank has a limit, too; a document that is replaced does not count twice.
    send(client, "flat", {"a.txt": "one", "b.txt": "two", "c.txt": "three"})
    assert send(client, "flat", {"a.txt": "four"}).status_code == 202
    answer = send(client, "flat", {"d.txt": "five"})
    assert answer.status_code == 400
    assert "at most 3 are allowed" in answer.json()["error"]["message"]


def test_documents_are_replaced_and_deleted(lease: TestClient, settings: ServerSettings) -> None:
    def names() -> list[str]:
        return [one["name"] for one in lease.get("/v1/banks/flat/documents").json()["data"]]

    answer = send(lease, "flat", {"lease.txt": RECIPE, "recipe.txt": LEASE}).json()
    assert answer["replaced"] == ["lease.txt"]
    assert read_all(lease, "flat")["files"] == 2
    assert names() == ["lease.txt", "recipe.txt"]
    url = "/v1/banks/flat/documents/0"
    assert lease.get(url).json()["text"] == RECIPE
    assert lease.delete(f"{url}?name=recipe.txt").status_code == 409
    assert lease.delete(f"{url}?name=lease.txt").json()["deleted"] is True
    assert names() == ["recipe.txt"]
    assert lease.delete("/v1/banks/flat/documents/1").status_code == 404
    assert lease.delete("/v1/banks/flat").json()["deleted"] is True
    assert lease.get("/v1/banks/flat").status_code == 404
    assert [*(settings.folder / "uploads").iterdir()] == []
    assert [*(settings.folder / "banks").glob("*.files")] == []


def test_a_deleted_bank_stops_being_built(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, settings: ServerSettings
) -> None:
    reading, go, read = threading.Event(), threading.Event(), building.encode

    def slow(*args: Any) -> Any:
        reading.set()
        assert go.wait(10)
        args[3](0, 1)
        return read(*args)

    monkeypatch.setattr(building, "encode", slow)
    send(client, "flat", {"lease.txt": LEASE})
    assert reading.wait(20)
    assert client.delete("/v1/banks/flat").status_code == 200
    monkeypatch.setattr(building, "encode", read)
    go.set()
    send(client, "other", {"lease.txt": LEASE})
    assert read_all(client, "other")["status"] == "ready"
    assert [bank["name"] for bank in client.get("/v1/banks").json()["data"]] == ["other"]
    assert len(list((settings.folder / "banks").glob("*.bank"))) == 1


def test_scores_of_every_block(lease: TestClient, model: SeDeM) -> None:
    found = lease.post("/v1/banks/flat/scores", json={"question": "How much is the rent?"})
    data = found.json()["data"]
    bank = lease.app.state.lifecycle.service.library.get("flat").bank  # type: ignore[attr-defined]
    scores = model.scores(bank, "How much is the rent?").tolist()
    assert [one["score"] for one in data] == pytest.approx(scores)
    assert [(one["start"], one["end"]) for one in data] == [
        (block.start, block.end) for block in bank.blocks
    ]
    for body in ({"question": " "}, {"question": "x" * 9000}, {}, {"question": "\ud800"}):
        assert lease.post("/v1/banks/flat/scores", content=json.dumps(body)).status_code == 400
    # A large text is paged through.
    part = lease.get("/v1/banks/flat/documents/0?start=100&end=120").json()
    assert part["text"] == LEASE[100:120]
    whole = lease.get("/v1/banks/flat/documents/0").json()
    assert part["spans"] == [one for one in whole["spans"] if one[0] < 120 and one[1] > 100]
    assert len(whole["spans"]) > len(part["spans"]) > 0


def test_banks_of_the_operator_are_only_asked(
    make_client: Callable[..., TestClient], bank: MemoryBank, tmp_path: Path, model: SeDeM
) -> None:
    folder = tmp_path / "given.bank"
    bank.save(folder)
    client = make_client(banks={"given": folder})
    assert client.get("/v1/banks/given").json()["read_only"] is True
    for answer in (
        send(client, "given", {"a.txt": "x"}),
        client.delete("/v1/banks/given"),
        client.delete("/v1/banks/given/documents/0"),
    ):
        assert answer.status_code == 403
        assert "given by the operator" in answer.json()["error"]["message"]
    building.build_bank(model, model.engine, folder, [types.Document("new.txt", LEASE)])
    library = client.app.state.lifecycle.service.library  # type: ignore[attr-defined]
    library.get("given").refresh()
    assert client.get("/v1/banks/given").json()["documents"] == 3


URL = "/v1/banks/new/documents"
FORM = {"Content-Type": "multipart/form-data; boundary=edge"}
PART = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'


def test_what_is_no_upload_leaves_nothing(client: TestClient, settings: ServerSettings) -> None:
    uploads = settings.folder / "uploads"
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
        assert [*uploads.iterdir()] == client.get("/v1/banks").json()["data"] == []


def test_a_full_disk_is_reported_and_one_line_of_the_log(
    client: TestClient,
    settings: ServerSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(library.os, "fsync", full)
    answer = client.post(URL, files={"file": ("a.txt", b"text")})
    assert answer.status_code == 507
    assert answer.json()["error"]["code"] == "insufficient_storage"
    assert [*(settings.folder / "uploads").iterdir()] == []
    # What the server writes at its own times meets the full disk, too.
    lines = [record for record in caplog.records if record.getMessage() == "failed"]
    told = [str(line.fields.get("reason")) for line in lines]  # type: ignore[attr-defined]
    assert any("the disk of the server is full" in reason for reason in told)
    assert not any(line.exc_info for line in lines)
    monkeypatch.undo()
    assert client.post(URL, files={"file": ("a.txt", b"text")}).status_code == 202


NAMES = [
    "a.txt", "../../etc/passwd.txt", ".hidden.txt", "~$a.txt", "a%/b%2E.txt", "C:\\x y.txt",
    "\u00fc" * 250 + ".txt", "\U0001f967" * 200 + ".txt", "b" * 200, "b" * 201, "b" * 199,
]  # fmt: skip


def test_every_name_is_one_file_of_the_folder_and_no_path(
    client: TestClient, settings: ServerSettings
) -> None:
    files = [file_name(name) for name in NAMES]
    assert [document_name(file) for file in files] == NAMES
    places = [Path("folder", file) for file in files]
    assert len({*places}) == len(NAMES)
    # None is a folder of another one, and each part is a name on every disk.
    assert not {parent for place in places for parent in place.parents} & {*places}
    for file in files:
        for part in file.split("/"):
            assert part.isascii() and len(part) < 250 and part.strip(".") and part[0] != "/"
    # Those that are no paths are read and deleted.
    named = [f"{name.removesuffix('.txt')}.txt" for name in NAMES if "\\" not in name]
    named = [name for name in dict.fromkeys(named) if "/" not in name]
    send(client, "odd", {name: f"The text of file {n}." for n, name in enumerate(named)})
    progress = read_all(client, "odd")
    assert (progress["status"], progress["failed"]) == ("ready", [])
    listed = client.get("/v1/banks/odd/documents").json()["data"]
    assert {one["name"] for one in listed} == {*named}
    for _ in named:
        assert client.delete("/v1/banks/odd/documents/0").status_code == 200
    assert client.get("/v1/banks/odd/documents").json()["data"] == []
    files = (settings.folder / "banks").rglob("*.txt*")
    assert [path for path in files if path.is_file()] == []


def test_a_file_that_is_put_into_the_folder_is_read_and_one_that_is_taken_leaves(
    lease: TestClient, settings: ServerSettings
) -> None:
    [folder] = (settings.folder / "banks").glob("flat-*.files")
    (folder / "put.txt").write_text("The dog sleeps.")
    (folder / "lease.txt").unlink()
    library = lease.app.state.lifecycle.service.library  # type: ignore[attr-defined]
    library.get("flat").next_turn = 0.0
    library.work.set()
    until = time.monotonic() + 60
    while True:
        listed = lease.get("/v1/banks/flat/documents").json()["data"]
        if [one["name"] for one in listed] == ["put.txt"]:
            return
        assert time.monotonic() < until, listed
        time.sleep(0.05)


def test_a_failed_replacement_leaves_the_document(lease: TestClient) -> None:
    send(lease, "flat", {"lease.txt": b"\0\1\2"})
    progress = read_all(lease, "flat")
    assert [one["filename"] for one in progress["failed"]] == ["lease.txt"]
    assert lease.get("/v1/banks/flat/documents/0").json()["text"] == LEASE
    assert lease.delete("/v1/banks/flat/documents/0").status_code == 200
    assert lease.get("/v1/banks/flat/documents").json()["data"] == []

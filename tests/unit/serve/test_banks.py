"""Uploading to a bank, watching it, looking into it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import LEASE, RECIPE
from document_files import docx_of, pdf_of
from docx import Document
from fastapi.testclient import TestClient
from serving import READER, bearer
from unit.serve.waiting import read_all

from sedem import MemoryBank, SeDeM, types
from sedem.reading import building as building
from sedem.serve.settings import Settings

Named = Sequence[tuple[str, bytes]]


def send(client: TestClient, bank: str, *files: tuple[str, bytes], **kwargs: Any) -> Any:
    parts = [("file", file) for file in files]
    return client.post(f"/v1/banks/{bank}/documents", files=parts, **kwargs)


def word(text: str) -> bytes:
    document = Document()
    document.add_paragraph(text)
    return docx_of(document)


@pytest.fixture
def lease(client: TestClient) -> TestClient:
    assert send(client, "flat", ("lease.txt", LEASE.encode())).status_code == 202
    read_all(client, "flat")
    return client


def test_uploaded_files_become_documents(client: TestClient) -> None:
    files = [
        ("lease.txt", LEASE.encode()),
        ("recipe.md", RECIPE.encode()),
        ("page.html", b"<p>One</p><p>Two</p>"),
        ("two pages.pdf", pdf_of(["First page", "Second page"])),
        ("letter.docx", word("Dear tenant")),
    ]
    answer = send(client, "papers", *files)
    assert answer.status_code == 202
    assert answer.json()["files"] == 5
    progress = read_all(client, "papers")
    assert (progress["status"], progress["files_done"], progress["error"]) == ("ready", 5, None)
    assert progress["characters_done"] == progress["characters"] > 0
    listed = client.get("/v1/banks/papers/documents").json()["data"]
    assert [one["name"] for one in listed] == [name for name, _ in files]
    assert sum(one["blocks"] for one in listed) == progress["blocks"]
    pdf = client.get("/v1/banks/papers/documents/3").json()
    assert pdf["text"] == "First page\n\nSecond page"
    assert pdf["pages"] == [0, 12]
    described = client.get("/v1/banks/papers").json()
    assert (described["status"], described["documents"]) == ("ready", 5)
    assert described["read_only"] is False


def test_progress_is_streamed_until_the_bank_is_ready(client: TestClient) -> None:
    send(client, "flat", ("lease.txt", LEASE.encode()))
    with client.stream("GET", "/v1/banks/flat/progress?stream=true") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert (last["status"], last["files_done"], last["files"]) == ("ready", 1, 1)


def test_damaged_files_do_not_stop_the_others(client: TestClient) -> None:
    send(
        client,
        "mixed",
        ("broken.pdf", b"%PDF-1.4 and no more"),
        ("lease.txt", LEASE.encode()),
        ("latin.txt", "Grüße".encode("latin-1")),
        ("blank.txt", b" \n "),
    )
    progress = read_all(client, "mixed")
    assert progress["status"] == "ready"
    failed = {one["filename"]: one["error"] for one in progress["failed"]}
    assert set(failed) == {"broken.pdf", "latin.txt", "blank.txt"}
    assert "cannot be read as PDF" in failed["broken.pdf"]
    assert failed["latin.txt"] == "'latin.txt' is not utf-8 text (byte 2); save it as UTF-8"
    assert "holds no text" in failed["blank.txt"]
    assert [d["name"] for d in client.get("/v1/banks/mixed/documents").json()["data"]] == [
        "lease.txt"
    ]


def test_a_bank_whose_files_all_fail_has_failed(client: TestClient) -> None:
    send(client, "broken", ("broken.docx", b"PK no archive"))
    assert read_all(client, "broken")["status"] == "failed"
    assert "broken.docx" in client.get("/v1/banks/broken").json()["error"]
    send(client, "broken", ("lease.txt", LEASE.encode()))
    assert read_all(client, "broken")["status"] == "ready"


def test_the_same_name_replaces_the_document(lease: TestClient) -> None:
    answer = send(lease, "flat", ("lease.txt", RECIPE.encode())).json()
    assert answer["replaced"] == ["lease.txt"]
    assert read_all(lease, "flat")["files"] == 1
    listed = lease.get("/v1/banks/flat/documents").json()["data"]
    assert [one["name"] for one in listed] == ["lease.txt"]
    assert lease.get("/v1/banks/flat/documents/0").json()["text"] == RECIPE
    # The bytes of the first one are gone with it.


def test_two_files_of_one_name_are_refused(client: TestClient, settings: Settings) -> None:
    answer = send(client, "flat", ("a.txt", b"one"), ("a.txt", b"two"))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("2 files are named 'a.txt'")
    assert client.get("/v1/banks").json() == {"object": "list", "data": [], "writable": True}
    assert client.get("/v1/banks", headers=bearer(READER)).json()["writable"] is False
    assert list((settings.folder / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    ("bank", "files", "words"),
    [
        ("Upper", [("a.txt", b"x")], "cannot name a bank"),
        ("flat", [("a.exe", b"x")], "files can be read"),
        ("flat", [("a.txt", b"")], "is empty"),
        ("flat", [("x" * 300 + ".txt", b"x")], "shorten it"),
        ("flat", [(f"{n}.txt", b"x") for n in range(4)], "maximum number of files is 3"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(
    make_client: Callable[..., TestClient], bank: str, files: Named, words: str, settings: Settings
) -> None:
    client = make_client(max_documents=3)
    answer = send(client, bank, *files)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert list((settings.folder / "uploads").iterdir()) == []


def test_a_bank_has_a_limit_of_documents(make_client: Callable[..., TestClient]) -> None:
    client = make_client(max_documents=2)
    send(client, "flat", ("a.txt", b"one"), ("b.txt", b"two"))
    assert send(client, "flat", ("a.txt", b"three")).status_code == 202
    answer = send(client, "flat", ("c.txt", b"four"))
    assert answer.status_code == 400
    assert "at most 2 are allowed" in answer.json()["error"]["message"]


def test_documents_and_banks_are_deleted(lease: TestClient, settings: Settings) -> None:
    send(lease, "flat", ("recipe.txt", RECIPE.encode()))
    read_all(lease, "flat")
    url = "/v1/banks/flat/documents/0"
    assert lease.delete(f"{url}?name=recipe.txt").status_code == 409
    assert lease.delete(f"{url}?name=lease.txt").json()["deleted"] is True
    listed = lease.get("/v1/banks/flat/documents").json()["data"]
    assert [one["name"] for one in listed] == ["recipe.txt"]
    assert lease.delete("/v1/banks/flat/documents/1").status_code == 404
    assert lease.delete("/v1/banks/flat").json()["deleted"] is True
    assert lease.get("/v1/banks/flat").status_code == 404
    assert list((settings.folder / "uploads").iterdir()) == []


def test_a_deleted_bank_stops_being_built(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    reading, deleted = threading.Event(), threading.Event()
    read = building.read

    def slow(*args: Any, progress: Callable[[int, int], None], **kwargs: Any) -> MemoryBank:
        reading.set()
        assert deleted.wait(10)
        progress(0, 1)
        raise AssertionError("the build went on")

    monkeypatch.setattr(building, "read", slow)
    send(client, "flat", ("lease.txt", LEASE.encode()))
    assert reading.wait(20)
    assert client.delete("/v1/banks/flat").status_code == 200
    monkeypatch.setattr(building, "read", read)
    deleted.set()
    send(client, "other", ("lease.txt", LEASE.encode()))
    assert read_all(client, "other")["status"] == "ready"
    assert [bank["name"] for bank in client.get("/v1/banks").json()["data"]] == ["other"]
    assert len(list((settings.folder / "banks").iterdir())) == 1


def test_a_document_deleted_while_it_is_read_does_not_come_back(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, "flat", ("recipe.txt", RECIPE.encode()))
    read_all(client, "flat")
    reading, deleted = threading.Event(), threading.Event()
    read = building.read

    def slow(*args: Any, **kwargs: Any) -> MemoryBank:
        reading.set()
        assert deleted.wait(10)
        return read(*args, **kwargs)

    monkeypatch.setattr(building, "read", slow)
    send(client, "flat", ("recipe.txt", LEASE.encode()), ("lease.txt", LEASE.encode()))
    assert reading.wait(20)
    assert client.delete("/v1/banks/flat/documents/0?name=recipe.txt").status_code == 200
    deleted.set()
    read_all(client, "flat")
    send(client, "flat", ("last.txt", LEASE.encode()))
    read_all(client, "flat")
    listed = client.get("/v1/banks/flat/documents").json()["data"]
    assert [one["name"] for one in listed] == ["lease.txt", "last.txt"]


def test_an_answer_keeps_the_snapshot_of_a_deleted_bank(
    lease: TestClient, settings: Settings, model: SeDeM
) -> None:
    library = lease.app.state.lifecycle.service.library  # type: ignore[attr-defined]
    bank = library.get("flat").bank
    snapshot = bank.snapshot()
    del bank
    lease.delete("/v1/banks/flat")
    library.remove_deleted()
    assert model.answer(snapshot, "How much is the rent?").citations
    assert len(list((settings.folder / "banks").iterdir())) == 1
    del snapshot
    library.remove_deleted()
    assert list((settings.folder / "banks").iterdir()) == []


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


def test_large_texts_are_paged_through(lease: TestClient) -> None:
    part = lease.get("/v1/banks/flat/documents/0?start=100&end=120").json()
    assert part["text"] == LEASE[100:120]
    whole = lease.get("/v1/banks/flat/documents/0").json()
    expected = [span for span in whole["spans"] if span[0] < 120 and span[1] > 100]
    assert part["spans"] == expected
    assert len(whole["spans"]) > len(part["spans"]) > 0


def test_banks_of_the_operator_are_only_asked(
    make_client: Callable[..., TestClient], bank: MemoryBank, tmp_path: Path, model: SeDeM
) -> None:
    folder = tmp_path / "given.bank"
    bank.save(folder)
    client = make_client(banks={"given": folder})
    assert client.get("/v1/banks/given").json()["read_only"] is True
    for answer in (
        send(client, "given", ("a.txt", b"x")),
        client.delete("/v1/banks/given"),
        client.delete("/v1/banks/given/documents/0"),
    ):
        assert answer.status_code == 403
        assert "given by the operator" in answer.json()["error"]["message"]
    building.build_bank(model, model.engine, folder, [types.Document("new.txt", LEASE)])
    library = client.app.state.lifecycle.service.library  # type: ignore[attr-defined]
    library.get("given").refresh()
    assert client.get("/v1/banks/given").json()["documents"] == 3

"""Files and vector stores through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from document_files import pdf_of
from openai import BadRequestError, NotFoundError, OpenAI
from servers import serving
from serving import SECRET

from sedem import SeDeM
from sedem.serve.settings import Settings


@pytest.fixture
def openai(tmp_path: Path, model: SeDeM) -> Iterator[OpenAI]:
    with serving(Settings(folder=tmp_path / "server"), model) as served:
        yield OpenAI(base_url=served.api, api_key=SECRET, max_retries=0)


def test_files(openai: OpenAI) -> None:
    lease = openai.files.create(file=("lease.txt", LEASE.encode()), purpose="assistants")
    recipe = openai.files.create(file=("recipe.txt", RECIPE.encode()), purpose="user_data")
    assert (lease.object, lease.filename, lease.bytes) == ("file", "lease.txt", len(LEASE.encode()))
    assert [file.id for file in openai.files.list(order="asc")] == [lease.id, recipe.id]
    assert [file.id for file in openai.files.list(limit=1)] == [recipe.id, lease.id]
    assert [file.id for file in openai.files.list(purpose="user_data")] == [recipe.id]
    assert openai.files.retrieve(lease.id) == lease
    assert openai.files.content(lease.id).read() == LEASE.encode()
    assert openai.files.wait_for_processing(lease.id).status == "processed"
    assert openai.files.delete(lease.id).deleted
    with pytest.raises(NotFoundError, match="there is no file"):
        openai.files.retrieve(lease.id)
    with pytest.raises(BadRequestError, match="files can be read"):
        openai.files.create(file=("a.exe", b"x"), purpose="assistants")


def test_a_vector_store(openai: OpenAI) -> None:
    lease = openai.files.create(file=("lease.txt", LEASE.encode()), purpose="assistants")
    store = openai.vector_stores.create(name="my papers", metadata={"of": "me"})
    assert (store.name, store.metadata, store.status) == ("my papers", {"of": "me"}, "completed")
    added = openai.vector_stores.files.create_and_poll(
        lease.id, vector_store_id=store.id, attributes={"year": 2024}, poll_interval_ms=50
    )
    assert (added.status, added.last_error, added.attributes) == ("completed", None, {"year": 2024})
    broken = openai.vector_stores.files.upload_and_poll(
        vector_store_id=store.id, file=("broken.pdf", b"%PDF-"), poll_interval_ms=50
    )
    assert broken.status == "failed"
    assert broken.last_error is not None
    assert "broken.pdf" in broken.last_error.message
    store = openai.vector_stores.retrieve(store.id)
    counts = store.file_counts
    assert (counts.completed, counts.failed, counts.total) == (1, 1, 2)
    assert store.usage_bytes > 0
    listed = openai.vector_stores.files.list(store.id, order="asc")
    assert [file.id for file in listed] == [lease.id, broken.id]
    failed = openai.vector_stores.files.list(store.id, filter="failed")
    assert [file.id for file in failed] == [broken.id]
    found = openai.vector_stores.search(store.id, query="What is the rent?", max_num_results=3)
    assert len(found.data) == 3
    assert all(one.file_id == lease.id for one in found.data)
    assert all(one.content[0].text in LEASE for one in found.data)
    assert [one.score for one in found.data] == sorted((o.score for o in found.data), reverse=True)
    openai.vector_stores.files.delete(lease.id, vector_store_id=store.id)
    assert openai.vector_stores.search(store.id, query="What is the rent?").data == []
    assert openai.files.retrieve(lease.id).id == lease.id
    assert openai.vector_stores.delete(store.id).deleted
    with pytest.raises(NotFoundError):
        openai.vector_stores.retrieve(store.id)


def test_vector_stores_are_named_made_from_files_and_listed(openai: OpenAI) -> None:
    files = [
        openai.files.create(file=(name, content), purpose="assistants")
        for name, content in (("a.txt", LEASE.encode()), ("b.pdf", pdf_of(["One", "Two"])))
    ]
    store = openai.vector_stores.create(name="papers", file_ids=[file.id for file in files])
    assert store.id == "papers"
    second = openai.vector_stores.create(name="papers")
    assert second.id.startswith("vs_")
    assert {one.id for one in openai.vector_stores.list(limit=1)} == {store.id, second.id}
    assert openai.vector_stores.update(second.id, name="others").name == "others"
    batch = openai.vector_stores.file_batches.create_and_poll(
        second.id, file_ids=[file.id for file in files], poll_interval_ms=50
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 2)
    listed = openai.vector_stores.file_batches.list_files(batch.id, vector_store_id=second.id)
    assert {file.id for file in listed} == {file.id for file in files}
    # A deleted file leaves every vector store.
    openai.files.delete(files[0].id)
    assert [one.id for one in openai.vector_stores.files.list(second.id)] == [files[1].id]
    with pytest.raises(NotFoundError):
        openai.vector_stores.create(file_ids=[files[0].id])
    with pytest.raises(BadRequestError):
        openai.vector_stores.create(expires_after={"anchor": "last_active_at", "days": 1})

"""/v1/vector_stores/{id}/files and file_batches: which files were read into a bank."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sedem.serve.bank_entry import BankEntry
from sedem.serve.banks import known
from sedem.serve.errors import not_found
from sedem.serve.files import Owner, Served
from sedem.serve.guard import require_write
from sedem.serve.paging import Paged, page
from sedem.serve.reading_list import ListedFile

router = APIRouter()

Text = Annotated[str, StringConstraints(max_length=512)]
FileId = Annotated[str, StringConstraints(max_length=64)]
Metadata = Annotated[dict[Text, Text], Field(max_length=16)]
Attributes = Annotated[dict[Text, Text | bool | float], Field(max_length=16)]
FileIds = Annotated[list[FileId], Field(max_length=1000)]


class Body(BaseModel):
    """A body without unknown fields."""

    model_config = ConfigDict(extra="forbid")


class Chunking(Body):
    """How texts are cut: the model cuts them into its blocks, and there is nothing to choose."""

    type: Literal["auto"]


class NewFile(Body):
    """A file to read into a vector store."""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


class NewBatch(Body):
    """Files to read into a vector store."""

    file_ids: Annotated[FileIds, Field(min_length=1)]
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None


@router.post("/{store}/files")
def add_file(store: str, body: NewFile, key: Owner, service: Served) -> dict[str, Any]:
    """Read a file into a vector store, in the background."""
    require_write(key)
    known(service, key, store)
    library = service.library
    file = library.files.get(key.name, body.file_id)
    entry = library.attach(store, [file], body.attributes)
    return _file(entry, _found(entry, file.id))


@router.get("/{store}/files")
def list_files(
    store: str,
    key: Owner,
    service: Served,
    paging: Paged,
    filter: str | None = None,
) -> dict[str, Any]:
    """List the files of a vector store."""
    entry = known(service, key, store)
    files = [file for file in files_of(entry) if filter in (None, file.status)]
    return page([_file(entry, file) for file in files], paging)


@router.get("/{store}/files/{file_id}")
def retrieve_file(store: str, file_id: str, key: Owner, service: Served) -> dict[str, Any]:
    """Tell whether a file was read into a vector store."""
    entry = known(service, key, store)
    return _file(entry, _found(entry, file_id))


@router.delete("/{store}/files/{file_id}")
def delete_file(store: str, file_id: str, key: Owner, service: Served) -> dict[str, Any]:
    """Take a file out of a vector store; the file itself stays."""
    require_write(key)
    entry = known(service, key, store)
    file = _found(entry, file_id)
    service.library.remove_document(store, file.name)
    return {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}


@router.post("/{store}/file_batches")
def add_batch(store: str, body: NewBatch, key: Owner, service: Served) -> dict[str, Any]:
    """Read several files into a vector store, in the background."""
    require_write(key)
    known(service, key, store)
    library = service.library
    files = [library.files.get(key.name, id) for id in dict.fromkeys(body.file_ids)]
    batch = f"vsfb_{secrets.token_hex(12)}"
    return _batch(library.attach(store, files, body.attributes, batch), batch)


@router.get("/{store}/file_batches/{batch}")
def retrieve_batch(store: str, batch: str, key: Owner, service: Served) -> dict[str, Any]:
    """Tell how many files of a batch were read."""
    return _batch(known(service, key, store), batch)


@router.get("/{store}/file_batches/{batch}/files")
def list_batch(
    store: str,
    batch: str,
    key: Owner,
    service: Served,
    paging: Paged,
    filter: str | None = None,
) -> dict[str, Any]:
    """List the files of a batch."""
    entry = known(service, key, store)
    files = [file for file in files_of(entry, batch) if filter in (None, file.status)]
    return page([_file(entry, file) for file in files], paging)


def _file(entry: BankEntry, file: ListedFile) -> dict[str, Any]:
    failed = {"code": "invalid_file", "message": file.error}
    return {
        "id": file.file,
        "object": "vector_store.file",
        "created_at": file.created_at,
        "vector_store_id": entry.name,
        "status": file.status,
        "last_error": failed if file.error is not None else None,
        "usage_bytes": file.bytes,
        "attributes": dict(file.attributes),
        "chunking_strategy": {"type": "other"},
    }


def _batch(entry: BankEntry, batch: str) -> dict[str, Any]:
    files = files_of(entry, batch)
    if not files:
        raise not_found(f"vector store '{entry.name}' has no batch '{batch[:100]}'", "batch_id")
    counts = counts_of(files)
    return {
        "id": batch,
        "object": "vector_store.file_batch",
        "created_at": files[0].created_at,
        "vector_store_id": entry.name,
        "status": "in_progress" if counts["in_progress"] else "completed",
        "file_counts": counts,
    }


def files_of(entry: BankEntry, batch: str | None = None) -> list[ListedFile]:
    """Return the files of a bank, or those of one batch; the operator's banks have none."""
    return [] if entry.id is None else entry.files.of(entry.id, batch)


def _found(entry: BankEntry, file_id: str) -> ListedFile:
    file = None if entry.id is None else entry.files.find(entry.id, file_id)
    if file is None:
        raise not_found(f"vector store '{entry.name}' has no file '{file_id[:100]}'", "file_id")
    return file


def counts_of(files: Sequence[ListedFile]) -> dict[str, int]:
    """Count files by their state, as OpenAI's clients expect it."""
    by_status = Counter(str(file.status) for file in files)
    states = ("in_progress", "completed", "failed", "cancelled")
    return {**{state: by_status[state] for state in states}, "total": len(files)}

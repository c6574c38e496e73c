"""/v1/vector_stores: banks in the format of OpenAI's vector stores.

A vector store is a bank: its id is the bank's name. A name that is invalid for a bank, or that is
taken, is only displayed, and the server makes the id.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from sedem.errors import NoTextError
from sedem.serve import vector_store_files as files
from sedem.serve.bank_entry import BankEntry
from sedem.serve.banks import known
from sedem.serve.errors import forbidden
from sedem.serve.files import Owner, Served
from sedem.serve.guard import require_write
from sedem.serve.keys import Key
from sedem.serve.paging import Paged, page
from sedem.serve.searching import scores_of
from sedem.serve.service import Service
from sedem.serve.settings import is_bank_name
from sedem.serve.vector_store_files import (
    Body,
    Chunking,
    FileIds,
    Metadata,
    Text,
    counts_of,
    files_of,
)

router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"])
router.include_router(files.router)


class NewStore(Body):
    """A vector store to make."""

    name: Text | None = None
    description: Text | None = None
    file_ids: FileIds = Field([])
    metadata: Metadata | None = None
    chunking_strategy: Chunking | None = None
    expires_after: None = None


class ChangedStore(Body):
    """What is to be changed of a vector store."""

    name: Text | None = None
    metadata: Metadata | None = None
    expires_after: None = None


class RankingOptions(Body):
    """Which results count."""

    ranker: Literal["auto", "none"] = "auto"
    score_threshold: float = 0.0


class Search(Body):
    """A question to find blocks for."""

    query: Text | Annotated[list[Text], Field(min_length=1, max_length=8)]
    max_num_results: Annotated[int, Field(ge=1, le=50)] = 10
    ranking_options: RankingOptions | None = None
    rewrite_query: Literal[False] = False
    filters: None = None


@router.post("")
def create(body: NewStore, key: Owner, service: Served) -> dict[str, Any]:
    """Make a vector store, and read files into it."""
    require_write(key)
    library = service.library
    given = [library.files.get(key.name, id) for id in dict.fromkeys(body.file_ids)]
    name = _new_id(service, key, body.name)
    entry = library.create(name, body.metadata, body.name or name, given)
    return _store(entry)


@router.get("")
def list_stores(
    key: Owner,
    service: Served,
    paging: Paged,
) -> dict[str, Any]:
    """List the vector stores that this key knows."""
    library = service.library
    entries = [library.get(name) for name in library.names(key)]
    entries.sort(key=lambda entry: (entry.created_at, entry.id or 0))
    return page([_store(entry) for entry in entries], paging)


@router.get("/{store}")
def retrieve(store: str, key: Owner, service: Served) -> dict[str, Any]:
    """Describe a vector store."""
    return _store(known(service, key, store))


@router.post("/{store}")
def change(store: str, body: ChangedStore, key: Owner, service: Served) -> dict[str, Any]:
    """Change what people call a vector store, or what is noted with it; its id stays."""
    require_write(key)
    known(service, key, store)
    return _store(service.library.rename(store, body.name, body.metadata))


@router.delete("/{store}")
def delete(store: str, key: Owner, service: Served) -> dict[str, Any]:
    """Delete a vector store; files that were uploaded on their own stay."""
    require_write(key)
    known(service, key, store)
    service.library.delete(store)
    return {"id": store, "object": "vector_store.deleted", "deleted": True}


@router.post("/{store}/search")
def search(store: str, body: Search, key: Owner, service: Served) -> dict[str, Any]:
    """Return the blocks that the selector scores highest for a question, with their text."""
    entry = known(service, key, store)
    queries = [body.query] if isinstance(body.query, str) else body.query
    threshold = body.ranking_options.score_threshold if body.ranking_options else 0.0
    bank = entry.bank
    memory = None if bank is None else bank.snapshot()
    best: dict[int, float] = {}
    for query in queries:
        for index, score in enumerate(scores_of(service, memory, query)):
            best[index] = max(score, best.get(index, score))
    ranked = sorted(best, key=lambda index: -best[index])[: body.max_num_results]
    by_name = {file.name: file for file in files_of(entry)}
    data = []
    for index in ranked:
        assert memory is not None
        if best[index] < threshold:
            continue
        block = memory.blocks[index]
        name = memory.documents.name(block.document)
        try:
            text = memory.block_text(index)
        except NoTextError:
            text = ""
        file = by_name.get(name)
        data.append(
            {
                "file_id": name if file is None else file.file,
                "filename": name,
                "score": best[index],
                "attributes": {} if file is None else dict(file.attributes),
                "content": [{"type": "text", "text": text}],
                "span": {"index": index, "start": block.start, "end": block.end},
            }
        )
    return {
        "object": "vector_store.search_results.page",
        "search_query": queries,
        "data": data,
        "has_more": False,
        "next_page": None,
    }


def _new_id(service: Service, key: Key, name: str | None) -> str:
    """Return the name of a new bank: the requested one if it is valid and not taken."""
    taken = {entry.name for entry in service.library.entries()}
    wanted = name if name is not None and is_bank_name(name) and name not in taken else None
    id = wanted or f"vs_{secrets.token_hex(12)}"
    if not key.may_read(id):
        raise forbidden(
            f"key '{key.name}' may use only banks named {', '.join(key.banks)}; give the "
            "vector store an unused name of these",
            "out_of_scope",
        )
    return id


def _store(entry: BankEntry) -> dict[str, Any]:
    counts = counts_of(files_of(entry))
    if entry.read_only and entry.bank is not None:
        counts["completed"] = counts["total"] = len(entry.bank.documents)
    memory = None if entry.bank is None else entry.bank.snapshot()
    return {
        "id": entry.name,
        "object": "vector_store",
        "created_at": entry.created_at,
        "name": entry.title,
        "usage_bytes": 0 if memory is None else memory.memory_bytes,
        "file_counts": counts,
        "status": "in_progress" if counts["in_progress"] else "completed",
        "last_active_at": entry.created_at,
        "metadata": dict(entry.metadata),
        "expires_after": None,
        "expires_at": None,
    }

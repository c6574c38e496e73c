"""/v1/banks: routes for the page and curl: upload, watch, inspect a bank, delete."""

from __future__ import annotations

import asyncio
import time
import unicodedata
from collections.abc import AsyncIterator
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from sedem.bank.memory_bank import BankReader
from sedem.reading.documents import unknown_type
from sedem_serve.server.errors import ApiError, bad_request, full_disk
from sedem_serve.server.events import COMMENT, KEEP_ALIVE_SECONDS, MEDIA_TYPE, event
from sedem_serve.server.guard import Owner, require_bank, require_write
from sedem_serve.server.keys import Key
from sedem_serve.server.served import ServedBank, UploadBank
from sedem_serve.server.service import Served, Service, lifecycle_of
from sedem_serve.server.settings import BANK_NAME_RULE, is_bank_name

router = APIRouter(prefix="/v1/banks", tags=["banks"])


FORM = "multipart/form-data"
FIELDS = 32
"""Maximum fields of an upload that are not files; they are ignored."""
POLL_SECONDS = 0.25
TEXT_CHARACTERS = 1_000_000
"""Maximum characters of a document in one response."""
NAME_CHARACTERS = 255


class Question(BaseModel):
    """A question to score the blocks of a bank for."""

    model_config = ConfigDict(extra="forbid")

    question: str


@router.get("")
def list_banks(key: Owner, service: Served) -> dict[str, Any]:
    """List the banks that this key knows, and say whether it may change any."""
    library = service.library
    data = [described(library.get(name)) for name in library.names(key)]
    return {"object": "list", "data": data, "writable": key.write}


@router.get("/{bank}")
def retrieve(bank: str, key: Owner, service: Served) -> dict[str, Any]:
    """Describe a bank."""
    return described(known(service, key, bank))


@router.delete("/{bank}")
def delete(bank: str, key: Owner, service: Served) -> dict[str, Any]:
    """Delete a bank."""
    require_write(key)
    known(service, key, bank)
    service.library.delete(bank)
    return {"id": bank, "object": "bank", "deleted": True}


@router.post("/{bank}/documents")
async def upload(bank: str, request: Request, key: Owner, service: Served) -> Response:
    """Upload files; they are read into the bank in the background.

    The bank is made if there is none. A file of the name of a document replaces it.
    """
    require_write(key)
    if not is_bank_name(bank):
        raise bad_request(f"'{bank[:100]}' cannot name a bank; {BANK_NAME_RULE}", "bank")
    require_bank(key, bank)
    library = service.library
    if bank in library.names(key):
        library.writable(bank)
    if not request.headers.get("content-type", "").lower().startswith(FORM):
        raise bad_request(f"the body is not {FORM}; send the file as a form does, such as curl -F")
    limit = service.settings.max_documents
    with full_disk():
        form = await request.form(max_files=limit, max_fields=FIELDS, max_part_size=2**14)
    try:
        files = _files_of(form)

        def store() -> tuple[UploadBank, list[str]]:
            return library.upload(bank, {name: file.file for name, file in files.items()})

        entry, replaced = await run_in_threadpool(store)
    finally:
        await form.close()
    progress = (await run_in_threadpool(entry.progress)).to_dict(bank)
    uploaded = [{"filename": name, "bytes": file.size} for name, file in files.items()]
    return JSONResponse({**progress, "uploaded": uploaded, "replaced": replaced}, 202)


def _files_of(form: FormData) -> dict[str, UploadFile]:
    """Return the files of a form by the names of their documents.

    A name is text to display, never a path: only its ending has a meaning, the format. Control
    characters become U+FFFD.
    """
    files: dict[str, UploadFile] = {}
    given = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    for value in given:
        whole = (value.filename or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        name = "".join(
            "\ufffd" if unicodedata.category(character) in ("Cc", "Zl", "Zp") else character
            for character in unicodedata.normalize("NFC", whole)
        ).strip()
        code = None
        if not name:
            why = "an uploaded file has no name; give it one, such as report.pdf"
        elif len(name) > NAME_CHARACTERS:
            why = (
                f"the file name '{name[:40]}...' has {len(name):,} characters, at most "
                f"{NAME_CHARACTERS} can be used; shorten it"
            )
        elif len(given) == 1 and (unknown := unknown_type(name)):
            why, code = f"'{name}' {unknown}", "unsupported_file"
        elif len(given) == 1 and not value.size:
            why = f"'{name}' is empty; give a file with text"
        elif name in files:
            why = (
                f"2 files are named '{name}', and documents of one bank have distinct names; "
                "rename one"
            )
        else:
            files[name] = value
            continue
        raise bad_request(why, "file", code)
    if not files:
        raise bad_request("the upload has no file; send one as the field 'file'", "file")
    return files


@router.get("/{bank}/progress", response_model=None)
def progress(
    bank: str, request: Request, key: Owner, service: Served, stream: bool = False
) -> dict[str, Any] | StreamingResponse:
    """Tell how far the reading of uploaded files has come, once or until it has ended."""
    entry = known(service, key, bank)
    if not stream and MEDIA_TYPE not in request.headers.get("accept", ""):
        return entry.progress().to_dict(bank)
    return StreamingResponse(
        _events(request, entry), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"}
    )


async def _events(request: Request, entry: ServedBank) -> AsyncIterator[bytes]:
    """Yield the progress whenever it changes; the last event says how the reading ended."""
    last, spoken = None, time.monotonic()
    while not lifecycle_of(request).draining:
        progress = (await run_in_threadpool(entry.progress)).to_dict(entry.name)
        if entry.deleted:
            progress |= {"status": "failed", "error": f"bank '{entry.name}' was deleted"}
        if progress != last:
            yield event(progress)
            last, spoken = progress, time.monotonic()
        elif time.monotonic() - spoken > KEEP_ALIVE_SECONDS:
            yield COMMENT
            spoken = time.monotonic()
        if progress["status"] != "building":
            return
        await asyncio.sleep(POLL_SECONDS)


@router.get("/{bank}/documents")
def documents(
    bank: str,
    key: Owner,
    service: Served,
    start: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> dict[str, Any]:
    """List the documents of a bank, in reading order."""
    memory = known(service, key, bank).current
    if memory is None:
        return {"object": "list", "data": [], "has_more": False}
    names = memory.documents.names
    counts = np.bincount(memory.blocks.documents, minlength=len(names))
    listed = range(start, min(start + limit, len(names)))
    data = [
        {
            "index": index,
            "name": names[index],
            "characters": memory.documents.characters(index),
            "blocks": int(counts[index]),
        }
        for index in listed
    ]
    return {"object": "list", "data": data, "has_more": start + limit < len(names)}


@router.get("/{bank}/documents/{index}")
def document(
    bank: str,
    index: int,
    key: Owner,
    service: Served,
    start: Annotated[int, Query(ge=0)] = 0,
    end: Annotated[int | None, Query(ge=0)] = None,
) -> dict[str, Any]:
    """Return the text of a document and the spans of its blocks, or a part of both.

    All offsets are counted in Unicode characters from the beginning of the document.
    """
    memory = _with_document(known(service, key, bank), index)
    characters = memory.documents.characters(index)
    start = min(start, characters)
    end = min(characters if end is None else max(start, end), start + TEXT_CHARACTERS, characters)
    blocks = memory.blocks
    inside = (blocks.documents == index) & (blocks.starts < end) & (blocks.ends > start)
    rows = np.flatnonzero(inside)
    return {
        "object": "bank.document",
        "index": index,
        "name": memory.documents.name(index),
        "characters": characters,
        "start": start,
        "end": end,
        "text": memory.documents.text(index, start, end),
        "pages": list(memory.documents.pages(index)),
        "blocks": rows.tolist(),
        "spans": np.stack([blocks.starts[rows], blocks.ends[rows]], 1).tolist(),
    }


@router.delete("/{bank}/documents/{index}")
def delete_document(
    bank: str, index: int, key: Owner, service: Served, name: str | None = None
) -> dict[str, Any]:
    """Delete a document of a bank.

    Indices move up when a document before is deleted. With `name`, only a document of that name
    is deleted.
    """
    require_write(key)
    entry = known(service, key, bank)
    service.library.writable(bank)
    found = _with_document(entry, index).documents.name(index)
    if name is not None and name != found:
        raise ApiError(
            409, f"document {index} of bank '{bank}' has another name now; list them again"
        )
    service.library.remove_document(bank, found)
    return {"object": "bank.document", "index": index, "name": found, "deleted": True}


@router.post("/{bank}/scores")
def scores(bank: str, question: Question, key: Owner, service: Served) -> dict[str, Any]:
    """Return the selector's score of every block of a bank for a question."""
    memory = known(service, key, bank).current
    room = service.model.engine.most_blocks()
    if memory is not None and room is not None and len(memory) > room:
        raise bad_request(
            f"bank '{bank}' has {len(memory):,} blocks, and the memory of this server is enough "
            f"for scores of {room:,}; ask a smaller bank, or start it with more --memory",
        )
    length, most = len(question.question), service.settings.max_question_characters
    if length > most:
        raise bad_request(
            f"the question has {length:,} characters, at most {most:,} are allowed; shorten it",
            "question",
        )
    data: list[dict[str, Any]] = []
    if memory is not None and len(memory):
        # This briefly occupies the engine.
        found = service.scheduler.scores(memory, question.question).tolist()
        data = [
            {
                "index": index,
                "document_index": block.document,
                "start": block.start,
                "end": block.end,
                "score": score,
            }
            for index, (block, score) in enumerate(zip(memory.blocks, found, strict=True))
        ]
    return {"object": "bank.scores", "bank": bank, "data": data}


def known(service: Service, key: Key, bank: str) -> ServedBank:
    """Return a bank that a key may see; any other gets 404."""
    require_bank(key, bank)
    return service.library.get(bank)


def described(entry: ServedBank) -> dict[str, Any]:
    """Return the description of a bank for clients."""
    memory, progress = entry.current, entry.progress()
    return {
        "object": "bank",
        "name": entry.name,
        "status": progress.status,
        "documents": 0 if memory is None else len(memory.documents),
        "blocks": 0 if memory is None else len(memory),
        "tokens": 0 if memory is None else memory.tokens,
        "read_only": entry.read_only,
        "error": entry.error or progress.error,
        "created_at": entry.created_at,
    }


def _with_document(entry: ServedBank, index: int) -> BankReader:
    memory = entry.current
    count = 0 if memory is None else len(memory.documents)
    if memory is None or not 0 <= index < count:
        raise ApiError(
            404,
            f"bank '{entry.name}' has no document {index}; it has {count:,}, counted from 0",
            "index",
            "document_not_found",
        )
    return memory

"""POST, GET and DELETE /v1/files: uploaded files, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse

from sedem.serve.errors import bad_request
from sedem.serve.file_records import PURPOSES, new_file
from sedem.serve.guard import key_of, require_write
from sedem.serve.keys import Key
from sedem.serve.paging import Limit, Order, Paging, page
from sedem.serve.service import Service, service_of
from sedem.serve.uploads import receiving

router = APIRouter(prefix="/v1/files", tags=["files"])

Owner = Annotated[Key, Depends(key_of)]
Served = Annotated[Service, Depends(service_of)]


@router.post("")
async def create(request: Request, key: Owner, service: Served) -> dict[str, Any]:
    """Upload one file; it is stored when the answer comes."""
    require_write(key)
    files = service.library.files
    async with receiving(request, files, service.settings.max_file_bytes, 1) as upload:
        purpose = upload.fields.get("purpose", PURPOSES[0])
        if purpose not in PURPOSES:
            raise bad_request(
                f"purpose is '{purpose[:40]}'; it must be 'assistants' or 'user_data'", "purpose"
            )
        [received] = upload.received
        file = new_file(received.path, key.name, received.name, purpose)
        await run_in_threadpool(upload.keep, lambda: files.add(file))
    return file.to_dict()


@router.get("")
def list_files(
    key: Owner,
    service: Served,
    purpose: str | None = None,
    limit: Limit = 10_000,
    after: str | None = None,
    order: Order = "desc",
) -> dict[str, Any]:
    """List the files that this key uploaded."""
    files = service.library.files.list(key.name, purpose)
    return page([file.to_dict() for file in files], Paging(limit, after, order=order))


@router.get("/{file_id}")
def retrieve(file_id: str, key: Owner, service: Served) -> dict[str, Any]:
    """Describe a file."""
    return service.library.files.get(key.name, file_id).to_dict()


@router.get("/{file_id}/content")
def content(file_id: str, key: Owner, service: Served) -> FileResponse:
    """Return the bytes of a file; browsers store them, and never show them as a page."""
    files = service.library.files
    file = files.get(key.name, file_id)
    name = quote(file.name, safe="")
    return FileResponse(
        files.path(file.id),
        media_type="application/octet-stream",
        headers={
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "X-Content-Type-Options": "nosniff",
        },
    )


@router.delete("/{file_id}")
def delete(file_id: str, key: Owner, service: Served) -> dict[str, Any]:
    """Delete a file; documents that were read from it leave their banks."""
    require_write(key)
    service.library.delete_file(key.name, file_id)
    return {"id": file_id, "object": "file", "deleted": True}

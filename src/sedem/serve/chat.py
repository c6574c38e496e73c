"""POST /v1/chat/completions, as OpenAI's clients call it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from sedem.answering.reply import Selected
from sedem.serve.asking import Answered, answering, to_ask, whole_answer
from sedem.serve.chat_body import (
    annotations_of,
    chunk,
    completion,
    details_of,
    finish_reason_of,
    selection_of,
    usage_of,
)
from sedem.serve.events import DONE, Events, event, stream, unless_gone
from sedem.serve.guard import key_of
from sedem.serve.keys import Key
from sedem.serve.service import Service, service_of
from sedem.serve.shapes import ChatBody

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    request: Request,
    body: ChatBody,
    service: Annotated[Service, Depends(service_of)],
    key: Annotated[Key, Depends(key_of)],
) -> Response:
    """Answer the last question of a conversation, from a bank or from its own long messages."""
    frame = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": service.model.fingerprint()[:16],
    }
    if body.stream:
        return await stream(request, _events(service, key, body, frame))
    answered = await unless_gone(request, whole_answer(service, key, body, body.messages))
    return JSONResponse(completion(frame, answered))


async def _events(service: Service, key: Key, body: ChatBody, frame: Mapping[str, Any]) -> Events:
    asked = await to_ask(service, key, body, body.messages)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async with aclosing(answering(service, asked)) as parts:
        async for part in parts:
            match part:
                case Selected():
                    # Once the blocks are known, the question can be answered: errors came earlier.
                    yield event(chunk(frame, {"role": "assistant", "content": ""}))
                    yield event(chunk(frame, {}, sedem=selection_of(asked, part)))
                case str():
                    yield event(chunk(frame, {"content": part}))
                case Answered():
                    delta = {"annotations": annotations_of(asked, part.selected)}
                    reason, details = finish_reason_of(part), details_of(part)
                    yield event(chunk(frame, delta, reason, sedem=details))
                    if with_usage:
                        yield event(chunk(frame, None, usage=usage_of(part)))
    yield DONE

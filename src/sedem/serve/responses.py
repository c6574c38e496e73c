"""POST /v1/responses, OpenAI's newer form of the same question; nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from sedem.answering.reply import Selected
from sedem.serve.asking import Answered, answering, to_ask, whole_answer
from sedem.serve.chat_body import annotations_of, details_of, selection_of, usage_of
from sedem.serve.events import Events, event, stream, unless_gone
from sedem.serve.guard import key_of
from sedem.serve.keys import Key
from sedem.serve.service import Service, service_of
from sedem.serve.shapes import ResponsesBody

router = APIRouter()


@router.post("/v1/responses", response_model=None)
async def responses(
    request: Request,
    body: ResponsesBody,
    service: Annotated[Service, Depends(service_of)],
    key: Annotated[Key, Depends(key_of)],
) -> Response:
    """Answer the last question of the input; as POST /v1/chat/completions."""
    frame = {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "temperature": body.temperature or 0.0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "store": False,
        "error": None,
        "incomplete_details": None,
    }
    if body.stream:
        return await stream(request, _events(service, key, body, frame), end=b"")
    answered = await unless_gone(request, whole_answer(service, key, body, body.messages))
    return JSONResponse(_finished(frame, f"msg_{secrets.token_hex(12)}", answered))


async def _events(
    service: Service, key: Key, body: ResponsesBody, frame: Mapping[str, Any]
) -> Events:
    asked = await to_ask(service, key, body, body.messages)
    item, numbers = f"msg_{secrets.token_hex(12)}", count()
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    begun = {**frame, "status": "in_progress", "output": [], "usage": None}

    def named(kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(numbers), **fields}, name)

    async with aclosing(answering(service, asked)) as parts:
        async for part in parts:
            match part:
                case Selected():
                    known = {**begun, "sedem": selection_of(asked, part)}
                    yield named("created", response=known)
                    yield named("in_progress", response=known)
                    empty = _message(item, "in_progress", [])
                    yield named("output_item.added", output_index=0, item=empty)
                    yield named("content_part.added", **place, part=_text("", []))
                case str():
                    yield named("output_text.delta", **place, delta=part, logprobs=[])
                case Answered():
                    response = _finished(frame, item, part)
                    (message,) = response["output"]
                    (content,) = message["content"]
                    for index, annotation in enumerate(content["annotations"]):
                        yield named(
                            "output_text.annotation.added",
                            **place,
                            annotation_index=index,
                            annotation=annotation,
                        )
                    text = content["text"]
                    yield named("output_text.done", **place, text=text, logprobs=[])
                    yield named("content_part.done", **place, part=content)
                    yield named("output_item.done", output_index=0, item=message)
                    yield named(response["status"], response=response)


def _finished(frame: Mapping[str, Any], item: str, answered: Answered) -> dict[str, Any]:
    """Return the complete response.

    Args:
        frame: fields that do not depend on the answer.
        item: id of its message.
        answered: the answer.
    """
    cut_off = answered.answer.finish_reason == "length"
    status = "incomplete" if cut_off else "completed"
    annotations = [
        {"type": one["type"], **one["file_citation"]}
        for one in annotations_of(answered.asked, answered.selected)
    ]
    usage = usage_of(answered)
    return {
        **frame,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": [_message(item, status, [_text(answered.answer.text, annotations)])],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "sedem": details_of(answered),
    }


def _message(item: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "message",
        "id": item,
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _text(text: str, annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}

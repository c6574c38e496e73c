"""OpenAI's routes: POST /v1/chat/completions, POST /v1/responses and GET /v1/models.

Answers have OpenAI's fields, and `sedem` with everything else. Nothing is stored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from sedem.answering.running import Selected
from sedem.serve.asking import SEPARATOR, Answered, answering, to_ask, whole_answer
from sedem.serve.errors import not_found
from sedem.serve.events import DONE, Events, cancel_on_disconnect, event, stream
from sedem.serve.guard import Owner
from sedem.serve.keys import Key
from sedem.serve.service import Served, Service
from sedem.serve.shapes import ChatBody, ResponsesBody

router = APIRouter()


# Chat


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    request: Request, body: ChatBody, service: Served, key: Owner
) -> Response:
    """Answer the last question of a conversation, from a bank or from its own long messages."""
    frame = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": service.model.fingerprint()[:16],
    }
    if body.stream:
        return await stream(request, _chat_events(service, key, body, frame))
    answered = await cancel_on_disconnect(request, whole_answer(service, key, body, body.messages))
    return JSONResponse(completion(frame, answered))


async def _chat_events(
    service: Service, key: Key, body: ChatBody, frame: Mapping[str, Any]
) -> Events:
    asked = await to_ask(service, key, body, body.messages)
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    async with aclosing(answering(service, asked)) as parts:
        async for part in parts:
            match part:
                case Selected():
                    # Once the blocks are known, the question can be answered: errors came earlier.
                    yield event(chunk(frame, {"role": "assistant", "content": ""}))
                    yield event(chunk(frame, {}, sedem=selection_of(part)))
                case str():
                    yield event(chunk(frame, {"content": part}))
                case Answered():
                    delta = {"annotations": annotations_of(part)}
                    reason, details = finish_reason_of(part), details_of(part)
                    yield event(chunk(frame, delta, reason, sedem=details))
                    if with_usage:
                        yield event(chunk(frame, None, usage=usage_of(part)))
    yield DONE


def completion(frame: Mapping[str, Any], answered: Answered) -> dict[str, Any]:
    """The body of a complete answer."""
    message = {
        "role": "assistant",
        "content": answered.answer.text,
        "refusal": None,
        "annotations": annotations_of(answered),
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finish_reason_of(answered),
    }
    return {
        **frame,
        "object": "chat.completion",
        "choices": [choice],
        "usage": usage_of(answered),
        "sedem": details_of(answered),
    }


def chunk(
    frame: Mapping[str, Any],
    delta: Mapping[str, Any] | None,
    finish_reason: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A chunk of a streamed answer; `delta` is None for a chunk without a choice."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    choices = [] if delta is None else [choice]
    return {**frame, "object": "chat.completion.chunk", "choices": choices, **fields}


# Responses


@router.post("/v1/responses", response_model=None)
async def responses(request: Request, body: ResponsesBody, service: Served, key: Owner) -> Response:
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
        return await stream(request, _response_events(service, key, body, frame), end=b"")
    answered = await cancel_on_disconnect(request, whole_answer(service, key, body, body.messages))
    return JSONResponse(_finished(frame, f"msg_{secrets.token_hex(12)}", answered))


async def _response_events(
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
                    known = {**begun, "sedem": selection_of(part)}
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
    """Return the complete response."""
    cut_off = answered.answer.finish_reason == "length"
    status = "incomplete" if cut_off else "completed"
    annotations = [
        {"type": one["type"], **one["file_citation"]} for one in annotations_of(answered)
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
    told = {"type": "message", "id": item, "role": "assistant", "status": status}
    return {**told, "content": content}


def _text(text: str, annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


# Both


def citations_of(selected: Selected) -> list[dict[str, Any]]:
    """The blocks that an answer is conditioned on, best first."""
    return [
        {**asdict(citation), "document_index": index}
        for citation, index in zip(selected.citations, selected.documents, strict=True)
    ]


def with_spans(answered: Answered) -> Selected:
    """Return the blocks of an answer with where the answer stands in them."""
    return replace(answered.selected, citations=answered.answer.citations)


def selection_of(selected: Selected) -> dict[str, Any]:
    """What a stream sends about an answer before its first token."""
    return {
        "citations": citations_of(selected),
        "confidence": selected.confidence,
        "k": selected.k,
    }


def details_of(answered: Answered) -> dict[str, Any]:
    """The field `sedem` of an answer."""
    asked, answer = answered.asked, answered.answer
    details = {
        **selection_of(with_spans(answered)),
        "question": asked.request.question,
        "blocks": answer.blocks,
        "bank": asked.bank,
        "condition": asked.request.condition,
        "selection": asked.request.selection,
        "hops": asked.request.hops,
        "answer": asked.request.answer,
        "answer_confidence": answer.answer_confidence,
        "unsupported": answer.unsupported,
        "finish_reason": answer.finish_reason,
        "cut": [*asked.unused, *answer.cut],
        "timings": {name: round(ms, 3) for name, ms in answer.timings.items()},
        "context_tokens": answer.context_tokens,
        "stored_bytes": answer.stored_bytes,
        "conditioning": answer.conditioning,
    }
    if answer.ranking is not None:
        details["ranking"] = [
            {"document": name, "start": start, "end": end} for name, start, end in answer.ranking
        ]
    return details


def annotations_of(answered: Answered) -> list[dict[str, Any]]:
    """The citations in OpenAI's format, one for each block; a file's id is its document's name.

    A block with words of the answer has one for each place where they stand in the document.
    """
    cited = []
    documents = answered.selected.documents
    for citation, index in zip(answered.answer.citations, documents, strict=True):
        file = {"file_id": citation.document, "filename": citation.document, "index": index}
        places = [{"answer_start": a, "answer_end": b} for a, b in citation.answer_spans]
        cited += [{"type": "file_citation", "file_citation": file | one} for one in places or [{}]]
    return cited


def finish_reason_of(answered: Answered) -> str:
    """Why an answer ended, in OpenAI's terms."""
    return "length" if answered.answer.finish_reason == "length" else "stop"


def usage_of(answered: Answered) -> dict[str, Any]:
    """Tokens of the documents and the question, and of the answer."""
    asked, answer = answered.asked, answered.answer
    prompt = (answer.context_tokens or 0) + asked.question_tokens
    completion = answer.answer_tokens or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": asked.cached_tokens},
    }


# Models


@router.get("/v1/models")
def list_models(service: Served, key: Owner) -> dict[str, Any]:
    """List the model, and the model with each bank that the key knows."""
    return {"object": "list", "data": _models(service, key)}


@router.get("/v1/models/{model:path}")
def get_model(model: str, service: Served, key: Owner) -> dict[str, Any]:
    """Return one of them."""
    for entry in _models(service, key):
        if entry["id"] == model:
            return entry
    raise not_found(f"there is no model '{model[:100]}'", "model", "model_not_found")


def _models(service: Service, key: Key) -> list[dict[str, Any]]:
    name, config = service.model.name, service.model.config
    defaults = {
        "k": config.k,
        "condition": config.condition,
        "selection": config.selection,
        "hops": config.hops,
        "answer": config.answer,
        "confidence": service.model.confidence is not None,
    }
    entries = [(name, 0, None)] + [
        (f"{name}{SEPARATOR}{bank}", service.library.get(bank).created_at, bank)
        for bank in service.library.names(key)
    ]
    return [
        {
            "id": id,
            "object": "model",
            "created": created,
            "owned_by": "sedem",
            "sedem": {**defaults, "bank": bank},
        }
        for id, created, bank in entries
    ]

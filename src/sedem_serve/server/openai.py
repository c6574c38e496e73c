"""OpenAI's routes: completions of chats and of prompts, responses, and models.

Answers have OpenAI's fields, and `sedem` with everything else. Nothing is stored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from itertools import accumulate, count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from sedem.answering.decoding import UNFINISHED
from sedem.answering.running import CallPiece, Estimate, Selected
from sedem.config import WAYS
from sedem_serve.server.asking import SEPARATOR, AnswerParts, WholeAnswer, answering
from sedem_serve.server.errors import ApiError
from sedem_serve.server.events import DONE, Events, cancel_on_disconnect, event, stream
from sedem_serve.server.guard import Owner
from sedem_serve.server.keys import Key
from sedem_serve.server.service import Served, Service
from sedem_serve.server.shapes import ChatBody, ChoicesBody, CompletionBody, ResponsesBody

router = APIRouter()

ENDINGS = {"length": "length", "tool_calls": "tool_calls"}
"""How OpenAI names why an answer ended, if that is not "stop"."""
CHARACTERS_PER_TOKEN = 4
"""Usual length of a token in English, which clients assume too."""


# Completions


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(
    request: Request, body: ChatBody, service: Served, key: Owner
) -> Response:
    """Answer the last question of a conversation, from a bank or from its own documents."""
    return await _complete(request, body, service, key)


@router.post("/v1/completions", response_model=None)
async def completions(
    request: Request, body: CompletionBody, service: Served, key: Owner
) -> Response:
    """Answer the question in a prompt; as POST /v1/chat/completions."""
    return await _complete(request, body, service, key)


async def _complete(request: Request, body: ChoicesBody, service: Service, key: Key) -> Response:
    chat = isinstance(body, ChatBody)
    frame = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": service.model.fingerprint()[:16],
    }
    parts = answering(service, key, body)
    if body.stream:
        if chat:
            frame["object"] = "chat.completion.chunk"
        return await stream(request, _events(parts, body, frame))
    answers = await cancel_on_disconnect(request, _whole(parts))
    listed = []
    for index, one in enumerate(answers):
        message = {"role": "assistant", "content": one.answer.text, "refusal": None}
        said: dict[str, Any] = {**message, "annotations": annotations_of(one)}
        if one.answer.calls:
            said["tool_calls"] = one.answer.calls
        listed.append(_choice(chat, "message", index, said, one))
    usage, details = usage_of(answers), details_of(answers[0])
    return JSONResponse({**frame, "choices": listed, "usage": usage, "sedem": details})


async def _events(parts: AnswerParts, body: ChoicesBody, frame: Mapping[str, Any]) -> Events:
    chat, answers = isinstance(body, ChatBody), list[WholeAnswer]()

    def chunk(index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
        choice = _choice(chat, "delta", index, delta, fields.pop("answered", None))
        return event({**frame, "choices": [choice], **fields})

    async with aclosing(parts):
        async for index, part in parts:
            match part:
                case Selected():
                    # Once the blocks are known, the question can be answered: errors came earlier.
                    yield chunk(index, {"role": "assistant", "content": ""})
                    yield chunk(index, {}, sedem=selection_of(part))
                case Estimate():
                    yield chunk(index, {}, sedem={"estimate": asdict(part)})
                case str():
                    yield chunk(index, {"content": part})
                case CallPiece():
                    yield chunk(index, {"tool_calls": [part.delta]})
                case WholeAnswer():
                    answers.append(part)
                    delta = {"annotations": annotations_of(part)}
                    yield chunk(index, delta, answered=part, sedem=details_of(part))
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event({**frame, "choices": [], "usage": usage_of(answers)})
    yield DONE


def _choice(
    chat: bool, name: str, index: int, said: Mapping[str, Any], answered: WholeAnswer | None
) -> dict[str, Any]:
    """Return one choice, or a piece of one; a plain completion has nothing but its text."""
    return {
        "index": index,
        **({name: said} if chat else {"text": said.get("content", "")}),
        "logprobs": None if answered is None else logprobs_of(answered, chat),
        "finish_reason": answered and ENDINGS.get(answered.answer.finish_reason, "stop"),
    }


def logprobs_of(answered: WholeAnswer, chat: bool) -> dict[str, Any] | None:
    """The log-probabilities of an answer's tokens, in the form of chat or of plain completions."""
    places = answered.answer.logprobs
    if places is None:
        return None
    if chat:
        # A token may be a part of a character.
        told = [
            [
                {"token": t, "logprob": p, "bytes": None if UNFINISHED in t else [*t.encode()]}
                for t, p in place
            ]
            for place in places
        ]
        return {"content": [{**one, "top_logprobs": top} for one, *top in told], "refusal": None}
    texts = [place[0][0] for place in places]
    return {
        "tokens": texts,
        "token_logprobs": [place[0][1] for place in places],
        "top_logprobs": [dict(place[1:]) for place in places],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)],
    }


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
        "max_output_tokens": body.max_tokens,
        "temperature": body.temperature or 0.0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [],
        "store": False,
        "error": None,
        "incomplete_details": None,
    }
    parts = answering(service, key, body)
    if body.stream:
        return await stream(request, _response_events(parts, frame), end=b"")
    (answered,) = await cancel_on_disconnect(request, _whole(parts))
    return JSONResponse(_finished(frame, f"msg_{secrets.token_hex(12)}", answered))


async def _response_events(parts: AnswerParts, frame: Mapping[str, Any]) -> Events:
    item, numbers = f"msg_{secrets.token_hex(12)}", count()
    items = [item]
    place = {"item_id": item, "output_index": 0, "content_index": 0}
    begun = {**frame, "status": "in_progress", "output": [], "usage": None}

    def named(kind: str, **fields: Any) -> bytes:
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": next(numbers), **fields}, name)

    async with aclosing(parts):
        async for _, part in parts:
            match part:
                case Selected():
                    known = {**begun, "sedem": selection_of(part)}
                    yield named("created", response=known)
                    yield named("in_progress", response=known)
                    empty = _message(item, "in_progress", [])
                    yield named("output_item.added", output_index=0, item=empty)
                    yield named("content_part.added", **place, part=_text("", []))
                case Estimate():
                    # OpenAI's clients know no such event.
                    yield f": about {part.seconds:.0f} s for {part.blocks} blocks\n\n".encode()
                case str():
                    yield named("output_text.delta", **place, delta=part, logprobs=[])
                case CallPiece():
                    at, added = 1 + part.delta["index"], part.delta["function"]["arguments"]
                    if "id" in part.delta:
                        call = {**_call(part.delta, "in_progress"), "arguments": ""}
                        yield named("output_item.added", output_index=at, item=call)
                        items.append(call["id"])
                    known = {"item_id": items[at], "output_index": at, "delta": added}
                    yield named("function_call_arguments.delta", **known)
                case WholeAnswer():
                    response = _finished(frame, item, part)
                    message, *called = response["output"]
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
                    for at, call in enumerate(called, start=1):
                        known = {"item_id": call["id"], "arguments": call["arguments"]}
                        yield named("function_call_arguments.done", output_index=at, **known)
                        yield named("output_item.done", output_index=at, item=call)
                    yield named(response["status"], response=response)


def _finished(frame: Mapping[str, Any], item: str, answered: WholeAnswer) -> dict[str, Any]:
    """Return the complete response."""
    cut_off = answered.answer.finish_reason == "length"
    status = "incomplete" if cut_off else "completed"
    annotations = [
        {"type": one["type"], **one["file_citation"]} for one in annotations_of(answered)
    ]
    usage, text = usage_of([answered]), _text(answered.answer.text, annotations)
    calls = [_call(call, status) for call in answered.answer.calls]
    return {
        **frame,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": [_message(item, status, [text]), *calls],
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


def _call(call: Mapping[str, Any], status: str) -> dict[str, Any]:
    """Return a call of a tool as an item of its own."""
    id, function = call["id"], call["function"]
    told = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "status": status}
    return {**told, "name": function.get("name"), "arguments": function["arguments"]}


def _text(text: str, annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


# Both


async def _whole(parts: AnswerParts) -> list[WholeAnswer]:
    """Wait for the complete answers."""
    async with aclosing(parts):
        return [part async for _, part in parts if isinstance(part, WholeAnswer)]


def selection_of(selected: Selected) -> dict[str, Any]:
    """What a stream sends about an answer before its first token."""
    cited = zip(selected.citations, selected.documents, strict=True)
    return {
        "citations": [{**asdict(one), "document_index": index} for one, index in cited],
        "confidence": selected.confidence,
        "k": selected.k,
    }


def details_of(answered: WholeAnswer) -> dict[str, Any]:
    """The field `sedem` of an answer."""
    asked, answer = answered.asked, answered.answer
    # A quoted answer has no tokens of its own.
    lost = ["logprobs"] if asked.decoding.logprobs is not None and answer.logprobs is None else []
    details = {
        # Of the blocks, the answer says where it stands in them.
        **selection_of(replace(answered.selected, citations=answer.citations)),
        "question": asked.request.question,
        "blocks": answer.blocks,
        "bank": asked.bank,
        **{name: getattr(asked.request, name) for name in WAYS},
        "answer_confidence": answer.answer_confidence,
        "certainty": answer.certainty,
        "alternative": answer.alternative,
        "sentences": [
            {"document": name, "start": start, "end": end} for name, start, end in answer.sentences
        ],
        "unsupported": answer.unsupported,
        "answered_by": answer.model,
        "reader": asked.request.reader is not None,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "ignored": [*(one for one in asked.body.ignored if one not in asked.request.passed), *lost],
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


def annotations_of(answered: WholeAnswer) -> list[dict[str, Any]]:
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


def usage_of(answers: Sequence[WholeAnswer]) -> dict[str, Any]:
    """Tokens of the documents and the question, and of all answers to it."""
    asked = answers[0].asked
    prompt = (answers[0].answer.context_tokens or 0) + asked.question_tokens
    completion = sum(one.answer.answer_tokens or 0 for one in answers)
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
    """Return one of them; a bank's name alone is a name of the model with that bank."""
    for entry in _models(service, key):
        if model in (entry["id"], entry["sedem"]["bank"]):
            return {**entry, "id": model}
    raise ApiError(404, f"there is no model '{model[:100]}'", "model", "model_not_found")


def _models(service: Service, key: Key) -> list[dict[str, Any]]:
    name, config = service.model.name, service.model.config
    # A client cuts its messages to this length; the server reads that much text with a question.
    context = service.settings.max_online_characters // CHARACTERS_PER_TOKEN
    defaults = {
        "k": config.k,
        **{name: getattr(config, name) for name in WAYS},
        "confidence": service.model.confidence is not None,
        "min_confidence": config.min_confidence,
        "reader": None if service.reader is None else service.reader.model or service.reader.host,
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
            "context_length": context,
            "max_model_len": context,
            "sedem": {**defaults, "bank": bank},
        }
        for id, created, bank in entries
    ]

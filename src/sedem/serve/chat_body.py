"""The format of the API's answers: OpenAI's fields, and `sedem` with everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sedem.answering.reply import Selected
from sedem.serve.asking import Answered, Asked

FINISH_REASONS: Mapping[str, str] = {"length": "length"}
"""OpenAI's name for a finish reason of `Answer`; every other one is "stop"."""


def citations_of(asked: Asked, selected: Selected) -> list[dict[str, Any]]:
    """The blocks that an answer is conditioned on, best first."""
    return [
        {
            **asdict(citation),
            "document_index": index,
            "file_id": asked.file_ids.get(citation.document),
        }
        for citation, index in zip(selected.citations, selected.documents, strict=True)
    ]


def selection_of(asked: Asked, selected: Selected) -> dict[str, Any]:
    """What a stream sends about an answer before its first token."""
    return {
        "citations": citations_of(asked, selected),
        "confidence": selected.confidence,
        "k": selected.k,
    }


def details_of(answered: Answered) -> dict[str, Any]:
    """The field `sedem` of an answer."""
    asked, answer = answered.asked, answered.answer
    details = {
        **selection_of(asked, answered.selected),
        "question": asked.request.question,
        "blocks": answer.blocks,
        "bank": asked.bank,
        "condition": asked.request.condition,
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


def annotations_of(asked: Asked, selected: Selected) -> list[dict[str, Any]]:
    """The citations in OpenAI's format, one for each block."""
    return [
        {
            "type": "file_citation",
            "file_citation": {
                "file_id": asked.file_ids.get(citation.document, citation.document),
                "filename": citation.document,
                "index": index,
            },
        }
        for citation, index in zip(selected.citations, selected.documents, strict=True)
    ]


def finish_reason_of(answered: Answered) -> str:
    """Why an answer ended, in OpenAI's terms."""
    return FINISH_REASONS.get(answered.answer.finish_reason, "stop")


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


def completion(frame: Mapping[str, Any], answered: Answered) -> dict[str, Any]:
    """The body of a complete answer.

    Args:
        frame: id, time and model.
        answered: the answer.
    """
    message = {
        "role": "assistant",
        "content": answered.answer.text,
        "refusal": None,
        "annotations": annotations_of(answered.asked, answered.selected),
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
    """A chunk of a streamed answer.

    Args:
        frame: id, time and model.
        delta: the new part of the message; None for a chunk without a choice.
        finish_reason: why the answer ended, in its last chunk.
        fields: further fields of the chunk.
    """
    choices = (
        []
        if delta is None
        else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
    )
    return {**frame, "object": "chat.completion.chunk", "choices": choices, **fields}

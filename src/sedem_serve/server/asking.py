"""Answer the body of a request: find its question and its bank, check the limits.

sedem answers one question from documents. The question is in the last message of the user. If no
bank is named, the documents are in the messages. If there are none either, the model replies to the
conversation, if it can chat. Messages that are not used are listed: nothing is lost silently.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from sedem.answering.conversation import conversation_request, no_documents
from sedem.answering.decoding import Decoding
from sedem.answering.running import CallPiece, Estimate, Selected
from sedem.method.selector import ALL
from sedem.selecting.plan import Options, Request
from sedem.selecting.select import document_indexes
from sedem.types import Answer
from sedem_serve.server.errors import ApiError, bad_request
from sedem_serve.server.guard import require_bank
from sedem_serve.server.keys import Key
from sedem_serve.server.logs import log
from sedem_serve.server.messages import read_conversation, unused_turn
from sedem_serve.server.service import Service
from sedem_serve.server.settings import ServerSettings
from sedem_serve.server.shapes import (
    NO_TOOL,
    SEVERAL,
    UNSUPPORTED,
    AskBody,
    Message,
    requires_tool,
)

SEPARATOR = "@"
"""Separates the model's name from the bank's name in `model`."""
SEED_BITS = 63
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-3, 2.0
"""Colder sampling takes the likeliest token; the second is the limit of OpenAI's API."""
LEAST_TOP_P = 1e-6
TOLD = ("system", "user", "assistant")
"""Roles whose words a reader is told."""
ANSWER_SHARE = 4
"""An answer takes at most this part, one in so many, of the decoder's positions."""


@dataclass(frozen=True)
class ResolvedQuestion:
    """A question that can be answered.

    Attributes:
        body: the body of the request.
        bank: name of the bank; None if the texts came with the question.
        unused: one sentence for each message that is not used.
        cached_tokens: tokens of documents that did not have to be read for this question.
        reply: the answer, if it is known without the model.
    """

    request: Request
    decoding: Decoding
    body: AskBody
    bank: str | None
    unused: tuple[str, ...]
    question_tokens: int
    cached_tokens: int
    reply: str | None = None


@dataclass(frozen=True)
class WholeAnswer:
    """An answer, its question, and the blocks that it was conditioned on."""

    asked: ResolvedQuestion
    selected: Selected
    answer: Answer


Part = Selected | Estimate | str | CallPiece | WholeAnswer
"""What an answer comes in."""
AnswerParts = AsyncGenerator[tuple[int, Part], None]
"""The parts of all answers to a request, each with the number of its answer."""


async def to_ask(service: Service, key: Key, body: AskBody) -> ResolvedQuestion:
    """Find or make the bank of a question, and check everything against the server's limits.

    Raises:
        ApiError: a field cannot be used, or there is no such bank or model.
        QueueFullError: too many questions wait, or too many texts wait to be read.
    """
    settings, model = service.settings, service.model
    # Who answers: who names a way to answer wants the model's own, which calls no tools.
    reader = service.reader if body.options["answer"] is None else None
    if requires_tool(body.tool_choice) and not (reader and body.tool_fields):
        raise bad_request(f"'tool_choice' {NO_TOOL}", "tool_choice", UNSUPPORTED)
    # Which bank; one that is out of scope must look like one that does not exist
    name = bank_name(service, key, body)
    decoding = decoding_of(body, settings, model.decoder.max_positions)
    if name is not None:
        require_bank(key, name)
    # A refusal must be cheap: there may be many while the queue is full.
    service.scheduler.require_room()
    # What is asked, in a thread, because a message may have millions of characters. What tools give
    # a reader to answer it is no document.
    turns = body.turns
    if reader is not None:
        by_user = [i for i, (role, words) in enumerate(turns) if role == "user" and words.strip()]
        for index in range(max(by_user, default=len(turns)), len(turns)):
            if "tool_call_id" in body.said[index].told:
                turns[index] = ("tool", "")
    conversation = await asyncio.to_thread(read_conversation, turns, with_bank=name is not None)
    if conversation is None:
        raise bad_request("the messages have no text; end them with a user's question", "messages")
    # How much of it
    count, most = len(conversation.question), settings.max_question_characters
    if count > most:
        raise bad_request(
            f"the question has {count:,} characters, this server allows at most {most:,}; put "
            "long text before the question, with a blank line between them, or into a bank",
            "messages",
            "question_too_long",
        )
    count, most = len(conversation.documents), settings.max_documents
    if count > most:
        raise bad_request(
            f"the messages hold {count:,} documents, this server allows at most {most:,}",
            "messages",
        )
    count, most = sum(len(d.text) for d in conversation.documents), settings.max_online_characters
    if count > most:
        raise ApiError(
            413,
            f"the messages hold {count:,} characters, this server reads at most {most:,} with a "
            "question; upload the text to a bank",
            "messages",
        )
    # Without documents, there is a reply that is known, or the model's own.
    if (reply := conversation.reply) is not None:
        request = Request(no_documents(model), "")
        return ResolvedQuestion(request, decoding, body, name, conversation.unused, 0, 0, reply)
    last = conversation.last
    if name is None and not conversation.documents:
        return await asyncio.to_thread(without_documents, service, body, last, decoding)
    # With documents: those of the messages, or of the bank
    if name is None:
        bank, cached = await service.online.bank(key.name, conversation.documents)
    else:
        entry = service.library.get(name)
        current = await asyncio.to_thread(lambda: entry.current)
        if current is None or not len(current):
            raise ApiError(
                409,
                f"bank '{name}' holds no documents yet; upload some, or wait until they are read",
                code="bank_empty",
            )
        bank, cached = current, current.tokens
    options: Options = {**body.options, "context": conversation.context}
    options["reader"], form = reader, body.answer_form
    if form is not None and form.field is None and reader is None:
        place = type(body).model_fields["answer_form"].validation_alias
        raise bad_request(f"'{place}' {SEVERAL}", str(place), UNSUPPORTED)
    request, unused = Request(bank, conversation.question, **options), conversation.unused
    if reader is not None:
        request = to_reader(request, body, last)
        # It is told what was said before; without a bank, that is in the documents.
        if name is None:
            request = replace(request, turns=())
        else:
            unused = ()
    # How much of the bank
    if isinstance(request.k, int) and request.k > settings.max_k:
        problem = f"'k' is {request.k}; this server allows at most {settings.max_k}"
        raise bad_request(f"{problem}, or 'all', or 'auto'", "k")
    if request.documents is not None and len(request.documents) > settings.max_documents:
        raise bad_request(
            f"'documents' has {len(request.documents):,} entries, this server allows at most "
            f"{settings.max_documents:,}",
            "documents",
        )
    room = model.engine.most_blocks()
    for field, asked in (("k", request.k == ALL), ("ranking", request.ranking)):
        if asked and room is not None and len(bank) > room:
            raise bad_request(
                f"'{field}' asks for every block; the bank has {len(bank):,}, and the memory of "
                f"this server is enough for {room:,}; ask for fewer, or start it with more "
                "--memory",
                field,
            )
    tokens = len(model.encoder.token_ids(request.question))
    return ResolvedQuestion(request, decoding, body, name, unused, tokens, cached)


def to_reader(request: Request, body: AskBody, last: int) -> Request:
    """Return a request with all that a body says to a reader.

    Args:
        last: index of the message that asks.
    """
    before, since = body.said[:last], body.said[last + 1 :]
    form = body.answer_form
    # As the client says it: the limits of this server's model are none of the reader's.
    given = {"max_tokens": body.max_tokens or None, **body.tool_fields}
    given["response_format"] = None if form is None else form.given
    return replace(
        request,
        turns=told(before),
        rounds=told([one for one in since if one.told.keys() & {"tool_calls", "tool_call_id"}]),
        passed={name: value for name, value in given.items() if value is not None},
    )


def told(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return what people, the assistant and the tools that it calls say, as a reader is told it."""
    kept = list[dict[str, Any]]()
    for message in messages:
        one, calls = message.told, message.told.get("tool_calls")
        # Calls come one by one in responses.
        if calls and not one["content"] and kept and "tool_calls" in kept[-1]:
            kept[-1] = {**kept[-1], "tool_calls": [*kept[-1]["tool_calls"], *calls]}
        elif calls or "tool_call_id" in one or (one["content"].strip() and one["role"] in TOLD):
            kept.append(one)
    return kept


def without_documents(
    service: Service, body: AskBody, last: int, decoding: Decoding
) -> ResolvedQuestion:
    """Return a conversation that is to be answered without documents.

    Args:
        last: index of the last turn that asks.
    """
    options, turns = body.options, body.turns
    if service.reader is not None and options["documents"] is None and options["answer"] is None:
        request = Request(no_documents(service.model), turns[last][1], reader=service.reader)
        request = to_reader(request, body, last)
        return ResolvedQuestion(request, decoding, body, None, (), 0, 0)
    needs_documents = options["documents"] is not None or options["min_confidence"] is not None
    if needs_documents or not service.model.decoder.tokenizer.chat_template:
        raise bad_request(
            "there is nothing to answer from; ask a bank, as model 'NAME@BANK', or put the text "
            "before the question, with a blank line between them",
            "messages",
            "no_documents",
        )
    said = {index: role for index, (role, words) in enumerate(turns) if words.strip()}
    by_tool = ("tool", "function")
    used = [i for i, role in said.items() if i <= last and role not in by_tool]
    words = [(said[i].replace("developer", "system"), turns[i][1]) for i in used]
    request, kept, changed = conversation_request(service.model, words, decoding.max_new_tokens)
    positions = service.model.decoder.max_positions
    why = dict.fromkeys(said, "it comes from a tool, or after the last question")
    why |= dict.fromkeys(used, f"newer ones fill the decoder's {positions:,} positions")
    for turn in kept:
        del why[used[turn]]
    unused = tuple(unused_turn(index, said[index], reason) for index, reason in why.items())
    unused += tuple(f"message {used[i] + 1} ({said[used[i]]}) {how}" for i, how in changed.items())
    tokens = len(request.prompt or ())
    return ResolvedQuestion(request, decoding, body, None, unused, tokens, 0)


async def answering(service: Service, key: Key, body: AskBody) -> AnswerParts:
    """Answer the body of a request, as many times as it asks for, one after the other.

    Yields:
        The number of the answer, and its parts: the blocks, how long it takes if that is long, the
        text in pieces, and the complete answer. JSON comes in one piece. Closing the generator
        cancels the question.
    """
    asked, parts = await to_ask(service, key, body), list[Part]()
    for number in range(body.choices):
        if number and not asked.decoding.temperature:
            # Greedy answers are all the same.
            for part in parts:
                yield number, part
            continue
        seed = (asked.decoding.seed + number) % 2**SEED_BITS
        sampled = replace(asked, decoding=replace(asked.decoding, seed=seed))
        async with aclosing(_answer(service, sampled)) as answer:
            async for part in answer:
                if (form := body.answer_form) is not None:
                    if isinstance(part, str):
                        continue
                    if isinstance(part, WholeAnswer):
                        text, own = part.answer.text, part.answer.model == service.model.name
                        text = in_json(text, form.field or "answer") if own else text
                        parts.append(text)
                        yield number, text
                        part = replace(part, answer=replace(part.answer, text=text))
                parts.append(part)
                yield number, part


async def _answer(service: Service, asked: ResolvedQuestion) -> AsyncGenerator[Part, None]:
    """Yield the parts of one answer as they come, and count it."""
    if asked.reply is not None:
        nothing = Selected((), (), None, False)
        yield nothing
        yield asked.reply
        told = Answer(asked.reply, (), 0, 0, {"total_ms": 0.0}, "end", asked.body.model)
        yield WholeAnswer(asked, nothing, told)
        return
    reply = service.scheduler.stream(asked.request, asked.decoding)
    try:
        selected = await reply.selection()
        yield selected
        async for part in reply.parts():
            if isinstance(part, Estimate):
                log("long answer", bank=asked.bank, blocks=part.blocks, seconds=round(part.seconds))
            yield part
        answer = reply.answer
        assert answer is not None
        times = answer.timings
        seconds = (times["total_ms"] - times["ttft_ms"]) / 1e3
        service.metrics.answered(answer, answer.answer_tokens or 0, seconds)
        if selected.k != answer.k:
            # The reader gave none, and the model's own answer has other sources.
            cited, bank = answer.citations, asked.request.bank.snapshot()
            indexes = (document_indexes(bank, [one.document])[0] for one in cited)
            selected = replace(selected, citations=cited, documents=tuple(indexes))
        if service.settings.log_text:
            log("answered", bank=asked.bank, question=asked.request.question, answer=answer.text)
        yield WholeAnswer(asked, selected, answer)
    except (asyncio.CancelledError, GeneratorExit):
        if reply.answer is None:
            service.metrics.cancelled.inc()
        raise
    finally:
        reply.cancel()


def in_json(text: str, field: str) -> str:
    """Return a text as the field of an object, unless it is the JSON of one that has it."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict) and (field in found or field == "answer"):
            return text
    return json.dumps({field: text}, ensure_ascii=False)


def bank_name(service: Service, key: Key, body: AskBody) -> str | None:
    """Return the name of the bank that a body addresses; None if it addresses none."""
    model, separator, name = body.model.partition(SEPARATOR)
    if model != service.model.name:
        if body.model not in service.library.names(key):
            raise ApiError(
                404,
                f"there is no model '{body.model[:100]}'; this server has '{service.model.name}', "
                f"and '{service.model.name}{SEPARATOR}BANK' for each bank",
                "model",
                "model_not_found",
            )
        name = body.model
    elif not separator:
        return body.bank
    if body.bank not in (None, name):
        raise bad_request("'model' and 'bank' name different banks; leave one of them out", "bank")
    return name


def decoding_of(body: AskBody, settings: ServerSettings, positions: int) -> Decoding:
    """Return the decoding settings of a request, within the limits of the server.

    Args:
        positions: number of positions of the decoder.
    """
    most = min(settings.max_tokens, max(1, positions // ANSWER_SHARE))
    limit = Decoding.max_new_tokens if body.max_tokens is None else body.max_tokens
    temperature = min(body.temperature or 0.0, MOST_TEMPERATURE)
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**SEED_BITS
    return Decoding(
        min(limit, most) if limit >= 1 else most,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=min(max(body.top_k or 0, 0), 2**31 - 1),
        top_p=1.0 if body.top_p is None else min(max(body.top_p, LEAST_TOP_P), 1.0),
        stop=body.stop,
        seed=seed,
        logprobs=body.alternatives,
    )

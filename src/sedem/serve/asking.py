"""Answer the body of a request: find its question and its bank, check the limits.

sedem answers one question from documents. The question is in the last message of the user. If no
bank is named, long messages are documents, and so is the text around the question in its own
message. If there are no documents either, the model replies to the conversation, if it can chat.
Messages that are not used are listed, so that nothing is ignored silently.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from sedem.answering.conversation import conversation_request
from sedem.answering.decoding import Decoding
from sedem.answering.requests import Request
from sedem.answering.running import Selected
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.method.selector import ALL
from sedem.serve.errors import bad_request, conflict, not_found, too_large
from sedem.serve.guard import require_bank
from sedem.serve.keys import Key
from sedem.serve.logs import log
from sedem.serve.service import Service
from sedem.serve.settings import Settings
from sedem.serve.shapes import AskBody, Message
from sedem.types import Answer, Document

SEPARATOR = "@"
"""Separates the model's name from the bank's name in `model`."""
SEED_BITS = 63
LONG = 400
"""Characters above which a message, or the text next to a question, is a document."""
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?…]\s+|\n\s*")
"""The end of the preceding sentence."""
WORDS = 3
"""Minimum words of a question cut out of a paragraph, because "Dr. Who?" is only one sentence."""


@dataclass(frozen=True)
class ResolvedQuestion:
    """A question that can be answered.

    Attributes:
        model: the client's name for the model.
        bank: name of the bank; None if the texts came with the question.
        unused: one sentence for each message that is not used.
        cached_tokens: tokens of documents that did not have to be read for this question.
    """

    request: Request
    decoding: Decoding
    model: str
    bank: str | None
    unused: tuple[str, ...]
    question_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Answered:
    """An answer, its question, and the blocks that it was conditioned on."""

    asked: ResolvedQuestion
    selected: Selected
    answer: Answer


async def to_ask(
    service: Service, key: Key, body: AskBody, messages: Sequence[Message]
) -> ResolvedQuestion:
    """Find or make the bank of a question, and check everything against the server's limits.

    Raises:
        ApiError: a field cannot be used, or there is no such bank or model.
        QueueFullError: too many questions wait, or too many texts wait to be read.
    """
    name = bank_name(service, body)
    settings, decoding = service.settings, decoding_of(body, service.settings)
    if name is not None:
        # Checked first: a bank out of scope must look like one that does not exist.
        require_bank(key, name)
    # A refusal must be cheap: there may be many while the queue is full.
    service.scheduler.require_room()
    conversation = read_conversation(messages, with_bank=name is not None)
    check_lengths(conversation, settings)
    if name is None and not conversation.documents:
        return await asyncio.to_thread(
            without_documents, service, body, messages, conversation, decoding
        )
    if name is None:
        bank, cached = await service.online.bank(key.name, conversation.documents)
    else:
        bank = await asyncio.to_thread(bank_of, service, name)
        cached = bank.tokens
    request = Request(
        bank,
        conversation.question,
        body.k,
        None,
        body.ranking,
        body.condition,
        body.selection,
        body.hops,
        body.answer,
        body.min_confidence,
        None if body.documents is None else [*body.documents],
    )
    check_selection(bank, body, settings)
    tokens = len(service.model.encoder.token_ids(conversation.question))
    return ResolvedQuestion(
        request, decoding, body.model, name, conversation.unused, tokens, cached
    )


def without_documents(
    service: Service,
    body: AskBody,
    messages: Sequence[Message],
    conversation: Conversation,
    decoding: Decoding,
) -> ResolvedQuestion:
    """Return a conversation that is to be answered without documents.

    Raises:
        ApiError: 400, documents are asked for, or the decoder has no chat template.
        ConfigError: the chat template rejects these turns.
    """
    decoder = service.model.decoder
    needs_documents = body.documents is not None or body.min_confidence is not None
    if needs_documents or not decoder.tokenizer.chat_template:
        raise bad_request(
            "there is nothing to answer from; ask a bank, as model 'NAME@BANK', or put the text "
            "before the question, with a blank line between them",
            "messages",
            "no_documents",
        )
    said = {index: message for index, message in enumerate(messages) if message.content.strip()}
    turns = [i for i, one in said.items() if i <= conversation.last and one.role != "tool"]
    words = [(said[i].role.replace("developer", "system"), said[i].content) for i in turns]
    request, kept = conversation_request(service.model, words, decoding.max_new_tokens)
    old = f"newer ones fill the decoder's {decoder.max_positions:,} positions"
    why = dict.fromkeys(said, "it comes from a tool, or after the last question")
    why |= dict.fromkeys(turns, old)
    for turn in kept:
        del why[turns[turn]]
    unused = tuple(_unused(index, messages[index], reason) for index, reason in why.items())
    tokens = len(request.prompt or ())
    return ResolvedQuestion(request, decoding, body.model, None, unused, tokens, 0)


async def answering(
    service: Service, asked: ResolvedQuestion
) -> AsyncGenerator[Selected | str | Answered, None]:
    """Answer a question.

    Yields:
        The blocks of the answer, its text in pieces, then the complete answer. Closing the
        generator cancels the question.

    Raises:
        QueueFullError: too many questions wait.
        SedemError: as in `Scheduler.submit`.
    """
    reply = service.scheduler.stream(asked.request, asked.decoding)
    try:
        selected = await reply.selection()
        yield selected
        async for piece in reply:
            yield piece
        answer = reply.answer
        assert answer is not None
        times = answer.timings
        seconds = (times["total_ms"] - times["ttft_ms"]) / 1e3
        service.metrics.answered(answer, answer.answer_tokens or 0, seconds)
        if service.settings.log_text:
            log("answered", bank=asked.bank, question=asked.request.question, answer=answer.text)
        yield Answered(asked, selected, answer)
    except (asyncio.CancelledError, GeneratorExit):
        if reply.answer is None:
            service.metrics.cancelled.inc()
        raise
    finally:
        reply.cancel()


async def whole_answer(
    service: Service, key: Key, body: AskBody, messages: Sequence[Message]
) -> Answered:
    """Answer a question and wait for the end; arguments and errors as in `to_ask`."""
    asked = await to_ask(service, key, body, messages)
    async with aclosing(answering(service, asked)) as parts:
        async for part in parts:
            if isinstance(part, Answered):
                return part
    raise AssertionError("an answer always ends with the whole")


def bank_name(service: Service, body: AskBody) -> str | None:
    """Return the name of the bank that a body addresses; None if it addresses none.

    Raises:
        ApiError: there is no such model, or two banks are named.
    """
    model, separator, name = body.model.partition(SEPARATOR)
    if model != service.model.name:
        raise not_found(
            f"there is no model '{body.model[:100]}'; this server has '{service.model.name}', and "
            f"'{service.model.name}{SEPARATOR}BANK' for each bank",
            "model",
            "model_not_found",
        )
    if not separator:
        return body.bank
    if body.bank not in (None, name):
        raise bad_request("'model' and 'bank' name different banks; leave one of them out", "bank")
    return name


def bank_of(service: Service, name: str) -> Snapshot:
    """Return a bank as it is now.

    Raises:
        ApiError: there is no such bank, or it is empty.
    """
    snapshot = service.library.get(name).snapshot
    if snapshot is None or not len(snapshot):
        raise conflict(
            f"bank '{name}' holds no documents yet; upload some, or wait until they are read",
            "bank_empty",
        )
    return snapshot


def decoding_of(body: AskBody, settings: Settings) -> Decoding:
    """Return the decoding settings of a request.

    Raises:
        ApiError: more tokens are asked for than the server allows.
        ConfigError: a value cannot be used.
    """
    field, limit = body.limit
    if limit is not None and limit > settings.max_tokens:
        raise bad_request(
            f"'{field}' is {limit:,}; this server allows at most {settings.max_tokens:,}", field
        )
    seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed % 2**SEED_BITS
    return Decoding(
        min(Decoding.max_new_tokens, settings.max_tokens) if limit is None else limit,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stops,
        seed=seed,
    )


def check_lengths(conversation: Conversation, settings: Settings) -> None:
    """Reject more text than the server accepts with a question, with 400 or 413."""
    length, most = len(conversation.question), settings.max_question_characters
    if length > most:
        raise bad_request(
            f"the question has {length:,} characters, this server allows at most {most:,}; put "
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
    size = sum(len(document.text) for document in conversation.documents)
    if size > settings.max_online_characters:
        raise too_large(
            f"the messages hold {size:,} characters, this server reads at most "
            f"{settings.max_online_characters:,} with a question; upload the text to a bank",
            "messages",
        )


def check_selection(bank: BankReader, body: AskBody, settings: Settings) -> None:
    """Reject more blocks or documents than the server allows for one answer, with 400."""
    if isinstance(body.k, int) and body.k > settings.max_k:
        raise bad_request(
            f"'k' is {body.k}; this server allows at most {settings.max_k}, or 'all', or 'auto'",
            "k",
        )
    if body.documents is not None and len(body.documents) > settings.max_documents:
        raise bad_request(
            f"'documents' has {len(body.documents):,} entries, this server allows at most "
            f"{settings.max_documents:,}",
            "documents",
        )
    for field, asked in (("k", body.k == ALL), ("ranking", body.ranking)):
        if asked and len(bank) > settings.max_all_blocks:
            raise bad_request(
                f"'{field}' asks for every block; the bank has {len(bank):,}, this server allows "
                f"that for at most {settings.max_all_blocks:,}",
                field,
            )


# Messages


@dataclass(frozen=True)
class Conversation:
    """A question, its documents, and one sentence for each message that is neither.

    Attributes:
        last: index of the question's message.
    """

    question: str
    documents: tuple[Document, ...]
    unused: tuple[str, ...]
    last: int


def read_conversation(messages: Sequence[Message], *, with_bank: bool) -> Conversation:
    """Find the question and the documents in messages.

    Args:
        with_bank: whether a bank is named, so that messages are not documents.

    Raises:
        ApiError: 400, there is no question.
        DataError: a document is not Unicode text.
    """
    last = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last is None or not messages[last].content.strip():
        raise bad_request(
            "no user message asks anything; end the messages with a user's question", "messages"
        )
    question, beside = messages[last].content.strip(), ""
    if not with_bank:
        question, beside = split(question)
    texts = {last: beside} if beside else {}
    unused = []
    why = f"it is not the last question, and a document needs more than {LONG} characters"
    if with_bank:
        why = "a bank is asked, and only the last question counts"
    for index, message in enumerate(messages):
        if index == last or not message.content.strip():
            continue
        if not with_bank and message.role != "assistant" and len(message.content) > LONG:
            texts[index] = message.content
        else:
            unused.append(_unused(index, message, why))
    documents = [Document(f"message {index + 1}", texts[index]) for index in sorted(texts)]
    return Conversation(question, tuple(documents), tuple(unused), last)


def _unused(index: int, message: Message, why: str) -> str:
    return f"message {index + 1} ({message.role}) was not used: {why}"


def split(text: str) -> tuple[str, str]:
    """Split a message without surrounding white space into its question and the document around it.

    The question is the last paragraph, or the first one if only that ends with a question mark. In
    a long paragraph, it is the last sentence or line, if that ends with a question mark.

    Returns:
        The question, and the rest, which may be empty.

    Raises:
        ApiError: 400, it is a long text without a question.
    """
    if "\n" in text and (found := list(_BLANK_LINES.finditer(text))):
        first, last = text[: found[0].start()], text[found[-1].end() :]
        if first.endswith("?") and not last.endswith("?") and len(first) <= LONG:
            return first, text[found[0].end() :]
        if len(last) <= LONG:
            return last, text[: found[-1].start()]
    if len(text) <= LONG:
        return text, ""
    start = _last_question(text)
    if start is None:
        raise bad_request(
            f"the last message is a text of {len(text):,} characters without a question; end it "
            "with a blank line and the question",
            "messages",
            "no_question",
        )
    return text[start:], text[:start].rstrip()


def _last_question(text: str) -> int | None:
    """Return where the last sentence of a text begins, if it is a question."""
    if not text.endswith("?"):
        return None
    # Only the end is searched: a text may have millions of characters.
    end = max(0, len(text) - LONG)
    starts = [end + sentence.end() for sentence in _SENTENCE.finditer(text[end:])]
    return next((one for one in reversed(starts) if len(text[one:].split()) >= WORDS), None)

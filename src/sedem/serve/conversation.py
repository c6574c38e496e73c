"""Find the question in the messages of a conversation, and the text to answer it from.

sedem answers one question from documents. The question is in the last message of the user. If no
bank is named, long messages are documents, and so is the text around the question in its own
message. Messages that are not used are listed, so that nothing is ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sedem.serve.errors import ApiError, bad_request
from sedem.serve.shapes import Message
from sedem.types import Document

LONG = 400
"""Characters above which a message, or the text next to a question, is a document."""
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?…]\s+|\n\s*")
"""The end of the preceding sentence."""
WORDS = 3
"""Minimum words of a question cut out of a paragraph, because "Dr. Who?" is only one sentence."""


@dataclass(frozen=True)
class Conversation:
    """A question and its documents.

    Attributes:
        documents: the remaining texts; none if a bank is named.
        unused: one sentence for each message that is neither.
    """

    question: str
    documents: tuple[Document, ...]
    unused: tuple[str, ...]


def read_conversation(messages: Sequence[Message], *, with_bank: bool) -> Conversation:
    """Find the question and the documents in messages.

    Args:
        messages: the messages, the oldest first.
        with_bank: whether a bank is named, so that messages are not documents.

    Raises:
        ApiError: 400, there is no question, or there is nothing to answer from.
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
    for index, message in enumerate(messages):
        if index == last or not message.content.strip():
            continue
        if not with_bank and message.role != "assistant" and len(message.content) > LONG:
            texts[index] = message.content
        else:
            unused.append(f"message {index + 1} ({message.role}) was not used: {_why(with_bank)}")
    if not with_bank and not texts:
        raise nothing_to_read()
    documents = [Document(f"message {index + 1}", texts[index]) for index in sorted(texts)]
    return Conversation(question, tuple(documents), tuple(unused))


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


def nothing_to_read() -> ApiError:
    """Return the error for a question without documents."""
    return bad_request(
        "there is nothing to answer from; ask a bank, as model 'NAME@BANK', or put the text before "
        "the question, with a blank line between them",
        "messages",
        "no_documents",
    )


def _why(with_bank: bool) -> str:
    if with_bank:
        return "a bank is asked, and only the last question counts"
    return f"it is not the last question, and a document needs more than {LONG} characters"

"""Prompts, answer limits and end tokens, the same for every method.

Methods therefore never differ in their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem.types import check_unicode

ANSWER_LIMIT = 64
"""Token limit of an answer (appendix Implementation Details)."""

LONG_ANSWER_LIMIT = 128
"""The same for QASPER and RULER."""

UNANSWERABLE = "The documents do not say."
"""The answer if the evidence seems to be missing from the documents."""

SEPARATOR = "\n\n"
"""Separates documents from each other, and a context from the question."""


def question_prompt(question: str) -> str:
    """Return the prompt that follows the context, whether text or restored states."""
    return f"{SEPARATOR}{question_words(question)}"


def question_words(question: str) -> str:
    """Return the same without the leading separator, as used in a user's turn."""
    return f"Question: {question.strip()}\nAnswer:"


def context_prompt(texts: Sequence[str]) -> str:
    """Join documents into one context, for methods that read text."""
    return SEPARATOR.join(text.strip() for text in texts)


def question_ids(
    backbone: Backbone, question: str, texts: Sequence[str] = (), *, chat: bool = False
) -> list[int]:
    """Return the decoder tokens of a question: the start token, texts and the prompt.

    Args:
        texts: texts to read before the question.
        chat: whether texts and question go in the user's turn of the chat template.

    Raises:
        DataError: the question is empty or not Unicode text.
    """
    check_unicode(question, "the question")
    if not question.strip():
        raise DataError("the question is empty; ask something, such as 'Who signed the lease?'")
    (ids,) = all_question_ids(backbone, [question], chat=chat)
    return with_texts(backbone, ids, texts, chat=chat)


def with_texts(
    backbone: Backbone, ids: list[int], texts: Sequence[str], *, chat: bool = False
) -> list[int]:
    """Return the tokens of a question with texts inserted before it; see `question_ids`."""
    if not texts:
        return ids
    place = context_place(backbone, chat=chat)
    return [*ids[:place], *context_ids(backbone, texts, chat=chat), *ids[place:]]


def context_ids(backbone: Backbone, texts: Sequence[str], *, chat: bool = False) -> list[int]:
    """Return the tokens of texts that are read before a question."""
    if not texts:
        return []
    return backbone.token_ids(context_prompt(texts) + (SEPARATOR if chat else ""))


def context_place(backbone: Backbone, *, chat: bool = False) -> int:
    """Return the number of prompt tokens before its texts: the start token, and those of a turn."""
    return 1 + (len(backbone.chat.before) if chat else 0)


def answer_ids(backbone: Backbone, answer: str, *, chat: bool = False) -> list[int]:
    """Return the target tokens of an answer: a space, the answer and the end token.

    With a chat template there is no space, and the end token is that of the model's turn.
    """
    return all_answer_ids(backbone, [answer], chat=chat)[0]


def end_ids(backbone: Backbone, *, chat: bool = False) -> list[int]:
    """Return the tokens that end an answer."""
    return backbone.chat.ends if chat else [backbone.eos_token_id]


def all_question_ids(
    backbone: Backbone, questions: Sequence[str], *, chat: bool = False
) -> list[list[int]]:
    """Return `question_ids` of several questions, tokenized together."""
    words = question_words if chat else question_prompt
    tokens = backbone.tokenize([words(question) for question in questions])["input_ids"]
    before, after = (backbone.chat.before, backbone.chat.after) if chat else ([], [])
    return [[backbone.bos_token_id, *before, *ids, *after] for ids in tokens]


def all_answer_ids(
    backbone: Backbone, answers: Sequence[str], *, chat: bool = False
) -> list[list[int]]:
    """Return `answer_ids` of several answers, tokenized together."""
    space = "" if chat else " "
    tokens = backbone.tokenize([space + answer.strip() for answer in answers])["input_ids"]
    end, *_ = end_ids(backbone, chat=chat)
    return [[*ids, end] for ids in tokens]

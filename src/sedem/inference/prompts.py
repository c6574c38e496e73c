"""Prompts, answer limits and end tokens, the same for every method.

Differences between methods are thus never differences of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem.types import check_unicode

ANSWER_LIMIT = 64
"""The most tokens of an answer (appendix Implementation Details)."""

LONG_ANSWER_LIMIT = 128
"""The same for QASPER and RULER."""

UNANSWERABLE = "The documents do not tell."
"""The answer to a question whose evidence seems not to be in the documents."""

SEPARATOR = "\n\n"
"""Between two documents, and between a context and the question."""


def question_prompt(question: str) -> str:
    """Return the prompt that follows the context, whether text or restored states."""
    return f"{SEPARATOR}Question: {question.strip()}\nAnswer:"


def context_prompt(texts: Sequence[str]) -> str:
    """Join documents to one context, for methods that read text."""
    return SEPARATOR.join(text.strip() for text in texts)


def question_ids(backbone: Backbone, question: str, texts: Sequence[str] = ()) -> list[int]:
    """Return the decoder tokens of a question: the start token, texts and the prompt.

    Args:
        backbone: the decoder.
        question: the question.
        texts: what is read as text before the question.

    Raises:
        DataError: the question is empty or not Unicode text.
    """
    check_unicode(question, "the question")
    if not question.strip():
        raise DataError("the question is empty; ask something, such as 'Who signed the lease?'")
    context = backbone.token_ids(context_prompt(texts)) if texts else []
    return [backbone.bos_token_id, *context, *backbone.token_ids(question_prompt(question))]


def answer_ids(backbone: Backbone, answer: str) -> list[int]:
    """Return the target tokens of an answer: a space, the answer and the end token."""
    return all_answer_ids(backbone, [answer])[0]


def all_question_ids(backbone: Backbone, questions: Sequence[str]) -> list[list[int]]:
    """Return `question_ids` of several questions of examples, tokenized together."""
    tokens = backbone.tokenize([question_prompt(question) for question in questions])["input_ids"]
    return [[backbone.bos_token_id, *ids] for ids in tokens]


def all_answer_ids(backbone: Backbone, answers: Sequence[str]) -> list[list[int]]:
    """Return `answer_ids` of several answers, tokenized together."""
    tokens = backbone.tokenize([f" {answer.strip()}" for answer in answers])["input_ids"]
    return [[*ids, backbone.eos_token_id] for ids in tokens]

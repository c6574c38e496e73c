"""The one place that knows prompt text, answer limits and the end token.

Every method gets the same words, so that differences between methods are not differences of prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from sedem.backbone.decoder import Backbone
from sedem.errors import DataError
from sedem.types import check_unicode

ANSWER_LIMIT = 64
"""Most tokens of an answer (appendix Implementation Details)."""

LONG_ANSWER_LIMIT = 128
"""The same for QASPER and RULER."""


SEPARATOR = "\n\n"
"""Stands between two documents, and between a context and what is asked about it."""


def question_prompt(question: str) -> str:
    """What stands after the context, be it text or restored states."""
    return f"{SEPARATOR}Question: {question.strip()}\nAnswer:"


def context_prompt(texts: Sequence[str]) -> str:
    """Documents as raw text, for methods that read text."""
    return SEPARATOR.join(text.strip() for text in texts)


def question_ids(backbone: Backbone, question: str) -> list[int]:
    """Decoder tokens of a question: start token, prompt, question.

    Raises:
        DataError: the question is empty or no Unicode text.
    """
    check_unicode(question, "the question")
    if not question.strip():
        raise DataError("the question is empty; ask something, such as 'Who signed the lease?'")
    return [backbone.bos_token_id, *backbone.token_ids(question_prompt(question))]


def answer_ids(backbone: Backbone, answer: str) -> list[int]:
    """Target tokens of an answer: a space, the answer, the backbone's own end token."""
    return [*backbone.token_ids(f" {answer.strip()}"), backbone.eos_token_id]

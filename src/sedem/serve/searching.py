"""Scores of a bank's blocks for a question, within the limits of the server."""

from __future__ import annotations

from sedem.bank.memory_bank import BankReader
from sedem.serve.errors import bad_request
from sedem.serve.service import Service


def scores_of(service: Service, memory: BankReader | None, question: str) -> list[float]:
    """Return the selector's score of every block; this briefly occupies the engine.

    Args:
        service: the model and the limits.
        memory: the bank; None if nothing has been read into it yet.
        question: the question.

    Raises:
        ApiError: 400, the question is too long.
        DataError: the question is empty.
    """
    most = service.settings.max_question_characters
    if len(question) > most:
        raise bad_request(
            f"the question has {len(question):,} characters, at most {most:,} are allowed; "
            "shorten it",
            "question",
        )
    if memory is None or not len(memory):
        return []
    scores: list[float] = service.scheduler.scores(memory, question).tolist()
    return scores

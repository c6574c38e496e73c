"""Warm-up questions, asked before real ones, so that an engine has prepared what they need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sedem.answering.answer import respond
from sedem.answering.decoding import Decoding
from sedem.answering.requests import Request
from sedem.backbone.decoder import Backbone
from sedem.bank.memory_bank import BankReader
from sedem.engine.interface import Engine
from sedem.guidance.budgets import Budget
from sedem.modules import SedemModules

USUAL = 60
"""Number of tokens of the longest question that is rehearsed."""
STRIDE = 4
"""Lengths are rehearsed in steps of this many tokens, half the rounding of buffers."""
WORD = "word"
"""Repeated and cut to a number of tokens."""


def rehearse(
    model: SedemModules,
    engine: Engine,
    bank: BankReader,
    k: Budget | None,
    decoding: Decoding,
    name: str,
) -> None:
    """Answer questions of every usual length, each up to its second token.

    Args:
        model: the model that will answer.
        engine: its engine.
        bank: the bank that will be asked.
        k: number of blocks; None means the model's default.
        decoding: how answers will be generated.
        name: the model's name.
    """
    # The limit decides how large the buffers are; stop strings and sampling do not.
    limit = Decoding(max_new_tokens=decoding.max_new_tokens)
    for question in _questions(model.encoder):
        answering = respond(model, engine, [Request(bank, question, k)], limit, name)
        for _ in islice(answering, 2):  # the second token comes from a step
            pass
        answering.close()


def _questions(encoder: Backbone) -> Iterator[str]:
    text = " ".join([WORD] * (USUAL + STRIDE))
    ends = [end for _, end in encoder.tokenize([text], offsets=True)["offset_mapping"][0]]
    for count in range(1, USUAL + STRIDE, STRIDE):
        yield text[: ends[count - 1]]

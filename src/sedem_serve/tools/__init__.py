"""Banks as tools of agents and of other programs."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The most characters of a question, blocks of an answer, and tokens of an answer."""

    question: int = 8_000
    k: int = 64
    tokens: int = 512


USUAL = Limits()

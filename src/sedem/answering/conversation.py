"""From a conversation without documents to a request: a prompt in the chat template, no memory.

Its bank has no blocks, so that engines run it like any other request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import torch

from sedem.answering.decoding import Turn, check_question, conversation_ids
from sedem.answering.requests import Request, Scores, Selection
from sedem.bank.blocks import Blocks
from sedem.bank.memory_bank import MemoryBank, Snapshot
from sedem.errors import ConfigError
from sedem.modules import SedemModules
from sedem.quantization import Quantized


def conversation_request(
    model: SedemModules, turns: Sequence[Turn], limit: int
) -> tuple[Request, list[int]]:
    """Return the request for the reply to a conversation.

    If it exceeds the decoder's positions, the oldest turns are left out, up to one of the user. A
    first turn of the system always stays.

    Args:
        turns: none is empty, and the last one is the user's.
        limit: token limit of the reply.

    Returns:
        The request, and the indexes of the turns in it.

    Raises:
        ConfigError: the decoder has no chat template, or it rejects these turns.
        DataError: the last turn is empty or not Unicode text.
    """
    decoder, question = model.decoder, turns[-1][1].strip()
    check_question(question)
    if not decoder.tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of backbone '{decoder.name}' has no chat template, which answers "
            "without documents need; give a bank, or use a backbone that follows instructions"
        )
    first, room = int(turns[0][0] == "system"), decoder.max_positions - limit
    # Every turn has at least one token.
    oldest = max(first, len(turns) - max(room, 1))
    starts = [i for i in range(oldest, len(turns)) if i == first or turns[i][0] == "user"]

    def kept(start: int) -> list[int]:
        return [*range(first), *range(start, len(turns))]

    def prompt(start: int) -> list[int]:
        return conversation_ids(decoder, [turns[i] for i in kept(start)])

    # If not even the last turn fits, preparing the request raises an error with the numbers.
    start = starts[bisect_left(starts[:-1], True, key=lambda start: len(prompt(start)) <= room)]
    nothing = no_documents(model.fingerprint(), model.config.slots_per_block, decoder.width)
    selected = Selection([], [], [], Scores(torch.zeros(0)))
    return Request(nothing, question, selected=selected, prompt=prompt(start)), kept(start)


@lru_cache(maxsize=1)
def no_documents(fingerprint: str, slots: int, width: int) -> Snapshot:
    """Return the empty bank of a model; always the same one, so that each replica gets it once."""
    memory_NJD = Quantized(torch.zeros(0, slots, width, dtype=torch.bfloat16))
    return MemoryBank(fingerprint, {}, [], Blocks.none(slots), memory_NJD).snapshot()

"""The request for a reply to a conversation without documents.

The bank of such a request has no blocks, so that engines run it like any other request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import torch

from sedem.backbone.prompts import Turn, check_question, conversation_ids
from sedem.bank.blocks import Blocks
from sedem.bank.memory_bank import MemoryBank, Snapshot
from sedem.errors import ConfigError
from sedem.modules import SedemModules
from sedem.quantization import Quantized
from sedem.selecting.plan import Request, Scores, Selection


def conversation_request(
    model: SedemModules, turns: Sequence[Turn], limit: int
) -> tuple[Request, list[int], dict[int, str]]:
    """Return the request for the reply to a conversation.

    If it exceeds the decoder's positions, the oldest turns are left out, up to one of the user. A
    first turn of the system always stays. Turns that the chat template rejects are folded.

    Args:
        turns: none is empty, and the last one is the user's.
        limit: token limit of the reply.

    Returns:
        The request, the indexes of its turns, and what happened to those that were folded.

    Raises:
        ConfigError: the decoder has no chat template, or it rejects these turns folded, too.
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

    @cache
    def prompt(start: int) -> tuple[list[int], dict[int, str]]:
        chosen = kept(start)
        try:
            return conversation_ids(decoder, [turns[i] for i in chosen]), {}
        except ConfigError:
            folded, changed = fold({i: turns[i] for i in chosen})
            if not changed:
                raise
            return conversation_ids(decoder, folded), changed

    # If not even the last turn fits, preparing the request raises an error with the numbers.
    place = bisect_left(starts[:-1], True, key=lambda start: len(prompt(start)[0]) <= room)
    (ids, changed), selected = prompt(starts[place]), Selection([], [], [], Scores(torch.zeros(0)))
    request = Request(no_documents(model), question, selected=selected, prompt=ids)
    return request, kept(starts[place]), changed


def fold(turns: Mapping[int, Turn]) -> tuple[list[Turn], dict[int, str]]:
    """Return turns as every chat template takes them: the user and the assistant in turn.

    Words of the system go before those of the user.

    Returns:
        The turns, and what happened to those that did not stay as they are, by index.
    """
    folded, changed, before = list[Turn](), dict[int, str](), list[str]()
    for index, (role, words) in turns.items():
        if role == "system":
            before.append(words)
            changed[index] = "was put before the user's words: the chat template has no such turn"
        elif role == "assistant" and not folded:
            changed[index] = "was not used: in the chat template, the user begins"
        elif folded and folded[-1][0] == role:
            folded[-1] = role, "\n\n".join([folded[-1][1], *before * (role == "user"), words])
            changed[index] = f"was joined with the {role}'s message before it"
        else:
            folded.append((role, "\n\n".join([*before * (role == "user"), words])))
        if role == "user":
            before = []
    if before:
        folded.append(("user", "\n\n".join(before)))
    return folded, changed


def no_documents(model: SedemModules) -> Snapshot:
    """Return the empty bank of a model; always the same one, so that each replica gets it once."""
    return _empty_bank(model.fingerprint(), model.config.slots_per_block, model.decoder.width)


@lru_cache(maxsize=1)
def _empty_bank(fingerprint: str, slots: int, width: int) -> Snapshot:
    memory_NJD = Quantized(torch.zeros(0, slots, width, dtype=torch.bfloat16))
    return MemoryBank(fingerprint, {}, [], Blocks.none(slots), memory_NJD).snapshot()

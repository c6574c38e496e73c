"""What a conversation asks, and the request for a reply to it without documents.

The bank of such a request has no blocks, so that engines run it like any other request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from sedem.answering.templates import LONG, document_of, housekeeping, split
from sedem.backbone.prompts import Turn, check_question, conversation_ids
from sedem.bank.blocks import Blocks
from sedem.bank.memory_bank import MemoryBank, Snapshot
from sedem.errors import ConfigError
from sedem.modules import SedemModules
from sedem.selecting.plan import Request, Scores, Selection
from sedem.selecting.select import share_of_context
from sedem.tensors import Quantized
from sedem.types import Document


@dataclass(frozen=True)
class Conversation:
    """What a conversation asks.

    Attributes:
        question: empty if it asks nothing that documents could answer.
        documents: texts that came with the question.
        unused: one sentence for each message that is neither.
        last: index of the question's turn.
        reply: the answer, if no document is needed for it.
        context: the question before and its answer, if the question refers back to them.
    """

    question: str
    documents: tuple[Document, ...]
    unused: tuple[str, ...]
    last: int
    reply: str | None = None
    context: str = ""


def read_conversation(turns: Sequence[Turn], *, with_bank: bool) -> Conversation | None:
    """Find the question of a conversation, and its documents.

    Args:
        turns: roles, as clients name them, and words.
        with_bank: whether a bank is asked, so that turns are no documents.

    Returns:
        What it asks; None if nobody but the assistant says anything.

    Raises:
        DataError: a document is not Unicode text.
    """
    said = [i for i, (role, words) in enumerate(turns) if words.strip() and role != "assistant"]
    by_user = [i for i in said if turns[i][0] == "user"]
    if not said:
        return None
    last = (by_user or said)[-1]
    text = turns[last][1].strip()
    reply = housekeeping(text)
    question, beside = ("", "") if reply is not None else split(text, with_bank=with_bank)
    if not question and reply is None:
        reply = (
            f"The last message is a text of {len(text):,} characters that asks nothing. Send it "
            "again with a blank line and a question after it."
        )
    why = f"it is not the last question, and a document needs more than {LONG} characters"
    if with_bank:
        why = "a bank is asked, and only the last question counts"
    before: list[int] = []
    if share_of_context(question):
        # The question before, and what was answered.
        asked = max((i for i in by_user if i < last), default=last)
        before = [i for i in range(asked, last) if turns[i][0] in ("user", "assistant")]
    texts, unused = dict[int, str](), list[str]()
    for index, (role, words) in enumerate(turns):
        document = beside if index == last else document_of(role, words)
        if document and not with_bank:
            texts[index] = document
        used = (question if index == last else "") + texts.get(index, "")
        if used and len("".join(used.split())) < len("".join(words.split())):
            rest = why if with_bank else "the rest is no question and no document"
            unused.append(f"message {index + 1} ({role}) was used only in part: {rest}")
        elif index not in (*before, last) and words.strip() and not used:
            unused.append(unused_turn(index, role, why))
    documents = [Document(f"message {index + 1}", texts[index]) for index in sorted(texts)]
    context = "\n".join(turns[i][1][:LONG] for i in before if i not in texts)
    return Conversation(question, tuple(documents), tuple(unused), last, reply, context)


def unused_turn(index: int, role: str, why: str) -> str:
    """Return the sentence about a turn that is not used."""
    return f"message {index + 1} ({role}) was not used: {why}"


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

"""From a request to the inputs of its answer: its blocks, their citations, and the prefix.

Letters: K selected blocks, U restored states, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from sedem.backbone.prompts import question_ids, with_texts
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import Clock, in_pieces
from sedem.engine.interface import WIDE, AnswerInputs, Engine
from sedem.errors import ConfigError, SedemError
from sedem.guidance.scores import text_count
from sedem.method.compressor import state_mask
from sedem.modules import SedemModules
from sedem.selecting.plan import Plan, Request, Selection, plan_of
from sedem.selecting.select import select
from sedem.types import Citation

CHARACTERS_PER_TOKEN = 4
"""Usual length of a token in English."""
LONG_TEXT = 1024
"""Tokens of text from which a prefill is long."""


@dataclass(frozen=True)
class Prepared:
    """A request whose blocks are selected.

    Attributes:
        inputs: the inputs of the answer; None if the request is declined.
        conditioning: number of positions that the upper layers see before the first answer token; 0
            if the answer is declined.
        prompt: decoder tokens of the question, without texts.
    """

    plan: Plan
    selection: Selection
    inputs: AnswerInputs | None
    conditioning: int
    prompt: list[int]

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The spans behind the selected blocks, best first."""
        scores, ranked = self.selection.scores, in_pieces(self.selection.ranked)
        return tuple(
            replace(self.plan.bank.citation(index, rank), **scores.cited(index))
            for rank, index in enumerate(ranked, start=1)
        )


@torch.no_grad()
def prepare(
    model: SedemModules,
    engine: Engine,
    requests: Sequence[Request],
    limits: Sequence[int],
    clock: Clock,
) -> list[Prepared]:
    """Select the blocks of requests, and make the inputs of their answers; nothing is decoded yet.

    Raises:
        BankMismatchError: another model made a bank.
        DataError: a question is empty or too long.
        ConfigError: an option of a request cannot be used, or an answer has too many positions.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    plans, chat = [plan_of(model, request) for request in requests], model.config.chat_template
    # The blocks of all that were not selected elsewhere.
    undecided = [plan for plan in plans if plan.selected is None]
    found = iter(select(model, engine, undecided, clock) if undecided else [])
    prepared = []
    for plan, limit in zip(plans, limits, strict=True):
        selection, inputs, conditioning = plan.selected or next(found), None, 0
        prompt = plan.prompt or question_ids(model.decoder, plan.question, chat=chat)
        if not selection.declined:
            # Blocks as text go into the prompt; those as memory are restored before it.
            inputs = inputs_of(model, plan, selection, prompt)
            by_score = [block for block in selection.ranked if block in {*selection.memory}]
            sizes, texts = restored_sizes(model, plan.bank, by_score), len(selection.texts)
            check_fits(model, sizes, len(inputs.prefix), limit, texts)
            conditioning = sum(sizes) + len(inputs.prefix)
        prepared.append(Prepared(plan, selection, inputs, conditioning, [*prompt]))
    clock.lap("gather_ms")
    return prepared


def inputs_of(
    model: SedemModules, plan: Plan, selection: Selection, prompt: Sequence[int]
) -> AnswerInputs:
    """Return the inputs of an answer from selected blocks; those as text stand in the prefix.

    Args:
        prompt: `prompts.question_ids` of the question, without texts.
    """
    texts = [plan.bank.block_text(index) for index in selection.texts]
    ids = with_texts(model.decoder, [*prompt], texts, chat=model.config.chat_template)
    scores_K = selection.scores.total[selection.memory]
    return AnswerInputs(plan.bank, selection.memory, scores_K, torch.tensor(ids))


def restored_sizes(model: SedemModules, bank: BankReader, blocks: Sequence[int]) -> list[int]:
    """Return the number of decoder states that each block is restored to."""
    real_KU = state_mask(bank.slot_tokens(blocks), model.decompressor.states_per_slot)
    return real_KU.sum(1).tolist()


def check_fits(
    model: SedemModules, sizes: Sequence[int], prefix: int, limit: int, texts: int = 0
) -> None:
    """Check that states, prompt and answer fit into the decoder's positions.

    Independent blocks all have the same positions, so only the longest counts, and any K fits.

    Args:
        sizes: number of states of each selected block, best first.
        texts: number of blocks in the prompt as text.

    Raises:
        ConfigError: they do not fit; the message has all numbers and the largest K that fits.
    """
    max_positions = model.decoder.max_positions
    apart = model.config.block_context == "independent"
    ends = list(accumulate(sizes, max if apart else None))
    states = ends[-1] if ends else 0
    if ends and model.config.read_once:
        states = model.config.states_per_block
    if states + prefix + limit <= max_positions:
        return
    largest_k = sum(end + prefix + limit <= max_positions for end in ends)
    if texts > 1:
        remedy = "use a smaller k, or read blocks as memory"
    else:
        remedy = f"use k of at most {largest_k}" if largest_k else "ask something shorter"
    what = "states of the longest block" if apart else "selected states"
    memory = f"{states:,} {what}, " if sizes else ""
    raise ConfigError(
        f"{memory}{prefix:,} prompt tokens and an answer of up to {limit:,} tokens make "
        f"{states + prefix + limit:,} positions, the decoder has {max_positions:,}; {remedy}"
    )


def is_long(model: SedemModules, request: Request) -> bool:
    """Whether a request may take so long that others should not wait for it.

    It is decided before blocks are selected, by the most that the request may use.
    """
    try:
        plan = plan_of(model, request)
    except SedemError:
        return False  # told when its turn comes
    most, states = min(plan.most, len(plan.bank)), model.config.states_per_block
    texts = text_count(plan.condition, most)
    asked = len(plan.prompt or ()) or len(plan.question) // CHARACTERS_PER_TOKEN
    # A block read as text takes as many tokens as there are states of it in memory.
    return (most - texts) * states > WIDE or texts * states + asked > LONG_TEXT

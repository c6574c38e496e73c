"""What is asked of a bank: a request as it is given, its plan, and the inputs of its answer.

A request leaves most to the model. `plan_of` settles it once, so that nothing later asks for a
default or checks a value again. Once its blocks are selected, `prepare` makes what an engine needs.

Letters: N blocks, K selected blocks, U restored states, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from sedem.backbone.prompts import question_ids, with_texts
from sedem.bank.index import Words
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.config import WAYS, AnswerBy, Condition, Hops, SelectBy, check_choice
from sedem.engine.device import in_pieces
from sedem.engine.interface import WIDE, AnswerInputs
from sedem.errors import ConfigError, SedemError
from sedem.guidance import AUTO, Auto, Budget, is_share, text_count
from sedem.method.selector import resolve_budget
from sedem.modules import SedemModules
from sedem.types import Citation

if TYPE_CHECKING:
    from sedem.endpoint import Reader

CHARACTERS_PER_TOKEN = 4
"""Usual length of a token in English."""
LONG_TEXT = 1024
"""Tokens of text from which a prefill is long."""

Settled = int | str | tuple[float, int, int]
"""A number of blocks or "all"; of an adaptive budget, its mass, and the fewest and most blocks."""


class Options(TypedDict, total=False):
    """The options of a question; see `Request`."""

    k: Budget | None
    blocks: Sequence[int] | None
    ranking: bool
    condition: Condition | None
    selection: SelectBy | None
    hops: Hops | None
    answer: AnswerBy | None
    min_confidence: float | None
    documents: Sequence[int | str] | None
    context: str
    reader: Reader | None


@dataclass(frozen=True)
class Request:
    """One question to one bank.

    Attributes:
        k: selection budget; None means the model's default.
        blocks: use exactly these blocks instead of selecting (for training and controls).
        ranking: whether the answer lists every block by score.
        condition: the decoder reads the blocks as "memory", as "text", or "both": the best one as
            text and the others as memory; None means the model's default.
        selection: blocks are compared with the question by their "states", as in the paper, by its
            "words", or by "both"; None means the model's default, or states if the bank has no
            index of words. By words alone, there is no confidence.
        hops: 2 selects a second time, by what the best block says, to find blocks that only it
            leads to; "auto" does so if that block seems to leave something open. None means the
            model's default. Forced blocks, and blocks by words alone, have one hop.
        answer: "free" decodes any words, as in the paper; "span" quotes the selected blocks; "auto"
            quotes them unless the question seems to need other words. None means the model's
            default. Settings of sampling and stop strings apply to free answers alone.
        min_confidence: if the confidence is below it, the request is declined; with 0 it never is.
            None means the model's default, which spares forced blocks.
        documents: use only blocks of these documents, given by name or index; None means all. With
            documents, every block of a large bank is scored, not only its candidates.
        context: what was said before, such as the last question and its answer. If the question
            refers back to it, its words help to find blocks; it is not read otherwise.
        selected: the blocks, if they were selected elsewhere; then nothing is scored.
        prompt: decoder tokens of a conversation in the chat template, whose last turn is the
            question; None means those of the question alone.
        reader: the model that writes the answer from passages; None means this one. A number of
            blocks is then one of passages, and how blocks are read does not count.
        turns: what a reader is told of the conversation before the question, as messages of
            OpenAI's protocol.
        rounds: the calls of tools that a reader made to answer it, and their results, likewise.
        passed: further fields of the request to a reader, such as a JSON schema or tools.
    """

    bank: BankReader
    question: str
    k: Budget | None = None
    blocks: Sequence[int] | None = None
    ranking: bool = False
    condition: Condition | None = None
    selection: SelectBy | None = None
    hops: Hops | None = None
    answer: AnswerBy | None = None
    min_confidence: float | None = None
    documents: Sequence[int | str] | None = None
    context: str = ""
    selected: Selection | None = None
    prompt: Sequence[int] | None = None
    reader: Reader | None = None
    turns: Sequence[Mapping[str, Any]] = ()
    rounds: Sequence[Mapping[str, Any]] = ()
    passed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """How well each block of a bank suits a question; on the CPU.

    Attributes:
        total: what blocks are selected by `[N]`; -inf for non-candidates.
        states: s_n, the selector's score `[N]`; None if it was not asked for.
        words: the question's words in the bank; None if they were not asked for.
    """

    total: Tensor
    states: Tensor | None = None
    words: Words | None = None

    def cited(self, block: int) -> dict[str, Any]:
        """What a citation tells of why a block was selected."""
        states, words = self.states, self.words
        return {
            "score": float(self.total[block]),
            "state_score": None if states is None else float(states[block]),
            "word_score": None if words is None else float(words.scores[block]),
            "words": () if words is None else words.matching(block),
        }


@dataclass(frozen=True)
class Selection:
    """The blocks that one question uses.

    Attributes:
        ranked: all of them, best first.
        memory: those that the decoder reads as memory, in reading order.
        texts: those that it reads as text, in reading order.
        scores: scores of every block of the bank.
        confidence: probability that the evidence is in the bank, or in the requested documents;
            None if the model gives none.
        declined: whether the confidence is below the request's minimum.
    """

    ranked: list[int]
    memory: list[int]
    texts: list[int]
    scores: Scores
    confidence: float | None = None
    declined: bool = False


@dataclass(frozen=True)
class Plan:
    """A request with all that it left to its model; attributes that are not listed are its own.

    Attributes:
        bank: the bank as it was when the plan was made.
        k: the budget; it does not count if blocks are given.
        min_confidence: the confidence below which the request is declined.
    """

    bank: Snapshot
    question: str
    k: Settled
    blocks: Sequence[int] | None
    ranking: bool
    condition: Condition
    selection: SelectBy
    hops: Hops
    answer: AnswerBy
    min_confidence: float
    documents: Sequence[int | str] | None
    context: str
    selected: Selection | None
    prompt: Sequence[int] | None

    @property
    def most(self) -> int:
        """The most blocks that the answer may use."""
        if self.blocks is not None:
            return len(self.blocks)
        if isinstance(self.k, tuple):
            return min(self.k[2], len(self.bank))
        return resolve_budget(self.k, len(self.bank))


def plan_of(model: SedemModules, request: Request) -> Plan:
    """Settle a request: fill in what it leaves to the model, and check what it gives.

    Raises:
        BankMismatchError: another model made the bank.
        ConfigError: a value is unknown, or the model or the bank lacks what it needs.
    """
    config, bank, least = model.config, request.bank.snapshot(), request.min_confidence
    forced, settled = request.blocks is not None, dict[str, Any](vars(request))
    for name, known in WAYS.items():
        usual, given = getattr(config, name), settled[name]
        if name == "selection" and not bank.has_words:
            usual = "states"
        settled[name] = usual if given is None else given
        check_choice(name, settled[name], known)
    settled["bank"] = bank
    for name in ("reader", "turns", "rounds", "passed"):  # a reader has no plan
        del settled[name]
    settled["k"] = 0 if forced else budget_of(model, request.k)
    if least is None:
        settled["min_confidence"] = 0.0 if forced else config.min_confidence
    plan = Plan(**settled)
    if not is_share(plan.min_confidence):
        raise ConfigError(f"min_confidence is {least!r}; it must be a number from 0 to 1")
    # With 0 nothing is declined, so no confidence is needed.
    if least and model.confidence is None:
        raise ConfigError(
            f"min_confidence is {least}, but this model gives no confidence; fit it with "
            "'sedem calibrate', or leave min_confidence out"
        )
    if least and plan.selection == "words":
        raise ConfigError(
            f"min_confidence is {least}, but a confidence comes from the states of blocks, and "
            "these would be selected by words alone; select by both, or leave min_confidence out"
        )
    if plan.hops != 1 and model.second_hop is None:
        raise ConfigError(
            f"hops is {plan.hops}, but this model has no second hop; give 1, or a model that was "
            "calibrated for one"
        )
    bank.check_made_by(model.fingerprint())
    return plan


def budget_of(model: SedemModules, k: Budget | None) -> Settled:
    """Return a budget that a model can use; None means its own.

    Raises:
        ConfigError: k is not a budget, or it is "auto" and the model has no guidance.
    """
    k = model.config.k if k is None else k
    if k != AUTO and not isinstance(k, Auto):
        resolve_budget(k, 1)
        return k
    if model.guidance is None:
        raise ConfigError(
            "k is 'auto', but this model was trained without guidance, which 'auto' needs; "
            "give a number of blocks, or a model with guidance"
        )
    return (k if isinstance(k, Auto) else Auto()).filled(model.config)


# What an engine needs


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
        scores, bank = self.selection.scores, self.plan.bank
        return tuple(
            replace(bank.citation(index, rank), **scores.cited(index))
            for piece in in_pieces(enumerate(self.selection.ranked, start=1))
            for rank, index in piece
        )


def prepare(model: SedemModules, plan: Plan, selection: Selection, limit: int) -> Prepared:
    """Make the inputs of an answer from its selected blocks; nothing is run yet.

    Args:
        limit: token limit of the answer.

    Raises:
        ConfigError: the answer has too many positions.
    """
    chat, inputs, conditioning = model.config.chat_template, None, 0
    prompt = plan.prompt or question_ids(model.decoder, plan.question, chat=chat)
    if not selection.declined:
        # Blocks as text go into the prompt; those as memory are restored before it.
        texts = [plan.bank.block_text(index) for index in selection.texts]
        ids = with_texts(model.decoder, [*prompt], texts, chat=chat)
        scores_K = selection.scores.total[selection.memory]
        inputs = AnswerInputs(plan.bank, selection.memory, scores_K, torch.tensor(ids))
        by_score = [block for block in selection.ranked if block in {*selection.memory}]
        per_slot = model.decompressor.states_per_slot
        sizes = plan.bank.restored_sizes(by_score, per_slot)
        check_fits(model, sizes, len(ids), limit, len(texts))
        conditioning = sum(sizes) + len(ids)
    return Prepared(plan, selection, inputs, conditioning, [*prompt])


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

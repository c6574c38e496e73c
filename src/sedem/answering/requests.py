"""From a request to the inputs of its answer: its states, scores, blocks and prefix.

Question -> scores -> K blocks -> inputs; `running` decodes the answer from them.

Letters: B questions, Q question tokens, N blocks, K selected blocks, U restored states, P prefix
tokens, E encoder width, F features of the confidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.answering.decoding import SEPARATOR, located_question, question_ids, with_texts
from sedem.bank import search
from sedem.bank.file import unknown_document
from sedem.bank.memory_bank import BankReader
from sedem.bank.words import POSTINGS, Words, score_words
from sedem.config import AnswerBy, Condition, Hops, SelectBy
from sedem.engine.device import Clock, device_lock, fill, in_pieces, mask_of
from sedem.engine.interface import WIDE, AnswerInputs, Engine
from sedem.errors import ConfigError, DataError
from sedem.folding import words_of
from sedem.guidance.hops import open_features, reordered
from sedem.guidance.scores import (
    AUTO,
    COVERED,
    Auto,
    Budget,
    blocks_for_mass,
    combined_scores,
    confidence_features,
    is_share,
    text_count,
)
from sedem.guidance.spans import is_exact
from sedem.method.compressor import state_mask
from sedem.method.selector import ALL, resolve_budget, select
from sedem.modules import SedemModules
from sedem.types import Citation, check_unicode
from sedem.validation import check_choice

CHARACTERS_PER_TOKEN = 4
"""Usual length of a token in English."""
LONG_TEXT = 1024
"""Tokens of text from which a prefill is long."""


REFERS_BACK = re.compile(
    r"\b(?:he|him|his|she|her|hers|it|its|they|them|their|theirs|these|those|this)\b"
    r"|\b(?:er|ihm|ihn|dessen|deren|davon|darin|elle|elles|lui|él|ella|ellos|ellas|lei|loro)\b"
    r"|^\W*(?:and|but|what about|how about|und|aber|et|mais|y|pero|e|ma)\b",
    re.IGNORECASE,
)
"""How questions refer to what was said before; measured on English ones alone."""
CONTEXT, CONTEXT_BESIDE_NAMES = 0.6, 0.15
"""Weights of the words of what was said before, beside 1 for those of the question."""


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
            None means the model's default, which spares forced blocks and best blocks that have
            `COVERED` of the question's words.
        documents: use only blocks of these documents, given by name or index; None means all. With
            documents, every block of a large bank is scored, not only its candidates.
        context: what was said before, such as the last question and its answer. If the question
            refers back to it, its words help to find blocks; it is not read otherwise.
        selected: the blocks, if they were selected elsewhere; then nothing is scored.
        prompt: decoder tokens of a conversation in the chat template, whose last turn is the
            question; None means those of the question alone.
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


@dataclass(frozen=True)
class Selection:
    """The blocks that one question uses.

    Attributes:
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
class Prepared:
    """A request whose blocks are selected.

    Attributes:
        request: the question and its bank, as the bank was when the question was encoded.
        inputs: the inputs of the answer; None if the request is declined.
        conditioning: number of positions that the upper layers see before the first answer token; 0
            if the answer is declined.
        prompt: decoder tokens of the question, without texts.
    """

    request: Request
    selection: Selection
    inputs: AnswerInputs | None
    conditioning: int
    prompt: list[int]

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The spans behind the selected blocks, best first."""
        bank, selection = self.request.bank, self.selection
        scores, words = selection.scores, selection.scores.words
        return tuple(
            replace(
                bank.citation(index, rank, float(scores.total[index])),
                state_score=None if scores.states is None else float(scores.states[index]),
                word_score=None if words is None else float(words.scores[index]),
                words=() if words is None else words.matching(index),
            )
            for rank, index in enumerate(in_pieces(selection.ranked), start=1)
        )


@torch.no_grad()
def prepare(
    model: SedemModules,
    engine: Engine,
    requests: Sequence[Request],
    limits: Sequence[int],
    clock: Clock,
) -> list[Prepared]:
    """Encode questions, then score and select blocks of their banks; nothing is decoded yet.

    Raises:
        BankMismatchError: another model made a bank.
        DataError: a question is empty or too long.
        ConfigError: K, a forced block, a document or `min_confidence` cannot be used, or an answer
            has too many positions.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    requests = [replace(request, bank=request.bank.snapshot()) for request in requests]
    for request in requests:
        check_min_confidence(model, request)
        answer_by(model, request)
        hops_of(model, request)
        request.bank.check_made_by(model.fingerprint())
    with device_lock(model.device):
        to_select = [request for request in requests if request.selected is None]
        states = None
        if to_select:
            states = encode_questions(model, engine, [one.question for one in to_select])
        clock.lap("encode_ms")
        # Tokenized while a GPU encodes the questions.
        chat = model.config.chat_template
        prompts = [
            request.prompt or question_ids(model.decoder, request.question, chat=chat)
            for request in requests
        ]
        scores = [] if states is None else score_requests(model, to_select, *states)
        sure = [] if states is None else confidences(model, scores, states[1])
        if states is not None:
            scored = zip(to_select, scores, states[1].sum(1).tolist(), strict=True)
            scores = [hop_again(model, engine, *one) for one in scored]
        known = zip(to_select, scores, sure, strict=True)
        selected = iter([choose(model, *one) for one in known])
        selections = [request.selected or next(selected) for request in requests]
        clock.lap("score_ms")
    rows = zip(requests, selections, prompts, limits, strict=True)
    prepared = [_inputs(model, *row) for row in rows]
    clock.lap("gather_ms")
    return prepared


def _inputs(
    model: SedemModules, request: Request, selection: Selection, prompt: Sequence[int], limit: int
) -> Prepared:
    if selection.declined:
        return Prepared(request, selection, None, 0, [*prompt])
    ids_P = prefix_of(model, request, selection, prompt)
    as_memory = set(selection.memory)
    by_score = [block for block in selection.ranked if block in as_memory]
    sizes = restored_sizes(model, request.bank, by_score)
    check_fits(model, sizes, len(ids_P), limit, len(selection.texts))
    inputs = inputs_of(request.bank, selection, ids_P)
    return Prepared(request, selection, inputs, sum(sizes) + len(ids_P), [*prompt])


@torch.no_grad()
def encode_questions(
    model: SedemModules, engine: Engine, questions: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Encode questions at the extraction layers (section 3.2), without the start token.

    If the model reads questions once, these are the decoder's states at the injection layer.

    Returns:
        States `[B, Q, E]`, padded on the right, and a mask `[B, Q]` that is False for padding. The
        mask is on the CPU, so that question lengths are known without waiting for a GPU.

    Raises:
        DataError: a question is empty, not Unicode text or longer than the encoder can read.
    """
    once = model.read_once is not None
    rows = prompt_states(model, engine, questions) if once else _tokens(model, questions)
    lengths = [len(row) for row in rows]
    mask_BQ = torch.from_numpy(mask_of(lengths, max(lengths)))
    if once:
        return pad_sequence(rows, batch_first=True), mask_BQ
    ids_BQ = torch.empty(mask_BQ.shape, dtype=torch.long)
    fill(ids_BQ, rows)
    return model.mixture(engine.encode_questions(ids_BQ).float()), mask_BQ


def _tokens(model: SedemModules, questions: Sequence[str]) -> list[Tensor]:
    """The encoder's tokens of each question `[Q]`."""
    rows = []
    for question in questions:
        check_unicode(question, "the question")
        ids = model.encoder.token_ids(question.strip())
        if not ids:
            raise DataError("the question is empty; ask something, such as 'Who signed the lease?'")
        _check_length(len(ids), model.encoder.max_positions - 1)
        rows.append(torch.tensor(ids))
    return rows


def _check_length(tokens: int, limit: int) -> None:
    if tokens > limit:
        raise DataError(
            f"the question has {tokens:,} tokens, the model reads at most {limit:,}; "
            "ask something shorter and put long text into a document"
        )


def prompt_states(model: SedemModules, engine: Engine, questions: Sequence[str]) -> list[Tensor]:
    """States of each question's own tokens `[Q, D]` at the injection layer, in its prompt."""
    decoder, config = model.decoder, model.config
    prompts = [located_question(decoder, one, chat=config.chat_template) for one in questions]
    for ids, own in prompts:
        around = len(ids) - (own.stop - own.start)
        room = decoder.max_positions - config.states_per_block - around
        _check_length(own.stop - own.start, room)
    found = engine.read_prefixes([torch.tensor(ids) for ids, _ in prompts])
    return [hidden_PD[own].float() for hidden_PD, (_, own) in zip(found, prompts, strict=True)]


@torch.no_grad()
def hop_again(
    model: SedemModules, engine: Engine, request: Request, scores: Scores, question_tokens: int
) -> Scores:
    """Score blocks again by what the best one says, if the request has a second hop."""
    first = second_hop_from(model, request, scores, question_tokens)
    if first is None:
        return scores
    assert model.second_hop is not None
    hidden_1QE, mask_1Q = encode_hop(model, engine, request, first)
    query_1QRH = model.second_hop.queries(model.selector, hidden_1QE)
    named = words_of_block(model, request, first)
    every = needs_every_score(model, request)
    also = [best_by_words(named)]
    again_1N = search.score_questions(
        model.selector, request.bank, query_1QRH, mask_1Q, every=every, also=also
    )
    return combine_hops(model, request, scores, first, again_1N[0].cpu(), named)


def first_features(scores: Scores, first: int, question_tokens: int) -> Tensor:
    """Return the features of whether a question needs a second hop `[F]`."""
    assert scores.states is not None
    covered = 1.0 if scores.words is None else scores.words.covered(first)
    return open_features(scores.total, scores.states, covered, question_tokens)


def combine_hops(
    model: SedemModules,
    request: Request,
    scores: Scores,
    first: int,
    again_N: Tensor,
    named: Words | None,
) -> Scores:
    """Return the scores of a request from both hops; the first block stays the best.

    Args:
        again_N: scores by the queries of the second hop.
        named: the words of the first block.
    """
    assert scores.states is not None and model.second_hop is not None
    candidates_N = scores.states > -torch.inf
    # A block that was no candidate of the first hop scored no better than those that were.
    states_N = scores.states.where(candidates_N, scores.states[candidates_N].min())
    nothing_N = torch.zeros_like(states_N)
    words_N = nothing_N if scores.words is None else scores.words.scores
    named_N = nothing_N if named is None else named.scores
    total_N = model.second_hop(again_N, states_N, words_N, named_N)
    total_N = of_documents(request, total_N)
    return replace(scores, total=reordered(scores.total, total_N, first))


def second_hop_from(
    model: SedemModules, request: Request, scores: Scores, question_tokens: int
) -> int | None:
    """Return the block that a second hop starts from; None if there is only one hop."""
    hops = hops_of(model, request)
    forced = request.blocks is not None or scores.states is None or len(request.bank) < 2
    if hops == 1 or forced:
        return None
    first = int(scores.total.argmax())
    if hops == "auto":
        assert model.second_hop is not None
        features_F = first_features(scores, first, question_tokens)
        if float(model.second_hop.open(features_F)) < 0.5:
            return None
    return first


@torch.no_grad()
def encode_hop(
    model: SedemModules, engine: Engine, request: Request, first: int
) -> tuple[Tensor, Tensor]:
    """Encode a question after the text of a block, or as much of it as fits.

    Returns:
        States of the question's tokens `[1, Q, E]`, and their mask `[1, Q]`.
    """
    question = model.encoder.token_ids(request.question.strip())
    text = model.encoder.token_ids(f"{request.bank.block_text(first)}{SEPARATOR}")
    room = model.encoder.max_positions - 1 - len(question)
    ids = [*text[max(0, len(text) - room) :], *question]
    states_1TE = model.mixture(engine.encode_questions(torch.tensor([ids])).float())
    return states_1TE[:, -len(question) :], torch.ones(1, len(question), dtype=torch.bool)


def check_min_confidence(model: SedemModules, request: Request) -> None:
    """Check that a model can give the confidence that a request requires.

    Raises:
        ConfigError: `min_confidence` is not a probability, or the model gives no confidence.
    """
    asked = request.min_confidence
    if asked is None:
        return
    if not is_share(asked):
        raise ConfigError(f"min_confidence is {asked!r}; it must be a number from 0 to 1")
    if asked == 0:
        return  # Nothing is declined, so no confidence is needed.
    if model.confidence is None:
        raise ConfigError(
            f"min_confidence is {asked}, but this model gives no confidence; fit it with "
            "'sedem calibrate', or leave min_confidence out"
        )
    if select_by(model, request) == "words":
        raise ConfigError(
            f"min_confidence is {asked}, but a confidence comes from the states of blocks, and "
            "these would be selected by words alone; select by both, or leave min_confidence out"
        )


@torch.no_grad()
def confidences(
    model: SedemModules, scores: Sequence[Scores], mask_BQ: Tensor
) -> list[float | None]:
    """Return the probability that a bank has the evidence, for each question.

    It comes from states alone, because how much a word weighs depends on the size of the bank. It
    is None if the model gives none, or if there are no states.
    """
    part, found = model.confidence, list[float | None]()
    for one, tokens in zip(scores, mask_BQ.sum(1).tolist(), strict=True):
        if part is None or one.states is None:
            found.append(None)
            continue
        # Without the blocks of other documents.
        states_N = one.states.masked_fill(one.total == -torch.inf, -torch.inf)
        found.append(float(part(confidence_features(states_N, tokens)[None])[0]))
    return found


def choose(
    model: SedemModules, request: Request, scores: Scores, confidence: float | None = None
) -> Selection:
    """Choose the blocks of a request: the K with the best scores, or the forced ones.

    Raises:
        ConfigError: K is invalid, or a forced block does not exist or is named twice, or both
            blocks and documents are given.
    """
    scores_N = scores.total
    if request.blocks is None:
        ranked = select(scores_N, count_blocks(model, request.k, scores_N))
    elif request.documents is not None:
        raise ConfigError("both blocks and documents are given; give only one of them")
    else:
        if len(set(request.blocks)) < len(request.blocks):
            raise ConfigError(f"blocks {list(request.blocks)} name a block twice; name each once")
        for index in request.blocks:
            if not 0 <= index < len(scores_N):
                raise ConfigError(f"block {index} was asked for, the bank has {len(scores_N)}")
        forced = torch.tensor(list(request.blocks), dtype=torch.long)
        ranked = forced[select(scores_N[forced], len(forced))]
    condition = request.condition or model.config.condition
    check_choice("condition", condition, Condition)
    texts, memory = (
        part.sort().values.tolist()
        for part in ranked.tensor_split([text_count(condition, len(ranked))])
    )
    least = request.min_confidence
    if least is None and request.blocks is None and len(ranked):
        # Unless asked to, do not decline if the best block says much of what the question says.
        is_covered = scores.words is not None and scores.words.covered(int(ranked[0])) >= COVERED
        least = 0.0 if is_covered else model.config.min_confidence
    declined = confidence is not None and least is not None and confidence < least
    return Selection(ranked.tolist(), memory, texts, scores, confidence, declined)


def prefix_of(
    model: SedemModules, request: Request, selection: Selection, prompt: Sequence[int]
) -> Tensor:
    """Return the token ids `[P]` of the start token, the blocks read as text, and the question.

    Args:
        prompt: `prompts.question_ids` of the question, without texts.
    """
    texts = [request.bank.block_text(index) for index in selection.texts]
    chat = model.config.chat_template
    return torch.tensor(with_texts(model.decoder, list(prompt), texts, chat=chat))


def count_blocks(model: SedemModules, k: Budget | None, scores_N: Tensor) -> int:
    """Return the number of blocks that a budget gives for one question.

    Raises:
        ConfigError: k is not a budget, or it is "auto" and the model has no guidance.
    """
    auto = auto_budget(model, k)
    if auto is None:
        return resolve_budget(budget_of(model, k), count_candidates(scores_N))
    assert model.guidance is not None
    return blocks_for_mass(scores_N, model.guidance.tau, *auto)


def count_candidates(scores_N: Tensor) -> int:
    """Return the number of blocks that may be selected; all others have the score -inf."""
    return int((scores_N > -torch.inf).sum())


def auto_budget(model: SedemModules, k: Budget | None) -> tuple[float, int, int] | None:
    """Return mass, fewest and most blocks of an adaptive budget; None for a fixed budget.

    Raises:
        ConfigError: the model has no guidance.
    """
    budget = budget_of(model, k)
    if budget == AUTO:
        budget = Auto()
    if not isinstance(budget, Auto):
        return None
    if model.guidance is None:
        raise ConfigError(
            "k is 'auto', but this model was trained without guidance, which 'auto' needs; "
            "give a number of blocks, or a model with guidance"
        )
    return budget.filled(model.config)


def budget_of(model: SedemModules, k: Budget | None) -> Budget:
    """Return the requested budget, or the model's default."""
    return model.config.k if k is None else k


def inputs_of(bank: BankReader, selection: Selection, prefix: Tensor) -> AnswerInputs:
    """Return the inputs of an answer from the selected blocks and the prefix's token ids."""
    return AnswerInputs(bank, selection.memory, selection.scores.total[selection.memory], prefix)


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


@torch.no_grad()
def score_requests(
    model: SedemModules, requests: Sequence[Request], hidden_BQE: Tensor, mask_BQ: Tensor
) -> list[Scores]:
    """Return the scores of each request; requests to one bank are scored together.

    Args:
        requests: the requests; blocks of documents that a request leaves out score -inf.

    Raises:
        ConfigError: the documents of a request, or what it selects by, cannot be used.
        BankError: a request selects by words, and its bank has no index of them.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    words = [find_words(model, request) for request in requests]
    by_bank: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if select_by(model, request) != "words":
            by_bank.setdefault(id(request.bank), []).append(row)
    states: dict[int, Tensor] = {}
    for rows in by_bank.values():
        bank = requests[rows[0]].bank
        every = any(needs_every_score(model, requests[row]) for row in rows)
        together = len(rows) == len(requests)
        asked = (hidden_BQE, mask_BQ) if together else (hidden_BQE[rows], mask_BQ[rows])
        also = [best_by_words(words[row]) for row in rows]
        query_BQRH = model.queries(asked[0])
        scores_BN = search.score_questions(
            model.selector, bank, query_BQRH, asked[1], every=every, also=also
        )
        states |= zip(rows, scores_BN.cpu(), strict=True)
    return [
        combine(model, request, states.get(row), words[row]) for row, request in enumerate(requests)
    ]


def select_by(model: SedemModules, request: Request) -> SelectBy:
    """Return what the blocks of a request are selected by.

    Raises:
        ConfigError: there is no such thing.
    """
    if request.selection is None:
        return model.config.selection if request.bank.has_words else "states"
    check_choice("selection", request.selection, SelectBy)
    return request.selection


def is_long(model: SedemModules, request: Request) -> bool:
    """Whether a request may take so long that others should not wait for it.

    It is decided before blocks are selected, by the most that the request may use.
    """
    config, blocks = model.config, len(request.bank)
    if request.blocks is not None:
        most = len(request.blocks)
    elif (k := budget_of(model, request.k)) == AUTO or isinstance(k, Auto):
        most = (k.most if isinstance(k, Auto) else None) or config.auto_max
    else:
        most = blocks if k == ALL or not isinstance(k, int) else k
    most = max(0, min(most, blocks))
    condition = request.condition or config.condition
    texts = min(most, {"text": most, "both": 1}.get(condition, 0))
    asked = len(request.prompt or ()) or len(request.question) // CHARACTERS_PER_TOKEN
    # A block read as text takes as many tokens as there are states of it in memory.
    return (
        most - texts
    ) * config.states_per_block > WIDE or texts * config.states_per_block + asked > LONG_TEXT


def answer_by(model: SedemModules, request: Request) -> AnswerBy:
    """Return how a request is answered.

    Raises:
        ConfigError: there is no such way.
    """
    how = request.answer or model.config.answer
    check_choice("answer", how, AnswerBy)
    return how


def hops_of(model: SedemModules, request: Request) -> Hops:
    """Return how often the blocks of a request are selected.

    Raises:
        ConfigError: there is no such number, or the model has no second hop.
    """
    hops = model.config.hops if request.hops is None else request.hops
    check_choice("hops", hops, Hops)
    if hops != 1 and model.second_hop is None:
        raise ConfigError(
            f"hops is {hops}, but this model has no second hop; give 1, or a model that was "
            "calibrated for one"
        )
    return hops


def find_words(model: SedemModules, request: Request) -> Words | None:
    """Find the words of a question in its bank; None if the request selects by states alone.

    In a large bank, only the rarest words are read.

    Raises:
        BankError: the bank has no index of words, is damaged, or was compacted since.
    """
    if select_by(model, request) == "states":
        return None
    postings = POSTINGS if len(request.bank) > search.COARSE_FROM else None
    words = score_words(request.bank, request.question, postings)
    share = share_of_context(request.question) if request.context.strip() else 0.0
    if not share:
        return words
    return words.beside(score_words(request.bank, request.context, postings), share)


def share_of_context(question: str) -> float:
    """Return how much the words of what was said before count to find blocks for a question.

    Nothing, unless the question refers back; little, if it has a name or a number of its own.
    """
    if not REFERS_BACK.search(question):
        return 0.0
    named = any(is_exact(question[at:end]) for at, end in words_of(question)[1:])
    return CONTEXT_BESIDE_NAMES if named else CONTEXT


def words_of_block(model: SedemModules, request: Request, block: int) -> Words | None:
    """Find the words of a block in its bank; None if the request selects by states alone."""
    return find_words(model, replace(request, question=request.bank.block_text(block), context=""))


def best_by_words(words: Words | None) -> Tensor:
    """Return the blocks of a large bank to compare by states because of their words, in order."""
    if words is None or words.count <= search.COARSE_FROM:
        return torch.zeros(0, dtype=torch.long)
    best_N = words.scores.topk(min(search.WORD_CANDIDATES, words.count))
    return best_N.indices[best_N.values > 0].sort().values


def combine(
    model: SedemModules, request: Request, states_N: Tensor | None, words: Words | None
) -> Scores:
    """Return the scores of a request from those by states and by words, where it has them."""
    total_N = combined_scores(states_N, None if words is None else words.scores, model.config)
    return Scores(of_documents(request, total_N), states_N, words)


def of_documents(request: Request, scores_N: Tensor) -> Tensor:
    """Return the scores of blocks of the documents that a request asks for; -inf for all others.

    Of documents of the same text, the first one counts, but not in a ranking of every block.

    Raises:
        ConfigError, UnknownDocumentError: as `document_indexes`.
    """
    bank = request.bank
    if request.documents is not None:
        wanted = document_indexes(bank, request.documents)
        among_N = torch.from_numpy(np.isin(bank.blocks.documents, wanted))
        scores_N = scores_N.masked_fill(~among_N, -torch.inf)
    firsts_n = bank.documents.firsts
    if request.ranking or firsts_n is None:
        return scores_N
    # Equal texts have equal blocks, so a block and its copies begin at the same character.
    rows = np.flatnonzero(scores_N.numpy() > -np.inf)
    firsts, starts = firsts_n[bank.blocks.documents[rows]], bank.blocks.starts[rows]
    kept = rows[np.unique(np.stack([firsts, starts]), axis=1, return_index=True)[1]]
    among_N = torch.zeros(len(scores_N), dtype=torch.bool)
    among_N[kept] = True
    return scores_N.masked_fill(~among_N, -torch.inf)


def document_indexes(bank: BankReader, documents: Sequence[int | str]) -> list[int]:
    """Return the indexes of some documents of a bank.

    Raises:
        ConfigError: no documents are given, or an index is outside the bank.
        UnknownDocumentError: the bank has no document of a given name.
    """
    if not documents:
        raise ConfigError("documents is empty; give at least one, or leave it out to ask them all")
    names, wanted = bank.documents.names, set(documents)
    by_name = {name: index for index, name in enumerate(names) if name in wanted}
    indexes = []
    for document in documents:
        if isinstance(document, str):
            if document not in by_name:
                raise unknown_document("the bank", document, names)
            indexes.append(by_name[document])
        elif 0 <= document < len(names):
            indexes.append(document)
        else:
            raise ConfigError(
                f"document {document} was asked for, the bank has {len(names)}, the first is 0"
            )
    return indexes


def needs_every_score(model: SedemModules, request: Request) -> bool:
    """Whether an answer depends on more scores than those of a large bank's candidates."""
    if request.blocks is not None or request.documents is not None or request.ranking:
        return True
    auto = auto_budget(model, request.k)
    if auto is not None:
        # `blocks_for_mass` uses that many of the best scores.
        return auto[2] > search.CANDIDATES
    return resolve_budget(budget_of(model, request.k), len(request.bank)) > search.CANDIDATES

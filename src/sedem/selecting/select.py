"""Which blocks answer a question (section 3.2): one function for all who ask.

    H_Q -> q -> s_n of each block -> K best blocks

Beside the paper's, our extensions: words of the question, a second hop, and the confidence. In a
large bank, only candidates are scored: the blocks whose codes are nearest to the question
(`bank.codes`), and those with its words. docs/performance.md reports how much of the evidence was
measured to be among them.

Letters: B questions, Q question tokens, N blocks, n some blocks, E encoder width or that of all
heads, T tokens, R heads, H head width, F features of the confidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.backbone.prompts import EMPTY, SEPARATOR, check_question, located_question
from sedem.bank.file import unknown_document
from sedem.bank.index import POSTINGS, Words, bank_codes, key_parts, keys_of, score_words, slot_mask
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.engine.device import Clock, device_lock, fill, mask_of
from sedem.engine.interface import Engine
from sedem.errors import BankError, ConfigError, DataError
from sedem.folding import common_words, folded, words_of
from sedem.guidance import (
    blocks_for_mass,
    combined_scores,
    confidence_features,
    is_exact,
    open_features,
    reordered,
    text_count,
)
from sedem.method.selector import Selector, block_scores, resolve_budget, top_k
from sedem.modules import SedemModules
from sedem.selecting.plan import Plan, Scores, Selection, Settled

COARSE_FROM = 100_000
"""Largest bank in which all blocks are scored; larger banks are searched for candidates."""
CANDIDATES = 256
"""Candidates of a question by codes."""
CANDIDATES_ALONE = 1024
"""The same for a question without candidates by words."""
WORD_CANDIDATES = 128
"""Candidates of a question by words: evidence that has them is among the first."""

REFERS_BACK = re.compile(
    r"\b(?:he|him|his|she|her|hers|it|its|they|them|their|theirs|these|those|this)\b"
    r"|\b(?:er|ihm|ihn|dessen|deren|davon|darin|elle|elles|lui|él|ella|ellos|ellas|lei|loro)\b"
    r"|^\W*(?:and|but|what about|how about|und|aber|et|mais|y|pero|e|ma)\b",
    re.IGNORECASE,
)
"""How questions refer to what was said before; measured on English ones alone."""
CONTEXT, CONTEXT_BESIDE_NAMES = 0.6, 0.15
"""Weights of the words of what was said before, beside 1 for those of the question."""

Scoring = Callable[
    [Selector, BankReader, Tensor, Tensor, bool, Sequence[Tensor], Tensor | None], Tensor
]
"""Scores the blocks of a bank by states, as `score_questions` does, here or elsewhere."""


@torch.no_grad()
def select(
    model: SedemModules,
    engine: Engine,
    plans: Sequence[Plan],
    clock: Clock | None = None,
    scoring: Scoring | None = None,
) -> list[Selection]:
    """Select the blocks of some questions together.

    Args:
        clock: gets a lap after encoding and one after selecting.
        scoring: scores blocks by states; None does it here.

    Raises:
        DataError: a question is empty or too long.
        ConfigError: a forced block or a document cannot be used.
        UnknownDocumentError: a bank has no document of a requested name.
        BankError: a bank is empty, or it has no index of words and a plan selects by words.
    """
    # Waiting for other machines would keep other answers from a GPU.
    lock = device_lock(model.device) if scoring is None else nullcontext()
    scoring = scoring or score_questions
    with lock:
        # H_Q, the states of the questions.
        hidden_BQE, mask_BQ = encode_questions(model, engine, [plan.question for plan in plans])
        if clock is not None:
            clock.lap("encode_ms")
        if not all(len(plan.bank) for plan in plans):
            raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
        # The words that blocks share with each question, and s_n, for all questions to one bank.
        words = [find_words(plan, plan.question, plan.context) for plan in plans]
        query_BQRH, states = model.queries(hidden_BQE), dict[int, Tensor]()
        by_bank: dict[int, list[int]] = {}
        for row, plan in enumerate(plans):
            if plan.selection != "words":
                by_bank.setdefault(id(plan.bank), []).append(row)
        for rows in by_bank.values():
            bank, every = plans[rows[0]].bank, any(needs_every_score(plans[row]) for row in rows)
            some = rows if len(rows) < len(plans) else slice(None)
            also = [best_by_words(words[row]) for row in rows]
            is_large, asked = len(bank) > COARSE_FROM, [plans[row].question for row in rows]
            telling_BQ = telling_tokens(model, asked, mask_BQ[some]) if is_large else None
            found = scoring(
                model.selector, bank, query_BQRH[some], mask_BQ[some], every, also, telling_BQ
            )
            states |= zip(rows, found, strict=True)
        selections = []
        for row, (plan, tokens) in enumerate(zip(plans, mask_BQ.sum(1).tolist(), strict=True)):
            states_N, words_N = states.get(row), None if (own := words[row]) is None else own.scores
            total_N = of_documents(plan, combined_scores(states_N, words_N, model.config))
            scores = Scores(total_N, states_N, words[row])
            # Whether the bank has the evidence, by the states of the first hop and the words of its
            # best block. Then the second hop, and the choice.
            confidence = None
            if model.confidence is not None and states_N is not None:
                asked_N = states_N.masked_fill(total_N == -torch.inf, -torch.inf)
                covered = None if own is None else own.covered(int(total_N.argmax()))
                features_F = confidence_features(asked_N, tokens, covered)
                confidence = float(model.confidence(features_F[None])[0])
            if plan.hops != 1 and plan.blocks is None and states_N is not None:
                scores = hop_again(model, engine, plan, scores, tokens, scoring)
            selections.append(choose(model, plan, scores, confidence))
        if clock is not None:
            clock.lap("score_ms")
    return selections


# States of questions


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
    for question in questions:
        check_question(question)
    with device_lock(model.device):
        if model.read_once is not None:
            rows = prompt_states(model, engine, questions)
        else:
            rows = [torch.tensor(model.encoder.token_ids(one.strip())) for one in questions]
            for ids_Q in rows:
                _check_length(len(ids_Q), model.encoder.max_positions - 1)
        lengths = [len(row) for row in rows]
        mask_BQ = torch.from_numpy(mask_of(lengths, max(lengths)))
        if model.read_once is not None:
            return pad_sequence(rows, batch_first=True), mask_BQ
        ids_BQ = torch.empty(mask_BQ.shape, dtype=torch.long)
        fill(ids_BQ, rows)
        return model.mixture(engine.encode_questions(ids_BQ).float()), mask_BQ


def _check_length(tokens: int, limit: int) -> None:
    if not tokens:
        raise DataError(EMPTY)
    if tokens > limit:
        raise DataError(
            f"the question has {tokens:,} tokens, the model reads at most {limit:,}; "
            "ask something shorter and put long text into a document"
        )


def prompt_states(model: SedemModules, engine: Engine, questions: Sequence[str]) -> list[Tensor]:
    """States of each question's own tokens `[Q, D]` at the injection layer, in its prompt."""
    decoder, config = model.decoder, model.config
    prompts = [located_question(decoder, one, chat=config.chat_template) for one in questions]
    for ids, own, _ in prompts:
        around = len(ids) - (own.stop - own.start)
        room = decoder.max_positions - config.states_per_block - around
        _check_length(own.stop - own.start, room)
    found = engine.read_prefixes([torch.tensor(ids) for ids, *_ in prompts])
    return [hidden_PD[own].float() for hidden_PD, (_, own, _) in zip(found, prompts, strict=True)]


def telling_tokens(model: SedemModules, questions: Sequence[str], mask_BQ: Tensor) -> Tensor:
    """Find the tokens that say what each question is about `[B, Q]`, on the CPU.

    Those of signs and of words of grammar, which most questions have, would make their means alike.
    A question of nothing else keeps all its tokens.

    Args:
        mask_BQ: False where a question token is padding, as `encode_questions` returns it.
    """
    telling_BQ = torch.zeros_like(mask_BQ)
    for row, question in enumerate(one.strip() for one in questions):
        if model.read_once is not None:
            chat = model.config.chat_template
            *_, spans = located_question(model.decoder, question, chat=chat)
        else:
            spans = model.encoder.tokenize([question], offsets=True)["offset_mapping"][0]
        grammar = common_words(question)
        words = [at for at in words_of(question) if folded(question[slice(*at)]) not in grammar]
        for token, (start, end) in enumerate(spans):
            telling_BQ[row, token] = any(first < end and start < last for first, last in words)
    return telling_BQ.where(telling_BQ.any(1, keepdim=True), mask_BQ)


@torch.no_grad()
def encode_hop(
    model: SedemModules, engine: Engine, bank: Snapshot, question: str, first: int
) -> Tensor:
    """Encode a question after the text of a block, or as much of it as fits.

    Returns:
        States of the question's tokens `[1, Q, E]`.
    """
    ids_Q = model.encoder.token_ids(question.strip())
    text = model.encoder.token_ids(f"{bank.block_text(first)}{SEPARATOR}")
    room = model.encoder.max_positions - 1 - len(ids_Q)
    ids_1T = torch.tensor([[*text[max(0, len(text) - room) :], *ids_Q]])
    with device_lock(model.device):
        states_1TE = model.mixture(engine.encode_questions(ids_1T).float())
    return states_1TE[:, -len(ids_Q) :]


# Scores by states


@torch.no_grad()
def score_questions(
    selector: Selector,
    bank: BankReader,
    query_BQRH: Tensor,
    mask_BQ: Tensor,
    every: bool = True,
    also: Sequence[Tensor] = (),
    telling_BQ: Tensor | None = None,
) -> Tensor:
    """Score a bank's blocks for several questions in one pass over the bank.

    Args:
        selector: the selector whose keys the bank's blocks have.
        query_BQRH: unit vectors, one for each question token and head.
        mask_BQ: False where a question token is padding, which is on the right; on the CPU.
        every: whether to score every block even of a large bank. Otherwise, in a bank of more than
            `COARSE_FROM` blocks, only each question's candidates are scored.
        also: candidates of each question by words; empty means none.
        telling_BQ: the question tokens that find candidates by codes; None means all.

    Returns:
        fp32 scores `[B, N]`, on the CPU; -inf for a block that is not a candidate.
    """
    with device_lock(query_BQRH.device):
        if every or len(bank) <= COARSE_FROM:
            slots_NJ = slot_mask(bank, selector)
            mask_BQ, parts = _beside(query_BQRH, mask_BQ), []
            for blocks, keys_nJRH in key_parts(bank, selector):
                keys_1nJRH = keys_nJRH[None]  # as one row of blocks for all questions
                values, scales = keys_1nJRH.values, keys_1nJRH.scales
                slots_1nJ = slots_NJ[None, blocks.start : blocks.stop]
                parts.append(block_scores(query_BQRH, mask_BQ, values, slots_1nJ, scales))
            return torch.cat(parts, 1).cpu()
        scores_BN = torch.full((len(mask_BQ), len(bank)), -torch.inf)
        for row, mean_of_Q in enumerate(mask_BQ if telling_BQ is None else telling_BQ):
            # Those with words of the question, and those whose codes are nearest to its mean.
            words_n = also[row] if also else torch.zeros(0, dtype=torch.long)
            query_E = query_BQRH[row].cpu()[mean_of_Q].float().mean(0).flatten()
            count = min(CANDIDATES if len(words_n) else CANDIDATES_ALONE, len(bank))
            nearest_n = bank_codes(bank, selector).nearest(query_E, count)
            found: list[int] = torch.cat([nearest_n, words_n]).unique().tolist()
            one = slice(row, row + 1)
            exact_1n = scores_of(selector, bank, query_BQRH[one], mask_BQ[one], found)
            scores_BN[row, found] = exact_1n[0].cpu()
        return scores_BN


@torch.no_grad()
def scores_of(
    selector: Selector,
    bank: BankReader,
    query_BQRH: Tensor,
    mask_BQ: Tensor,
    blocks: Sequence[int],
) -> Tensor:
    """Return the scores `[B, n]` of some blocks, in the order of `blocks`."""
    keys_1nJRH = keys_of(bank, selector, blocks)[None]
    slots_1nJ = bank.slot_tokens(blocks).to(query_BQRH.device)[None] > 0
    mask_BQ = _beside(query_BQRH, mask_BQ)
    return block_scores(query_BQRH, mask_BQ, keys_1nJRH.values, slots_1nJ, keys_1nJRH.scales)


def _beside(query_BQRH: Tensor, mask_BQ: Tensor) -> Tensor:
    """Copy a mask to where the queries are."""
    if not query_BQRH.is_cuda:
        return mask_BQ
    # A copy from unpinned memory would wait until the questions are encoded.
    return mask_BQ.pin_memory().to(query_BQRH.device, non_blocking=True)


# Words and documents


def best_by_words(words: Words | None) -> Tensor:
    """Return the blocks of a large bank to compare by states because of their words, in order."""
    if words is None or words.count <= COARSE_FROM:
        return torch.zeros(0, dtype=torch.long)
    best_N = words.scores.topk(min(WORD_CANDIDATES, words.count))
    return best_N.indices[best_N.values > 0].sort().values


def find_words(plan: Plan, text: str, context: str = "") -> Words | None:
    """Find the words of a text in a plan's bank; None if it selects by states alone.

    In a large bank, only the rarest words are read.

    Args:
        context: what was said before; its words count less, if the text refers back to it.

    Raises:
        BankError: the bank has no index of words, is damaged, or was compacted since.
    """
    if plan.selection == "states":
        return None
    postings = POSTINGS if len(plan.bank) > COARSE_FROM else None
    words = score_words(plan.bank, text, postings)
    share = share_of_context(text) if context.strip() else 0.0
    return words.beside(score_words(plan.bank, context, postings), share) if share else words


def share_of_context(question: str) -> float:
    """Return how much the words of what was said before count to find blocks for a question.

    Nothing, unless the question refers back; little, if it has a name or a number of its own.
    """
    if not REFERS_BACK.search(question):
        return 0.0
    named = any(is_exact(question[at:end]) for at, end in words_of(question)[1:])
    return CONTEXT_BESIDE_NAMES if named else CONTEXT


def needs_every_score(plan: Plan) -> bool:
    """Whether an answer depends on more scores than those of a large bank's candidates."""
    forced = plan.blocks is not None or plan.documents is not None or plan.ranking
    # `blocks_for_mass` uses that many of the best scores.
    return forced or plan.most > CANDIDATES


def of_documents(plan: Plan, scores_N: Tensor) -> Tensor:
    """Return the scores of blocks of the documents that a plan asks for; -inf for all others.

    Of documents of the same text, the first one counts, but not in a ranking of every block.

    Raises:
        ConfigError, UnknownDocumentError: as `document_indexes`.
    """
    bank = plan.bank
    if plan.documents is not None:
        wanted = document_indexes(bank, plan.documents)
        among_N = torch.from_numpy(np.isin(bank.blocks.documents, wanted))
        scores_N = scores_N.masked_fill(~among_N, -torch.inf)
    firsts_n = bank.documents.firsts
    if plan.ranking or firsts_n is None:
        return scores_N
    # Equal texts have equal blocks, so a block and its copies begin at the same character.
    rows = np.flatnonzero(scores_N.numpy() > -np.inf)
    firsts, starts = firsts_n[bank.blocks.documents[rows]], bank.blocks.starts[rows]
    kept = rows[np.unique(np.stack([firsts, starts]), axis=1, return_index=True)[1]]
    among_N = torch.zeros(len(scores_N), dtype=torch.bool)
    among_N[kept] = True
    return scores_N.masked_fill(~among_N, -torch.inf)


def document_indexes(bank: Snapshot, documents: Sequence[int | str]) -> list[int]:
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


# Confidence, second hop and choice


def first_features(scores: Scores, first: int, question_tokens: int) -> Tensor:
    """Return the features of whether a question needs a second hop `[F]`."""
    assert scores.states is not None
    covered = 1.0 if scores.words is None else scores.words.covered(first)
    return open_features(scores.total, scores.states, covered, question_tokens)


def hop_again(
    model: SedemModules,
    engine: Engine,
    plan: Plan,
    scores: Scores,
    question_tokens: int,
    scoring: Scoring,
) -> Scores:
    """Score blocks again by what the best one says, if that leaves something to find.

    The first block stays the best.
    """
    second, states_N = model.second_hop, scores.states
    assert second is not None and states_N is not None
    if len(plan.bank) < 2:
        return scores
    first = int(scores.total.argmax())
    if plan.hops == "auto":
        features_F = first_features(scores, first, question_tokens)
        if float(second.open(features_F)) < 0.5:
            return scores
    # The question is read again after the best block, whose words count, too.
    hidden_1QE = encode_hop(model, engine, plan.bank, plan.question, first)
    named = find_words(plan, plan.bank.block_text(first))
    again_1N = scoring(
        model.selector,
        plan.bank,
        second.queries(model.selector, hidden_1QE),
        torch.ones(hidden_1QE.shape[:2], dtype=torch.bool),
        needs_every_score(plan),
        [best_by_words(named)],
        None,
    )
    # A block that was no candidate of the first hop scored no better than those that were.
    candidates_N = states_N > -torch.inf
    states_N = states_N.where(candidates_N, states_N[candidates_N].min())
    words_N, named_N = (
        torch.zeros_like(states_N) if words is None else words.scores
        for words in (scores.words, named)
    )
    total_N = of_documents(plan, second(again_1N[0], states_N, words_N, named_N))
    return replace(scores, total=reordered(scores.total, total_N, first))


def choose(
    model: SedemModules, plan: Plan, scores: Scores, confidence: float | None = None
) -> Selection:
    """Choose the blocks of a plan: the K with the best scores, or the forced ones.

    Raises:
        ConfigError: a forced block does not exist or is named twice, or both blocks and documents
            are given.
    """
    scores_N = scores.total
    if plan.blocks is None:
        ranked = top_k(scores_N, count_blocks(model, plan.k, scores_N))
    elif plan.documents is not None:
        raise ConfigError("both blocks and documents are given; give only one of them")
    else:
        if len(set(plan.blocks)) < len(plan.blocks):
            raise ConfigError(f"blocks {list(plan.blocks)} name a block twice; name each once")
        for index in plan.blocks:
            if not 0 <= index < len(scores_N):
                raise ConfigError(f"block {index} was asked for, the bank has {len(scores_N)}")
        forced = torch.tensor(list(plan.blocks), dtype=torch.long)
        ranked = forced[top_k(scores_N[forced], len(forced))]
    texts, memory = (
        part.sort().values.tolist()
        for part in ranked.tensor_split([text_count(plan.condition, len(ranked))])
    )
    declined = confidence is not None and confidence < plan.min_confidence
    return Selection(ranked.tolist(), memory, texts, scores, confidence, declined)


def count_blocks(model: SedemModules, k: Settled, scores_N: Tensor) -> int:
    """Return the number of blocks that a budget gives for one question."""
    if isinstance(k, tuple):
        assert model.guidance is not None
        return blocks_for_mass(scores_N, model.guidance.tau, *k)
    return resolve_budget(k, count_candidates(scores_N))


def count_candidates(scores_N: Tensor) -> int:
    """Return the number of blocks that may be selected; all others have the score -inf."""
    return int((scores_N > -torch.inf).sum())

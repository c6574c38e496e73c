"""Fitting what follows the training: the weight of words, the confidence, and the score of spans.

For the first two, each question is scored twice: against all its documents, and against those
without evidence. For the third, it is answered. The decoder's probabilities are too sure of
questions that it was trained on, so give it others.

Letters: B questions in both contexts, F features, N blocks of a question's documents, C candidate
spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from sedem.answering.decoding import Decoding
from sedem.answering.spans import UNSURE, Candidate, SpanSearch, open_text
from sedem.bank.blocks import BlockRow
from sedem.bank.index import Words, keys_of, score_words
from sedem.bank.memory_bank import BankReader, MemoryBank
from sedem.config import AnswerBy, Hops, SedemConfig, SelectBy
from sedem.errors import ConfigError, DataError
from sedem.guidance import (
    Confidence,
    SecondReading,
    SpanScorer,
    combined_scores,
    confidence_features,
    minimize,
    rival_features,
)
from sedem.model import SeDeM
from sedem.reading.building import Progress
from sedem.selecting.plan import Request, Scores, plan_of, prepare
from sedem.selecting.select import (
    encode_hop,
    encode_questions,
    first_features,
    prompt_states,
    scores_of,
    select,
)
from sedem.types import Document
from sedem_lab.data.examples import Example
from sedem_lab.data.labels import from_evidence
from sedem_lab.data.question_sets import open_examples
from sedem_lab.evaluation.metrics import auroc, calibration_error, token_f1
from sedem_lab.evaluation.run import sample
from sedem_lab.training.hops import HopQuestion, all_found, fit_second_hop
from sedem_lab.training.queries import QueryQuestion, fit_queries
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.sources import located
from sedem_lab.training.stages import Stage2Recipe

HELD_OUT = 0.25
"""Share of the questions that the metrics are computed on; the rest are used for fitting."""

K, ANSWER_TOKENS = 4, 32
"""Blocks and token limit of the answers that spans are compared for."""
DECLINED = 0.02
"""Share of the questions with evidence that may be declined."""
MINIMUM = 16
"""Minimum number of usable questions, for fitting and measuring together."""

One = TypeVar("One")


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and its quality on held-out questions.

    Attributes:
        parts: the fitted parts, by their names in sedem.safetensors.
        settings: settings of the configuration that they were fitted with.
        held_out: number of questions measured; each counts twice, with and without evidence.
        left_out: number of questions without evidence, or with evidence everywhere.
        recall: share of questions whose best block by states, by words and by both is evidence.
        auroc: probability that a question with evidence has more confidence than one without.
        calibration_error: mean distance between confidence and share of questions with evidence.
        declined: share of the questions that are declined, "with evidence" and "without".
        f1: mean token F1 of the measured questions by way to answer; empty if no span was fitted.
        all_found: among the measured questions with evidence in several documents, the share that
            have all of them among the best `K` blocks, by hops; empty without a second hop.
    """

    parts: dict[str, nn.Module]
    settings: dict[str, Any]
    fitted: int
    held_out: int
    left_out: int
    recall: dict[str, float]
    auroc: float
    calibration_error: float
    declined: dict[str, float]
    f1: dict[str, float]
    all_found: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The metrics as values for JSON."""
        found = dict(self.settings)
        for name, value in vars(self).items():
            digits = 2 if name == "f1" else 4
            if isinstance(value, int | float):
                found[name] = round(value, digits)
            elif name not in ("parts", "settings"):
                found[name] = {part: round(share, digits) for part, share in value.items()}
        return found


@dataclass(frozen=True)
class ScoredQuestion:
    """A question scored against the blocks of its documents.

    Attributes:
        states: s_n `[N]`, on the CPU.
        words: the question's words in these blocks.
        evidence: which blocks have evidence `[N]`.
        tokens: number of question tokens.
    """

    states: Tensor
    words: Words
    evidence: Tensor
    tokens: int

    def scores(self, config: SedemConfig) -> Tensor:
        """What blocks are selected by."""
        states_N = None if config.selection == "words" else self.states
        words_N = None if config.selection == "states" else self.words.scores
        return combined_scores(states_N, words_N, config)

    def features(self, config: SedemConfig) -> Tensor:
        """Features of the confidence `[F]`."""
        first = int(self.scores(config).argmax())
        covered = None if config.selection == "states" else self.words.covered(first)
        return confidence_features(self.states, self.tokens, covered)

    def among(self, blocks_N: Tensor) -> ScoredQuestion:
        """The same question in a bank of these blocks alone, which are given in order."""
        words = self.words.among(blocks_N.tolist())
        return ScoredQuestion(self.states[blocks_N], words, self.evidence[blocks_N], self.tokens)

    def without_evidence(self) -> ScoredQuestion:
        """The same question in a bank of the other blocks."""
        return self.among((~self.evidence).nonzero()[:, 0])

    def alone(self) -> tuple[ScoredQuestion, ScoredQuestion]:
        """In a bank of one block: the best one with evidence, and the first without."""
        best = self.states.masked_fill(~self.evidence, -torch.inf).argmax()
        return self.among(best[None]), self.among((~self.evidence).nonzero()[:1, 0])


def samples(
    recipe: Stage2Recipe, sources: Sequence[DataSource], limit: int, seed: int
) -> Iterator[list[Example]]:
    """Read the examples of each source of a recipe, at most so many of each."""
    for source in sources:
        location, options = located(source, Path(recipe.data_root))
        found = open_examples(location, source.set, records=source.records, **options)
        yield sample(found.examples, limit, seed)


def recipe_examples(recipe: Stage2Recipe, limit: int, seed: int) -> list[Example]:
    """Read the examples that a recipe keeps for this, at most so many of each set.

    The last quarter has the last quarter of every set, whose documents are mostly its own.

    Raises:
        ConfigError: the recipe keeps none.
    """
    if not recipe.data.calibration:
        raise ConfigError(
            "the recipe has no data.calibration, the questions that training leaves for this; give "
            "--data, or another recipe"
        )
    first, last = [], []
    for examples in samples(recipe, recipe.data.calibration, limit, seed):
        end = len(examples) - round(HELD_OUT * len(examples))
        first += examples[:end]
        last += examples[end:]
    return first + last


def calibrate(
    model: SeDeM,
    examples: Sequence[Example],
    selection: SelectBy = "both",
    answer: AnswerBy = "auto",
    progress: Progress | None = None,
    *,
    two_steps: Sequence[Example] = (),
    hops: Hops = 1,
    read_once: Sequence[Example] = (),
) -> Calibration:
    """Fit to the first questions of a set, and measure on the last ones.

    Questions about one document are adjacent in a file, so the two parts mostly have different
    documents.

    Args:
        selection: what the model is to select by; the weight of words is fitted for "both".
        answer: how the model is to answer; spans are fitted unless it is "free".
        two_steps: questions from which a second hop is trained; none leave the model without one.
        hops: how often the model is to select, if it has a second hop.
        read_once: questions from which it learns to select by the decoder's states; none leave it
            as it is.

    Raises:
        DataError: too few questions can be used.
    """
    parts, settings = dict[str, nn.Module](), dict[str, Any]()
    # Whatever was fitted before, every question is answered.
    model.config = model.config.with_changes(min_confidence=0.0)

    # Queries from the decoder's states, because everything after them is fitted to their scores.
    if read_once:
        model.config = model.config.with_changes(read_once=True)
        taught = query_questions(model, read_once, read_examples(model, read_once, progress))
        parts["read_once"] = model.read_once = fit_queries(model.selector, taught)
        settings["read_once"] = True

    # Every question against its documents; the last ones are measured.
    read = read_examples(model, examples, progress)
    questions = score_examples(model, examples, read)
    if len(questions) < MINIMUM:
        raise DataError(
            f"{len(questions)} of {len(examples):,} questions have labelled evidence and blocks "
            f"without any, at least {MINIMUM} are needed; give more questions"
        )
    held_out = round(HELD_OUT * len(questions))
    fitted, measured = questions[:-held_out], questions[-held_out:]

    # How much words count, and the confidence, which depends on it.
    settings["selection"] = selection
    if selection == "both":
        settings["word_weight"] = fit_word_weight(fitted)
    config = model.config.with_changes(**settings)
    part, least = fit_confidence(fitted, config)
    parts["confidence"] = part
    settings |= {"confidence": True, "answer": answer, "min_confidence": least}
    f1, found_all = dict[str, float](), dict[str, float]()

    # A second hop, which the first of the examples teach too.
    if two_steps:
        model.config = config
        learned = hop_questions(model, two_steps, read_examples(model, two_steps, progress))
        own = hop_questions(model, examples, read)
        end = len(own) - round(HELD_OUT * len(own))
        hop = fit_second_hop(model.selector, [*learned, *own[:end]])
        parts["second_hop"] = model.second_hop = hop
        if several := [one for one in own[end:] if len(one.evidence) > 1]:
            found = all_found(hop, model.selector, several, K)
            found_all = {steps: mean(each) for steps, each in found.items()}
        settings |= {"second_hop": True, "hops": hops}
        config = config.with_changes(second_hop=True, hops=hops)

    # Spans, from the blocks that the calibrated model selects, and what decides after a second
    # reading, unless that gains nothing.
    if answer != "free":
        model.config = config
        scorer, second = SpanScorer(), SecondReading()
        # Set at once, because spans then have more text before them.
        model.second_reading = SecondReading().to(model.device)
        memory, text = zip(*compare_spans(model, examples, read, progress), strict=True)
        f1 = fit_spans(scorer, memory)
        again, gains = fit_second_reading(second, scorer, memory, text)
        f1 |= {f"{how}, read again": score for how, score in again.items()}
        parts |= {"spans": scorer, **({"second_reading": second} if gains else {})}
        settings |= {"spans": True, "second_reading": gains}

    recall = {}
    for by in get_args(SelectBy):
        selecting = config.with_changes(selection=by)
        recall[by] = mean(bool(o.evidence[o.scores(selecting).argmax()]) for o in measured)
    return Calibration(
        parts,
        settings,
        fitted=len(fitted),
        held_out=held_out,
        left_out=len(examples) - len(questions),
        recall=recall,
        **measure_confidence(part, least, measured, config),
        f1=f1,
        all_found=found_all,
    )


def fit_confidence(
    questions: Sequence[ScoredQuestion], config: SedemConfig
) -> tuple[Confidence, float]:
    """Fit the probability that the evidence is among the blocks, and from which on to answer."""
    part = Confidence()
    features_BF, present_B = with_and_without_evidence(questions, config)
    # Also in the smallest bank, where nothing is left that a block could stand out from.
    alone_BF = torch.stack([bank.features(config) for one in questions for bank in one.alone()])
    part.fit(torch.cat([features_BF, alone_BF]), present_B.repeat(2))
    with torch.no_grad():
        confidence_B = part(features_BF[present_B]).sort().values
    return part, round(confidence_B[int(DECLINED * len(confidence_B))].item(), 4)


@torch.no_grad()
def measure_confidence(
    part: Confidence, least: float, questions: Sequence[ScoredQuestion], config: SedemConfig
) -> dict[str, Any]:
    """Measure a fitted confidence, as `Calibration` tells it."""
    features_BF, present_B = with_and_without_evidence(questions, config)
    confidence_B = part(features_BF)
    declined_B = (confidence_B < least).float()
    return {
        "auroc": auroc(confidence_B, present_B),
        "calibration_error": calibration_error(confidence_B, present_B),
        "declined": {
            name: float(declined_B[present_B == present].mean())
            for name, present in (("with evidence", True), ("without", False))
        },
    }


def fit_word_weight(questions: Sequence[ScoredQuestion]) -> float:
    """The weight of BM25 beside s_n under which evidence is likeliest.

    A softmax over the blocks of a question, with a temperature that is fitted too, gives the
    probability that a block is evidence.
    """
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    rows = [(q.states.double(), q.words.scores.double(), q.evidence) for q in questions]

    def loss() -> Tensor:
        inverse, weight = logs.exp()
        value = torch.stack(
            [
                -(inverse * (states_N + weight * words_N)).log_softmax(-1)[evidence_N].logsumexp(-1)
                for states_N, words_N, evidence_N in rows
            ]
        ).mean()
        # Finite even where one of the two scores separates all questions.
        return value + 1e-3 * logs.square().sum()

    minimize(loss, [logs])
    return round(logs[1].exp().item(), 4)


def with_and_without_evidence(
    questions: Sequence[ScoredQuestion], config: SedemConfig
) -> tuple[Tensor, Tensor]:
    """Features `[B, F]`, and whether the evidence is present `[B]`: for each question, then not."""
    banks = ((one, one.without_evidence()) for one in questions)
    features = [bank.features(config) for pair in banks for bank in pair]
    return torch.stack(features), torch.tensor([True, False]).repeat(len(questions))


@dataclass(frozen=True)
class ReadExamples:
    """The documents of some examples in one bank.

    Attributes:
        names: the name of each text in the bank.
        blocks: the indices of its blocks.
    """

    bank: MemoryBank
    names: dict[str, str]
    blocks: dict[str, list[int]]

    def blocks_of(self, example: Example) -> tuple[list[int], list[int], Tensor]:
        """The blocks of an example, the document of each, and which count as evidence `[N]`.

        Documents with evidence count as a whole; if all have some, only the blocks that overlap it.
        """
        owner = {
            index: number
            for number, document in enumerate(example.documents)
            for index in self.blocks[document.text]
        }
        indices = sorted(owner)
        owners = [owner[index] for index in indices]
        gold = {span.document for span in example.evidence}
        if gold < set(owners):
            return indices, owners, torch.tensor([number in gold for number in owners])
        blocks = [self.bank.blocks[index] for index in indices]
        rows = [
            BlockRow(number, block.start, block.end, ())
            for number, block in zip(owners, blocks, strict=True)
        ]
        return indices, owners, torch.tensor(from_evidence(rows, example.evidence))

    def usable(self, examples: Sequence[Example]) -> Iterator[tuple[Example, list[int], Tensor]]:
        """Examples with evidence and other blocks, with these and which of them are evidence."""
        for example in examples:
            indices, _, evidence_N = self.blocks_of(example)
            if evidence_N.any() and not evidence_N.all():
                yield example, indices, evidence_N


def read_examples(
    model: SeDeM, examples: Sequence[Example], progress: Progress | None = None
) -> ReadExamples:
    """Read the documents of examples, each text once."""
    given = {d.text: d.name for example in examples for d in example.documents}
    unique: dict[str, str] = {}
    for text, name in given.items():
        while name in unique:
            name += "'"  # a mark that is no word
        unique[name] = text
    names = {text: name for name, text in unique.items()}
    documents = [Document(name, text) for text, name in names.items()]
    bank = model.read(documents, progress=progress)
    blocks: dict[str, list[int]] = {text: [] for text in names}
    for index, block in enumerate(bank.blocks):
        blocks[documents[block.document].text].append(index)
    return ReadExamples(bank, names, blocks)


@torch.no_grad()
def score_examples(
    model: SeDeM, examples: Sequence[Example], read: ReadExamples
) -> list[ScoredQuestion]:
    """Score questions against their documents; those with no evidence or only it are left out."""
    questions = []
    for example, indices, evidence_N in read.usable(examples):
        states_N, tokens = _scores(model, read.bank, example.question, indices)
        words = score_words(read.bank, example.question).among(indices)
        questions.append(ScoredQuestion(states_N, words, evidence_N, tokens))
    return questions


@torch.no_grad()
def query_questions(
    model: SeDeM, examples: Sequence[Example], read: ReadExamples
) -> list[QueryQuestion]:
    """Read questions by the decoder; those with no evidence or only it are left out."""
    bank, questions = read.bank, []
    every = range(len(bank))
    keys_MJRH = keys_of(bank, model.selector, every).dequantize().half().cpu()
    slots_MJ = torch.as_tensor(bank.slot_tokens(every)) > 0
    for example, indices, gold_N in read.usable(examples):
        [hidden_QE] = prompt_states(model, model.engine, [example.question])
        blocks_N = torch.tensor(indices)
        questions.append(
            QueryQuestion(hidden_QE.half().cpu(), blocks_N, gold_N, keys_MJRH, slots_MJ)
        )
    return questions


@torch.no_grad()
def hop_questions(
    model: SeDeM, examples: Sequence[Example], read: ReadExamples
) -> list[HopQuestion]:
    """Take the first hop of questions, each among its own documents."""
    bank, questions = read.bank, []
    for example in examples:
        indices, owners, gold_N = read.blocks_of(example)
        documents_N = torch.tensor(owners)
        evidence = frozenset(span.document for span in example.evidence)
        if len(indices) < 2 or not evidence:
            continue
        states_N, tokens = _scores(model, bank, example.question, indices)
        words = score_words(bank, example.question).among(indices)
        total_N = combined_scores(states_N, words.scores, model.config)
        first = int(total_N.argmax())
        scores = Scores(total_N, states_N, words)
        snapshot = bank.snapshot()
        hidden_1QE = encode_hop(model, model.engine, snapshot, example.question, indices[first])
        questions.append(
            HopQuestion(
                hidden=hidden_1QE[0].half().cpu(),
                keys=keys_of(bank, model.selector, indices).dequantize().half().cpu(),
                slots=torch.as_tensor(bank.slot_tokens(indices)) > 0,
                states=states_N,
                words=words.scores,
                named=score_words(bank, bank.block_text(indices[first])).among(indices).scores,
                total=total_N,
                first=first,
                left=gold_N & (documents_N != documents_N[first]),
                documents=documents_N,
                evidence=evidence,
                features=first_features(scores, first, tokens),
            )
        )
    return questions


def _scores(
    model: SeDeM, bank: BankReader, question: str, indices: Sequence[int]
) -> tuple[Tensor, int]:
    """Scores of the given blocks `[N]` on the CPU, and the number of question tokens."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, [question])
    scores_BN = scores_of(model.selector, bank, model.queries(hidden_BQE), mask_BQ, indices)
    return scores_BN[0].cpu(), int(mask_BQ.sum())


@dataclass(frozen=True)
class ComparedSpans:
    """The spans that were compared for a question.

    Attributes:
        features: see `guidance.span_features` `[C, F]`.
        right: token F1 of each, from 0 to 1 `[C]`.
        gap: how far the first token of each is behind the likeliest one `[C]`.
        free: token F1 of the answer that is decoded freely.
        free_likelihood: log-probability of that answer.
    """

    features: Tensor
    right: Tensor
    gap: Tensor
    free: float
    free_likelihood: float


@torch.no_grad()
def compare_spans(
    model: SeDeM, examples: Sequence[Example], read: ReadExamples, progress: Progress | None = None
) -> list[tuple[ComparedSpans | None, ComparedSpans | None]]:
    """Compare the spans of questions by memory, then by their best sentences, read as text.

    The model's present choice of spans says which sentences those are.

    Returns:
        The spans of each question by both readings; None where there are none.
    """
    decoding = Decoding(ANSWER_TOKENS)
    limit, compared = decoding.max_new_tokens, []
    for number, example in enumerate(examples, start=1):
        documents = [read.names[document.text] for document in example.documents]
        request = Request(read.bank, example.question, K, documents=documents)
        plan = plan_of(model, request)
        [selection] = select(model, model.engine, [plan])
        prepared = prepare(model, plan, selection, limit)
        assert prepared.inputs is not None
        with model.engine.open_rows(1) as rows:
            [logits_V] = rows.join([0], [prepared.inputs], [limit])
            memory = SpanSearch(model, rows, 0, prepared, limit, logits_V)
            spans, again = memory.ordered(memory.candidates()), None
            if spans:
                with open_text(model, model.engine, prepared, limit, memory, spans) as text:
                    again = _compared(text, text.candidates(), example, decoding)
            compared.append((_compared(memory, spans, example, decoding), again))
        if progress is not None:
            progress(number, len(examples))
    return compared


def _compared(
    search: SpanSearch, spans: Sequence[Candidate], example: Example, decoding: Decoding
) -> ComparedSpans | None:
    if not spans:
        return None
    features_CF = search.compared(spans)[1]
    free, likelihood = search.answer_freely(decoding)
    right_C = torch.tensor([_right(span.text, example) for span in spans])
    gap_C = torch.tensor([span.gap for span in spans])
    return ComparedSpans(features_CF, right_C, gap_C, _right(free.text, example), likelihood)


def _right(text: str, example: Example) -> float:
    return token_f1(text, example.answers) / 100


@dataclass(frozen=True)
class BestSpan:
    """The best span of a question, and the free answer.

    Attributes:
        features: of its certainty; see `SpanScorer.best`.
        right: token F1 of the span, from 0 to 1; `free` is that of the free answer.
        share: its share of the softmax over all spans.
        rival: see `guidance.rival_features`.
    """

    features: Tensor
    right: float
    gap: float
    free: float
    share: float
    rival: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, scorer: SpanScorer, one: ComparedSpans) -> BestSpan:
        """Take the best span by a scorer."""
        index, features = scorer.best(one.features)
        gap, share = float(one.gap[index]), float(features[0].exp())
        rival = rival_features(gap, one.free_likelihood - float(one.features[index, 0]), share)
        return cls(features, float(one.right[index]), gap, one.free, share, rival)


def _parted(compared: Sequence[One | None]) -> tuple[list[One], ...]:
    """The questions with spans: those to fit to, and the last ones to measure."""
    end = len(compared) - round(HELD_OUT * len(compared))
    return tuple([o for o in part if o is not None] for part in (compared[:end], compared[end:]))


def fit_spans(scorer: SpanScorer, compared: Sequence[ComparedSpans | None]) -> dict[str, float]:
    """Fit the score of spans and what follows from it to all but the last quarter of questions.

    Returns:
        The mean token F1 of the last questions by way to answer.
    """
    fitted, measured = _parted(compared)
    if chosen := [(one.features, one.right) for one in fitted if one.right.any()]:
        scorer.fit(chosen)
    best = [BestSpan.of(scorer, one) for one in fitted]
    right = [one.right for one in best]
    scorer.fit_gap([one.gap for one in best], right, [one.free for one in best])
    quoted = [one for one in best if one.gap <= scorer.gap]
    if quoted:
        right_B = torch.tensor([one.right for one in quoted])
        scorer.certainty.fit(torch.stack([one.features for one in quoted]), right_B > 0.5)
    found = [BestSpan.of(scorer, one) for one in measured]
    scores = {
        "free": [one.free for one in found],
        "span": [one.right for one in found],
        "auto": [one.free if one.gap > scorer.gap else one.right for one in found],
    }
    return {how: 100 * mean(right) for how, right in scores.items()}


def fit_second_reading(
    second: SecondReading,
    first: SpanScorer,
    memory: Sequence[ComparedSpans | None],
    text: Sequence[ComparedSpans | None],
) -> tuple[dict[str, float], bool]:
    """Fit what decides after a second reading, as `fit_spans`.

    Args:
        first: the fitted score of spans by memory alone.
        memory: the spans that memory compared; `text` has those of both readings.

    Returns:
        What `fit_spans` returns, and whether the fitted questions gain by it.
    """
    scores = fit_spans(second, text)
    both = [(m, t) if m and t else None for m, t in zip(memory, text, strict=True)]
    fitted, measured = (
        [(BestSpan.of(first, m), BestSpan.of(second, t)) for m, t in part] for part in _parted(both)
    )
    # Where the best span is unsure, the better of it and a free answer is chosen.
    rivals = [t for _, t in fitted if t.share < UNSURE or t.gap > second.gap]
    differ = [one for one in rivals if one.free != one.right]
    for part, ones, target in (
        (second.freely, differ, [one.free > one.right for one in differ]),
        (second.free_certainty, rivals, [one.free > 0.5 for one in rivals]),
    ):
        if ones:
            part.fit(torch.stack([one.rival for one in ones]), torch.tensor(target))

    @torch.no_grad()
    def by_text(one: BestSpan) -> float:
        is_rival = one.share < UNSURE or one.gap > second.gap
        freely = is_rival and float(second.freely(one.rival[None])) >= 0.5
        return one.free if freely else one.right

    def by_both(memory: BestSpan, text: BestSpan) -> float:
        sure = memory.gap <= first.gap and memory.share >= second.sure
        return memory.right if sure else by_text(text)

    # Where memory is sure, nothing is read again.
    second.fit_sure(
        [m.share if m.gap <= first.gap else 0.0 for m, _ in fitted],
        [m.right for m, _ in fitted],
        [by_text(t) for _, t in fitted],
    )
    alone = mean(m.free if m.gap > first.gap else m.right for m, _ in fitted)
    gains = mean(by_both(*one) for one in fitted) > alone
    return {**scores, "auto": 100 * mean(by_both(*one) for one in measured)}, gains

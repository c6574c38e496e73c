"""Fitting the weight of words, and the confidence that the documents contain the evidence.

Both follow the training. Each question is scored twice: against all its documents, and against
those without evidence. Nothing is generated, so only the encoder and the selector run.

Letters: B questions in both contexts, F features, N blocks of a question's documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, get_args

import torch
from torch import Tensor

from sedem.answering.requests import encode_questions
from sedem.bank.blocks import BlockRow
from sedem.bank.keys import keys_of
from sedem.bank.memory_bank import BankReader
from sedem.bank.search import key_scores
from sedem.bank.words import Words, score_words
from sedem.config import SedemConfig, SelectBy
from sedem.data.examples import Example
from sedem.data.labels import from_evidence
from sedem.errors import DataError
from sedem.evaluation.metrics import auroc, calibration_error
from sedem.guidance.scores import FEATURES, Confidence, combined_scores, confidence_features
from sedem.model import SeDeM
from sedem.reading.encoding import Progress
from sedem.types import Document

HELD_OUT = 0.25
"""Share of the questions that the metrics are computed on; the rest are used for fitting."""

LEAST = 16
"""Minimum number of usable questions, for fitting and measuring together."""


@dataclass(frozen=True)
class Calibration:
    """What was fitted, and its quality on held-out questions.

    Attributes:
        settings: settings of the configuration that the confidence was fitted with.
        held_out: number of questions measured; each counts twice, with and without evidence.
        left_out: number of questions without evidence, or with evidence everywhere.
        recall: share of questions whose best block by states, by words and by both is evidence.
        auroc: probability that a question with evidence has more confidence than one without.
        calibration_error: mean distance between confidence and share of questions with evidence.
    """

    part: Confidence
    settings: dict[str, Any]
    fitted: int
    held_out: int
    left_out: int
    recall: dict[str, float]
    auroc: float
    calibration_error: float

    def to_dict(self) -> dict[str, Any]:
        """The metrics as values for JSON."""
        return {
            **self.settings,
            "fitted": self.fitted,
            "held_out": self.held_out,
            "left_out": self.left_out,
            "recall": {by: round(share, 4) for by, share in self.recall.items()},
            "auroc": round(self.auroc, 4),
            "calibration_error": round(self.calibration_error, 4),
        }


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

    def scores(self, config: SedemConfig, among_N: Tensor | None = None) -> Tensor:
        """What blocks are selected by, in a bank of all blocks or of some."""
        kept_N = torch.ones_like(self.evidence) if among_N is None else among_N
        states_N = words_N = None
        if config.selection != "words":
            states_N = self.states[kept_N]
        if config.selection != "states":
            words_N = self.words.among(kept_N.nonzero()[:, 0].tolist()).scores
        return combined_scores(states_N, words_N, config)

    def features(self, config: SedemConfig) -> Tensor:
        """Features of the confidence with the evidence and without it `[2, F]`."""
        found = [self.scores(config), self.scores(config, ~self.evidence)]
        return torch.stack([confidence_features(scores_N, self.tokens) for scores_N in found])


def calibrate(
    model: SeDeM,
    examples: Sequence[Example],
    selection: SelectBy = "both",
    progress: Progress | None = None,
) -> Calibration:
    """Fit to the first questions of a set, and measure on the last ones.

    Questions about one document are adjacent in a file, so the two parts mostly have different
    documents.

    Args:
        selection: what the model is to select by; the weight of words is fitted for "both".

    Raises:
        DataError: too few questions can be used.
    """
    questions = score_examples(model, examples, progress)
    if len(questions) < LEAST:
        raise DataError(
            f"{len(questions)} of {len(examples):,} questions have labelled evidence and blocks "
            f"without any, at least {LEAST} are needed; give more questions"
        )
    held_out = round(HELD_OUT * len(questions))
    fitted, measured = questions[:-held_out], questions[-held_out:]
    settings: dict[str, Any] = {"selection": selection}
    if selection == "both":
        settings["word_weight"] = fit_word_weight(fitted)
    config = model.config.with_changes(**settings)
    part = Confidence()
    part.fit(*with_and_without_evidence(fitted, config))
    features_BF, present_B = with_and_without_evidence(measured, config)
    with torch.no_grad():
        confidence_B = part(features_BF)
    return Calibration(
        part,
        settings,
        fitted=len(fitted),
        held_out=held_out,
        left_out=len(examples) - len(questions),
        recall={by: best_is_evidence(measured, config, by) for by in get_args(SelectBy)},
        auroc=auroc(confidence_B, present_B),
        calibration_error=calibration_error(confidence_B, present_B),
    )


def fit_word_weight(questions: Sequence[ScoredQuestion]) -> float:
    """The weight of BM25 beside s_n under which evidence is likeliest.

    A softmax over the blocks of a question, with a temperature that is fitted too, gives the
    probability that a block is evidence.
    """
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe")
    rows = [(q.states.double(), q.words.scores.double(), q.evidence) for q in questions]

    def loss() -> Tensor:
        optimizer.zero_grad()
        inverse, weight = logs.exp()
        value = torch.stack(
            [
                -(inverse * (states_N + weight * words_N)).log_softmax(-1)[evidence_N].logsumexp(-1)
                for states_N, words_N, evidence_N in rows
            ]
        ).mean()
        # Finite even where one of the two scores separates all questions.
        value = value + 1e-3 * logs.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return round(logs[1].exp().item(), 4)


def best_is_evidence(
    questions: Sequence[ScoredQuestion], config: SedemConfig, selection: SelectBy
) -> float:
    """The share of questions whose best block is evidence."""
    config = config.with_changes(selection=selection)
    return mean(bool(one.evidence[one.scores(config).argmax()]) for one in questions)


def with_and_without_evidence(
    questions: Sequence[ScoredQuestion], config: SedemConfig
) -> tuple[Tensor, Tensor]:
    """Features `[B, F]`, and whether the evidence is present `[B]`: for each question, then not."""
    features = [one.features(config) for one in questions] or [torch.zeros(0, len(FEATURES))]
    return torch.cat(features), torch.tensor([True, False]).repeat(len(questions))


@torch.no_grad()
def score_examples(
    model: SeDeM, examples: Sequence[Example], progress: Progress | None = None
) -> list[ScoredQuestion]:
    """Score questions against their documents; those with no evidence or only it are left out."""
    texts = list(dict.fromkeys(d.text for example in examples for d in example.documents))
    names = _unique({d.text: d.name for example in examples for d in example.documents})
    documents = [Document(names[text], text) for text in texts]
    bank = model.read(documents, progress=progress)
    blocks: dict[str, list[int]] = {text: [] for text in texts}
    for index, block in enumerate(bank.blocks):
        blocks[texts[block.document]].append(index)
    questions = []
    for example in examples:
        indices = [index for document in example.documents for index in blocks[document.text]]
        owners = [n for n, d in enumerate(example.documents) for _ in blocks[d.text]]
        evidence_N = torch.tensor(_gold(bank, example, indices, owners))
        if bool(evidence_N.all()) or not bool(evidence_N.any()):
            continue
        states_N, tokens = _scores(model, bank, example.question, indices)
        order_N = torch.tensor(indices).argsort()
        words = score_words(bank, example.question).among(sorted(indices))
        questions.append(ScoredQuestion(states_N[order_N], words, evidence_N[order_N], tokens))
    return questions


def _unique(names: dict[str, str]) -> dict[str, str]:
    """Make the names of texts unique by marks that are no words."""
    unique: dict[str, str] = {}
    for text, name in names.items():
        while name in unique:
            name += "'"
        unique[name] = text
    return {text: name for name, text in unique.items()}


def _gold(
    bank: BankReader, example: Example, indices: Sequence[int], owners: Sequence[int]
) -> list[bool]:
    """Which blocks count as evidence: whole documents, or blocks if all documents have evidence."""
    gold = {span.document for span in example.evidence}
    if gold < set(owners):
        return [owner in gold for owner in owners]
    blocks = (bank.blocks[index] for index in indices)
    rows = [
        BlockRow(owner, block.start, block.end, ())
        for owner, block in zip(owners, blocks, strict=True)
    ]
    return from_evidence(rows, example.evidence)


def _scores(
    model: SeDeM, bank: BankReader, question: str, indices: Sequence[int]
) -> tuple[Tensor, int]:
    """Scores of the given blocks `[N]` on the CPU, and the number of question tokens."""
    hidden_BQE, mask_BQ = encode_questions(model, model.engine, [question])
    padding_P = (bank.slot_tokens(indices).flatten() == 0).nonzero()[:, 0]
    query_BQRH = model.selector.queries(hidden_BQE)
    keys_NJRH = keys_of(bank, model.selector, indices)
    scores_BN = key_scores(query_BQRH, mask_BQ, keys_NJRH, padding_P)
    return scores_BN[0].cpu(), int(mask_BQ.sum())

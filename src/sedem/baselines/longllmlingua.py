"""LongLLMLingua: prunes the text to a quarter for each question, then reads what is left.

From Jiang et al., 2024. The source is PromptCompressor of the official code (llmlingua 0.2.2) at
the paper's settings. Nothing is trained, and one backbone both scores and reads. Five steps:

1. Rank each paragraph by the mean negative log-likelihood (NLL) of the question after it, followed
   by a sentence that says the answer is there. A lower NLL ranks higher.
2. Keep the best paragraphs until their tokens exceed a budget; the one that exceeds it is kept.
3. Order them by rank, best first, and share the budget by rank.
4. Prune tokens by contrastive perplexity: how much the question lowers the NLL of the next token.
   Windows of 200 tokens are pruned in turn, each after what is kept of the previous windows.
5. Decode the kept tokens and read them as text.

Deviations: docs/deviations.md.

Letters: P tokens of question and paragraphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field

from sedem.answering.decoding import SEPARATOR, Decoding, question_ids
from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context import FullContext
from sedem.baselines.memory import text_bytes
from sedem.baselines.paragraphs import Paragraph, split, split_notes
from sedem.baselines.token_pruning import CachedScorer, plan_windows, prune_tokens
from sedem.engine.device import Clock
from sedem.errors import DataError
from sedem.types import Answer, Document
from sedem.validation import Settings, Share, Whole, WholeAbove0, WholeFrom0

RESTRICTIVE_STATEMENT = " The answer to this question can be found in the documents above."
"""Follows the question when paragraphs are ranked; means the same as the official sentence."""


class LongLLMLinguaConfig(Settings):
    """Settings; the defaults are the paper's (appendix LongLLMLingua).

    Attributes:
        rate: share of the tokens of question and context to keep, the question included.
        extra: tokens that the kept paragraphs may have beyond that share (`context_budget`).
        spread: the best paragraph keeps this share more than the mean, the worst this share less
            (`dynamic_context_compression_ratio`).
        window: tokens that are pruned together (`iterative_size`).
        paragraph: longest paragraph in tokens; longer ones are cut.
    """

    rate: Share = 0.25
    extra: WholeFrom0 = 100
    spread: Share = 0.4
    window: Annotated[Whole, Field(ge=2)] = 200
    paragraph: WholeAbove0 = 1024


@dataclass(frozen=True)
class SelectedParagraphs:
    """Paragraphs that are kept.

    Attributes:
        ranked: indices of all paragraphs, best first.
        scores: score of every paragraph: minus the mean NLL of the question after it.
        kept: indices of the kept paragraphs, best first.
        rates: share of its tokens that each kept paragraph keeps.
        notes: one sentence for each change that was made to the context.
    """

    ranked: list[int]
    scores: list[float]
    kept: list[int]
    rates: list[float]
    notes: tuple[str, ...]


class LongLLMLingua(FullContext):
    """The frozen backbone prunes a context for each question, then reads it.

    Args:
        backbone: scores and reads the text.
        config: settings; None means the paper's.
    """

    def __init__(
        self, backbone: Backbone, decoding: Decoding, config: LongLLMLinguaConfig | None = None
    ) -> None:
        super().__init__(backbone, decoding, "longllmlingua")
        self.config = config or LongLLMLinguaConfig()

    def answer(self, memory: Sequence[Document], question: str) -> Answer:
        """Answer from the pruned documents.

        Raises:
            DataError: the question is empty, or too long to be scored after a paragraph.
        """
        clock = Clock(self.backbone.device)
        question_ids(self.backbone, question)  # raises if the question is empty
        question = question.strip()
        paragraphs = split(memory, self.backbone, self.longest())
        chosen = self.select(paragraphs, question)
        text = self.prune([paragraphs[i] for i in chosen.kept], question, chosen.rates)
        pruned = [Document("pruned", text)] if text.strip() else []
        answer = self.answer_from(pruned, range(len(pruned)), [0.0] * len(pruned), question, clock)
        tokens = self._tokens(memory)
        cut = split_notes(memory, paragraphs, self.longest(), tokens, self.name)
        return replace(
            answer,
            citations=tuple(
                paragraphs[i].cited(rank, chosen.scores[i])
                for rank, i in enumerate(chosen.kept, start=1)
            ),
            k=len(chosen.kept),
            blocks=len(paragraphs),
            cut=(*cut, *chosen.notes, *answer.cut),
            stored_bytes=text_bytes(memory),
            context_tokens=tokens,
            ranking=tuple(paragraphs[i].span for i in chosen.ranked),
        )

    def longest(self) -> int:
        """Longest paragraph in tokens: half of the positions are reserved for the question."""
        return min(self.config.paragraph, self.backbone.max_positions // 2)

    # Paragraphs

    def select(self, paragraphs: Sequence[Paragraph], question: str) -> SelectedParagraphs:
        """Select paragraphs, and the share of tokens that each keeps (steps 1 to 3).

        Raises:
            DataError: the question is too long to be scored after a paragraph.
        """
        backbone = self.backbone
        asked = len(backbone.token_ids(question + RESTRICTIVE_STATEMENT))
        room = backbone.max_positions - self.longest() - 1
        if asked > room:
            raise DataError(
                f"the question has {asked:,} tokens, {self.name} has room for {room:,} beside a "
                "paragraph; ask something shorter"
            )
        lengths = [len(paragraph.ids) for paragraph in paragraphs]
        target = self._target(lengths, question)
        if len(paragraphs) == 1:
            ranked, scores, kept = [0], [0.0], [0]
            notes: tuple[str, ...] = (
                f"the context is one paragraph, so {self.name} ranked nothing",
            )
        else:
            scores = [-self.question_nll(paragraph.text, question) for paragraph in paragraphs]
            ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
            kept, notes = self._affordable(ranked, lengths, target, question)
        mean = target / (sum(lengths[i] + 2 for i in kept) + 1)
        rates = [
            min(1.0, max(0.0, mean + more)) for more in rate_offsets(len(kept), self.config.spread)
        ]
        return SelectedParagraphs(ranked, scores, kept, rates, notes)

    @torch.no_grad()
    def question_nll(self, text: str, question: str) -> float:
        """Mean NLL of the question and the restrictive statement after a paragraph."""
        backbone = self.backbone
        ids = [backbone.bos_token_id, *backbone.token_ids(text + question + RESTRICTIVE_STATEMENT)]
        nll = CachedScorer(backbone).token_nll(torch.tensor(ids, device=backbone.device))
        return float(nll[len(backbone.token_ids(text)) :].mean())

    def _target(self, lengths: Sequence[int], question: str) -> float:
        """Number of paragraph tokens to keep; may be negative.

        As officially, each text counts with a start token, and the empty instruction is a text.
        """
        asked = len(self.backbone.token_ids(question)) + 1
        every = 1 + asked + sum(length + 1 for length in lengths)
        return every * self.config.rate - 1 - asked

    def _affordable(
        self, ranked: Sequence[int], lengths: Sequence[int], target: float, question: str
    ) -> tuple[list[int], tuple[str, ...]]:
        most = self.backbone.max_positions
        budget = (target if target >= 0 else 100) + self.config.extra
        room = most - len(self.backbone.token_ids(question + SEPARATOR))
        kept: list[int] = []
        for index in ranked:
            room -= lengths[index] + 2
            if room < 0 and kept:
                note = (
                    f"{self.name} kept {len(kept):,} paragraphs: the next in rank does not fit "
                    f"the model's {most:,} positions"
                )
                return kept, (note,)
            kept.append(index)
            budget -= lengths[index] + 1
            if budget < 0:
                break
        return kept, ()

    # Tokens

    def prune(self, kept: Sequence[Paragraph], question: str, rates: Sequence[float]) -> str:
        """Prune the kept paragraphs and return the text (steps 4 and 5).

        Args:
            rates: share of its tokens that each paragraph keeps.
        """
        backbone, size = self.backbone, self.config.window
        head = question + SEPARATOR
        text = head + SEPARATOR.join(paragraph.text for paragraph in kept)
        encoded = backbone.tokenize([text], offsets=True)
        front = sum(end <= len(head) for _, end in encoded["offset_mapping"][0])
        ids_P = torch.tensor(encoded["input_ids"][0], device=backbone.device)
        plan = plan_windows([len(paragraph.ids) + 2 for paragraph in kept], rates, size)
        stays = prune_tokens(backbone, ids_P, front, plan, size)
        return backbone.tokenizer.decode(ids_P[stays], clean_up_tokenization_spaces=False)


def rate_offsets(count: int, most: float) -> list[float]:
    """Offsets from the mean rate by rank, from `most` for the best paragraph to -`most`."""
    if count == 1:
        return [0.0]
    return [most * (count - 1 - 2 * rank) / (count - 1) for rank in range(count)]

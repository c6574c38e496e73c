"""LongLLMLingua: the question thins the text to a quarter, the frozen backbone reads what is left.

From Jiang et al., 2024. Followed: PromptCompressor of the official code (llmlingua 0.2.2) at the
paper's settings, nothing trained, scorer and reader one backbone. Five steps:

1. Each paragraph is ranked by the mean surprise of the question, and of a sentence that says the
   answer is there, right after it: the less, the better.
2. The best paragraphs are kept as far as a budget of tokens goes; the one that overdraws it stays.
3. They are put in the order of their rank, best first, and share the budget by rank.
4. A token's worth is how much less surprising the question makes the token after it. Windows of
   200 tokens are thinned one after another, each seeing what is left of those before.
5. What is left is decoded and read as text.

Where it differs: docs/deviations.md.

Letters: P tokens of question and paragraphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context import FullContext
from sedem.baselines.paragraphs import Paragraph, cut_notes, split
from sedem.baselines.token_pruning import Reading, thin, windows
from sedem.engine.device import Clock
from sedem.errors import ConfigError, DataError
from sedem.inference.generation import Decoding
from sedem.inference.prompts import SEPARATOR, question_ids
from sedem.types import Answer, Document

PROMISE = " The answer to this question can be found in the documents above."
"""Follows the question where paragraphs are ranked; the official words say the same."""


@dataclass(frozen=True)
class LongLLMLinguaConfig:
    """Settings; the defaults are the paper's (appendix LongLLMLingua).

    Attributes:
        rate: tokens that are to be left, question included, per token of question and context.
        extra: tokens that paragraphs may take beyond that (`context_budget`).
        spread: how far the best paragraph's share is above, the last one's below the mean
            (`dynamic_context_compression_ratio`).
        window: tokens that are thinned at a time (`iterative_size`).
        paragraph: tokens of a paragraph; longer ones are cut.
    """

    rate: float = 0.25
    extra: int = 100
    spread: float = 0.4
    window: int = 200
    paragraph: int = 1024

    def __post_init__(self) -> None:
        for name in ("rate", "spread"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        for name, least in (("extra", 0), ("window", 2), ("paragraph", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class Chosen:
    """Paragraphs that are kept.

    Attributes:
        ranked: indices of all, best first.
        scores: of all; the mean surprise of the question after each, negative.
        kept: indices of those kept, best first.
        rates: share of the tokens of each of those that is to stay.
        notes: one sentence for each thing that was done to the context.
    """

    ranked: list[int]
    scores: list[float]
    kept: list[int]
    rates: list[float]
    notes: tuple[str, ...]


class LongLLMLingua(FullContext):
    """The frozen backbone thins a context for each question, then reads it.

    Args:
        backbone: scores and reads.
        decoding: how answers are generated.
        config: rate and the like.
    """

    def __init__(
        self, backbone: Backbone, decoding: Decoding, config: LongLLMLinguaConfig | None = None
    ) -> None:
        super().__init__(backbone, decoding, "longllmlingua")
        self.config = config or LongLLMLinguaConfig()

    def answer(self, memory: Sequence[Document], question: str) -> Answer:
        """Answer from what the question leaves of the documents.

        Raises:
            DataError: the question is empty or too long to be scored beside a paragraph.
        """
        clock = Clock(self.backbone.device)
        question_ids(self.backbone, question)  # refuses what is no question
        question = question.strip()
        paragraphs = split(memory, self.backbone, self.longest())
        chosen = self.choose(paragraphs, question)
        text = self.thinned([paragraphs[i] for i in chosen.kept], question, chosen.rates)
        left = [Document("left", text)] if text.strip() else []
        answer = self.answer_from(left, range(len(left)), [0.0] * len(left), question, clock)
        tokens = self._tokens(memory)
        cut = cut_notes(memory, paragraphs, self.longest(), tokens, self.name)
        return replace(
            answer,
            citations=tuple(
                paragraphs[i].cited(rank, chosen.scores[i])
                for rank, i in enumerate(chosen.kept, start=1)
            ),
            k=len(chosen.kept),
            blocks=len(paragraphs),
            cut=(*cut, *chosen.notes, *answer.cut),
            stored_bytes=sum(len(document.text.encode()) for document in memory),
            context_tokens=tokens,
            ranking=tuple(paragraphs[i].span for i in chosen.ranked),
        )

    def longest(self) -> int:
        """Tokens of a paragraph: half of the positions are kept for the question."""
        return min(self.config.paragraph, self.backbone.max_positions // 2)

    # Paragraphs

    def choose(self, paragraphs: Sequence[Paragraph], question: str) -> Chosen:
        """Which paragraphs are kept, and how much of each is to stay (steps 1 to 3).

        Raises:
            DataError: the question is too long to be scored beside a paragraph.
        """
        backbone = self.backbone
        asked = len(backbone.token_ids(question + PROMISE))
        room = backbone.max_positions - self.longest() - 1
        if asked > room:
            raise DataError(
                f"the question has {asked:,} tokens where paragraphs are ranked, {self.name} has "
                f"positions for {room:,}; ask something shorter"
            )
        lengths = [len(paragraph.ids) for paragraph in paragraphs]
        target = self._target(lengths, question)
        if len(paragraphs) == 1:
            ranked, scores, kept = [0], [0.0], [0]
            notes: tuple[str, ...] = (
                f"the context is one paragraph, so {self.name} ranked nothing",
            )
        else:
            scores = [-self.surprise_after(paragraph.text, question) for paragraph in paragraphs]
            ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
            kept, notes = self._affordable(ranked, lengths, target, question)
        mean = target / (sum(lengths[i] + 2 for i in kept) + 1)
        rates = [min(1.0, max(0.0, mean + more)) for more in spread(len(kept), self.config.spread)]
        return Chosen(ranked, scores, kept, rates, notes)

    @torch.no_grad()
    def surprise_after(self, text: str, question: str) -> float:
        """Mean surprise of question and promise right after a paragraph."""
        backbone = self.backbone
        ids = [backbone.bos_token_id, *backbone.token_ids(text + question + PROMISE)]
        surprise = Reading(backbone).surprise(torch.tensor(ids, device=backbone.device))
        return float(surprise[len(backbone.token_ids(text)) :].mean())

    def _target(self, lengths: Sequence[int], question: str) -> float:
        """Tokens that are to be left of all paragraphs; may be negative.

        As officially, each text counts with a start token, and an empty instruction is a text.
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

    def thinned(self, kept: Sequence[Paragraph], question: str, rates: Sequence[float]) -> str:
        """What is left of the kept paragraphs (steps 4 and 5).

        Args:
            kept: paragraphs in reading order.
            question: what is asked.
            rates: share of each that is to stay.
        """
        backbone, size = self.backbone, self.config.window
        head = question + SEPARATOR
        text = head + SEPARATOR.join(paragraph.text for paragraph in kept)
        encoded = backbone.tokenize([text], offsets=True)
        front = sum(end <= len(head) for _, end in encoded["offset_mapping"][0])
        ids_P = torch.tensor(encoded["input_ids"][0], device=backbone.device)
        plan = windows([len(paragraph.ids) + 2 for paragraph in kept], rates, size)
        stays = thin(backbone, ids_P, front, plan, size)
        return backbone.tokenizer.decode(ids_P[stays], clean_up_tokenization_spaces=False)


def spread(count: int, most: float) -> list[float]:
    """Differences from the mean share, from `most` for the best down to -`most` for the last."""
    if count == 1:
        return [0.0]
    return [most * (count - 1 - 2 * rank) / (count - 1) for rank in range(count)]

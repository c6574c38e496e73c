"""LongLLMLingua: prunes the text to a quarter for each question, then reads what is left.

From Jiang et al., 2024. The source is PromptCompressor of the official code (llmlingua 0.2.2) at
the paper's settings. Nothing is trained, and one backbone both scores and reads. Five steps:

1. Rank each paragraph by the mean negative log-likelihood (NLL) of the question after it, followed
   by a sentence that says the answer is there. A lower NLL ranks higher.
2. Keep the best paragraphs until their tokens exceed a budget; the one that exceeds it is kept.
3. Order them by rank, best first, and share the budget by rank.
4. Prune tokens by contrastive perplexity: the NLL of the next token without the question in front,
   minus the NLL with it. A token of low score is pruned: the question does not make the text more
   likely there. (The official code uses the next token, not the token itself.) Windows of 200
   tokens are pruned in turn, each after what is kept of the previous windows.
5. Decode the kept tokens and read them as text.

Deviations: docs/deviations.md.

Letters: P tokens of question and paragraphs, L tokens not pruned yet, A newly read tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from sedem.backbone.decoder import Backbone, KeyAxis
from sedem.backbone.prompts import SEPARATOR, question_ids
from sedem.engine.device import Clock
from sedem.errors import DataError
from sedem.types import Answer, Document
from sedem_lab.baselines.full_context import FullContext, text_bytes
from sedem_lab.baselines.paragraphs import Paragraph, split, split_notes

RESTRICTIVE_STATEMENT = " The answer to this question can be found in the documents above."
"""Follows the question when paragraphs are ranked; means the same as the official sentence."""

SCORED_TOGETHER = 512
"""Positions whose logits are in memory at once; logits of a 128,000-token vocabulary are large."""

Window = list[tuple[int, float]]
"""The parts of a window: number of tokens, and the share of them to keep."""


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

    The attributes are the paper's settings (appendix LongLLMLingua).
    """

    name = "longllmlingua"
    rate = 0.25
    """Share of the tokens of question and context to keep, the question included."""
    extra = 100
    """Tokens that the kept paragraphs may have beyond that share (`context_budget`)."""
    spread = 0.4
    """The best paragraph keeps this share more than the mean, the worst this share less
    (`dynamic_context_compression_ratio`)."""
    window = 200
    """Tokens that are pruned together (`iterative_size`)."""
    paragraph = 1024
    """Longest paragraph in tokens; longer ones are cut."""

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
        answer = self.answer_from(pruned, [0.0] * len(pruned), question, clock)
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
        return min(self.paragraph, self.backbone.max_positions // 2)

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
        # The number of paragraph tokens to keep; may be negative. As officially, each text counts
        # with a start token, and the empty instruction is a text.
        question_tokens = len(backbone.token_ids(question)) + 1
        every = 1 + question_tokens + sum(length + 1 for length in lengths)
        target = every * self.rate - 1 - question_tokens
        notes: tuple[str, ...] = ()
        if len(paragraphs) == 1:
            ranked, scores, kept = [0], [0.0], [0]
            notes = (f"the context is one paragraph, so {self.name} ranked nothing",)
        else:
            scores = [-self.question_nll(paragraph.text, question) for paragraph in paragraphs]
            ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
            budget = (target if target >= 0 else 100) + self.extra
            room = backbone.max_positions - len(backbone.token_ids(question + SEPARATOR))
            kept = []
            for index in ranked:
                room -= lengths[index] + 2
                if room < 0 and kept:
                    notes = (
                        f"{self.name} kept {len(kept):,} paragraphs: the next in rank does not fit "
                        f"the model's {backbone.max_positions:,} positions",
                    )
                    break
                kept.append(index)
                budget -= lengths[index] + 1
                if budget < 0:
                    break
        # By rank, from `spread` above the mean rate for the best paragraph to as much below it.
        mean, last = target / (sum(lengths[i] + 2 for i in kept) + 1), len(kept) - 1
        offsets = [self.spread * (last - 2 * rank) / max(1, last) for rank in range(last + 1)]
        rates = [min(1.0, max(0.0, mean + more)) for more in offsets]
        return SelectedParagraphs(ranked, scores, kept, rates, notes)

    @torch.no_grad()
    def question_nll(self, text: str, question: str) -> float:
        """Mean NLL of the question and the restrictive statement after a paragraph."""
        backbone = self.backbone
        ids = [backbone.bos_token_id, *backbone.token_ids(text + question + RESTRICTIVE_STATEMENT)]
        nll = CachedScorer(backbone).token_nll(torch.tensor(ids, device=backbone.device))
        return float(nll[len(backbone.token_ids(text)) :].mean())

    # Tokens

    def prune(self, kept: Sequence[Paragraph], question: str, rates: Sequence[float]) -> str:
        """Prune the kept paragraphs and return the text (steps 4 and 5).

        Args:
            rates: share of its tokens that each paragraph keeps.
        """
        backbone, size = self.backbone, self.window
        head = question + SEPARATOR
        text = head + SEPARATOR.join(paragraph.text for paragraph in kept)
        encoded = backbone.tokenize([text], offsets=True)
        front = sum(end <= len(head) for _, end in encoded["offset_mapping"][0])
        ids_P = torch.tensor(encoded["input_ids"][0], device=backbone.device)
        plan = plan_windows([len(paragraph.ids) + 2 for paragraph in kept], rates, size)
        stays = prune_tokens(backbone, ids_P, front, plan, size)
        return backbone.tokenizer.decode(ids_P[stays], clean_up_tokenization_spaces=False)


# Pruning tokens


class CachedScorer:
    """Computes the NLL of a growing sequence; its KV cache can be cut back."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.cache = DynamicCache()
        self.length = 0

    def token_nll(self, ids_P: Tensor) -> Tensor:
        """Read the rest of a sequence.

        Args:
            ids_P: the whole sequence; it begins with the tokens that are cached.

        Returns:
            NLL of each newly read token but the first `[A - 1]`.
        """
        backbone, new = self.backbone, slice(self.length, None)
        positions_1P = torch.arange(len(ids_P), device=ids_P.device)[None]
        valid_1P = torch.ones_like(positions_1P, dtype=torch.bool)
        states_AD = backbone.run(
            backbone.embed(ids_P[None, new]),
            0,
            backbone.depth,
            positions_1P[:, new],
            valid_1P[:, new],
            KeyAxis(positions_1P, valid_1P, padded=False, span=len(ids_P)),
            self.cache,
        )[0]
        self.length = len(ids_P)
        parts = zip(
            states_AD[:-1].split(SCORED_TOGETHER),
            ids_P[new][1:].split(SCORED_TOGETHER),
            strict=True,
        )
        return torch.cat(
            [
                F.cross_entropy(backbone.logits(part).float(), targets, reduction="none")
                for part, targets in parts
            ]
        )

    def truncate(self, length: int) -> None:
        """Drop all but the first tokens from the cache."""
        self.cache.crop(length - self.length)
        self.length = length


def plan_windows(lengths: Sequence[int], rates: Sequence[float], size: int) -> list[Window]:
    """Cut concatenated paragraphs into windows of `size` tokens; the first has one token less.

    Args:
        rates: share of each paragraph's tokens to keep.
    """
    found: list[Window] = [[]]
    room = size - 1
    for length, rate in zip(lengths, rates, strict=True):
        while length >= room:
            found[-1].append((room, rate))
            found.append([])
            length, room = length - room, size
        if length:
            found[-1].append((length, rate))
            room -= length
    return [window for window in found if window]


@torch.no_grad()
def prune_tokens(
    backbone: Backbone, ids_P: Tensor, question: int, plan: Sequence[Window], size: int
) -> Tensor:
    """Prune a text window by window.

    The threshold of a window is computed over all tokens that are not pruned yet. Tokens after the
    last whole window are kept, and so is the last token. A text shorter than one window is pruned
    as one window.

    Args:
        question: number of question tokens; they are never pruned and not returned.
        plan: the parts of each window.

    Returns:
        Indices into `ids_P` of the text tokens that are kept, ascending.
    """
    kept_L = torch.arange(len(ids_P), device=ids_P.device)
    # One score for each text token that has a successor.
    scores_L = CachedScorer(backbone).token_nll(ids_P[question:])
    scores_L = scores_L - CachedScorer(backbone).token_nll(ids_P)[question:]
    with_question, without_question = CachedScorer(backbone), CachedScorer(backbone)
    front = scored = question
    for number, window in enumerate(plan):
        end = front + size
        if number:
            if end > len(kept_L):
                break
            # Score this window again, after what is kept of the previous windows.
            read_A = ids_P[kept_L[:end]]
            count = end - 1 - scored
            new_A = without_question.token_nll(read_A[question:])[-count:]
            new_A = new_A - with_question.token_nll(read_A)[-count:]
            scores_L[scored - question : end - 1 - question] = new_A
            without_question.truncate(front - question)
            with_question.truncate(front)
            scored = front
        for tokens, rate in window:
            keep_L = torch.ones_like(kept_L, dtype=torch.bool)
            part = slice(front - question, front - question + tokens)
            if rate != 1 and len(scores_L):
                # Above the score that keeps a share of all tokens.
                place = max(0, min(len(scores_L) - 1, int(len(scores_L) * rate) - 1))
                threshold = scores_L.sort(descending=True).values[place]
                keep_A = (scores_L > threshold)[part]
                keep_L[front : front + len(keep_A)] = keep_A
            scores_L = scores_L[keep_L[question:-1]]
            front += tokens - int((~keep_L).sum())
            kept_L = kept_L[keep_L]
    return kept_L[question:]

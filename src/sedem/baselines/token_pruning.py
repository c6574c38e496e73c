"""Token pruning by contrastive perplexity: the fine-grained step of LongLLMLingua.

The contrastive score of a token is the negative log-likelihood (NLL) of the next token without the
question in front, minus the NLL with it. A low score means that the question does not make the
text more likely there, and the token is pruned. The official code uses the next token, not the
token itself.

Letters: P tokens of question and text, L tokens not pruned yet, A newly read tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis

SCORED_TOGETHER = 512
"""Positions whose logits are in memory at once; logits of a 128,000-token vocabulary are large."""

Window = list[tuple[int, float]]
"""The parts of a window: number of tokens, and the share of them to keep."""


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


def above_threshold(scores_L: Tensor, rate: float) -> Tensor:
    """Mask of the tokens whose score exceeds the threshold that keeps a share of all tokens."""
    if rate == 1 or not len(scores_L):
        return torch.ones_like(scores_L, dtype=torch.bool)
    place = max(0, min(len(scores_L) - 1, int(len(scores_L) * rate) - 1))
    return scores_L > scores_L.sort(descending=True).values[place]


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
            keep_A = above_threshold(scores_L, rate)[part]
            keep_L[front : front + len(keep_A)] = keep_A
            scores_L = scores_L[keep_L[question:-1]]
            front += tokens - int((~keep_L).sum())
            kept_L = kept_L[keep_L]
    return kept_L[question:]

"""Leaving out tokens that a question does not make likelier: the fine part of LongLLMLingua.

A token's worth is the surprise (negative log-likelihood) of the token after it without the question
in front, less that with it. That it is the token after it, and not the token's own, is the official
code's doing.

Letters: P tokens of question and text, L tokens still there, A newly read tokens.
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
"""Positions whose logits are held at once: a vocabulary of 128,000 makes them large."""

Window = list[tuple[int, float]]
"""What a window holds: numbers of tokens, and the share of them that stays."""


class Reading:
    """A backbone part of the way through a sequence; it can go back.

    Args:
        backbone: reads.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.cache = DynamicCache()
        self.length = 0

    def surprise(self, ids_P: Tensor) -> Tensor:
        """Read on to the end of a sequence.

        Args:
            ids_P: all of it; what was read before is at its beginning.

        Returns:
            Surprise of each newly read token but the first `[A - 1]`.
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

    def back_to(self, length: int) -> None:
        """Forget what was read after some tokens."""
        self.cache.crop(length - self.length)
        self.length = length


def windows(lengths: Sequence[int], rates: Sequence[float], size: int) -> list[Window]:
    """Paragraphs laid end to end and cut every `size` tokens, the first time a token early.

    Args:
        lengths: of the paragraphs.
        rates: share of each that stays.
        size: tokens of a window.
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


def worthy(worth_L: Tensor, rate: float) -> Tensor:
    """Which tokens are worth more than what the share asks for of all that are still there."""
    if rate == 1 or not len(worth_L):
        return torch.ones_like(worth_L, dtype=torch.bool)
    place = max(0, min(len(worth_L) - 1, int(len(worth_L) * rate) - 1))
    return worth_L > worth_L.sort(descending=True).values[place]


@torch.no_grad()
def thin(
    backbone: Backbone, ids_P: Tensor, question: int, plan: Sequence[Window], size: int
) -> Tensor:
    """Which tokens stay, window by window.

    A threshold is taken over every token that is still there. Tokens after the last whole window
    stay, as does the last of all; a text shorter than one window is one.

    Args:
        backbone: scores.
        ids_P: question, then text.
        question: tokens of the former; they all stay and are not returned.
        plan: what the windows hold.
        size: tokens of a window.

    Returns:
        Indices of tokens of the text in `ids_P`, in their order.
    """
    kept_L = torch.arange(len(ids_P), device=ids_P.device)
    # Of each token of the text that another one follows.
    worth_L = Reading(backbone).surprise(ids_P[question:])
    worth_L = worth_L - Reading(backbone).surprise(ids_P)[question:]
    asked, alone = Reading(backbone), Reading(backbone)
    front = scored = question
    for number, window in enumerate(plan):
        end = front + size
        if number:
            if end > len(kept_L):
                break
            now_A = ids_P[kept_L[:end]]
            count = end - 1 - scored
            fresh_A = alone.surprise(now_A[question:])[-count:] - asked.surprise(now_A)[-count:]
            worth_L[scored - question : end - 1 - question] = fresh_A
            alone.back_to(front - question)
            asked.back_to(front)
            scored = front
        for tokens, rate in window:
            stays_L = torch.ones_like(kept_L, dtype=torch.bool)
            own = slice(front - question, front - question + tokens)
            part_A = worthy(worth_L, rate)[own]
            stays_L[front : front + len(part_A)] = part_A
            worth_L = worth_L[stays_L[question:-1]]
            front += tokens - int((~stays_L).sum())
            kept_L = kept_L[stays_L]
    return kept_L[question:]

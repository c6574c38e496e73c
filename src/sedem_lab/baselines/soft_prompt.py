"""Soft prompts: a decoder reads vectors as input embeddings, rows of any length in one batch.

`run_soft_prompts` reads [start; soft tokens; prompt; answer]. That is two-depth decoding with an
injection at layer 0, so it shares that code and its masks. `run_embeddings` reads soft tokens at
any other position.

Letters: B batch, U soft tokens of a row, P prompt and answer tokens, A answer tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.backbone.decoder import Backbone, KeyAxis
from sedem.engine.interface import Step
from sedem.method.injection import GrowingCache, Prefilled, RestoredBlocks, prefill, step
from sedem.method.losses import next_token_loss


@dataclass(frozen=True)
class PrefillResult:
    """State of a batch after prefill."""

    logits: Tensor
    """Logits of the first answer token `[B, V]`."""
    advance: Step
    """Runs one more token of every row."""
    conditioning: list[int]
    """Positions that the decoder saw before the first answer token, row by row."""


def run_embeddings(
    backbone: Backbone, rows: Sequence[Tensor], cache: GrowingCache | None = None
) -> Tensor:
    """Run every layer on rows of embeddings `[P, D]`; the positions of each row start at 0.

    Args:
        cache: an empty cache to decode from afterwards; None if nothing follows.

    Returns:
        States before the final norm `[B, P, D]`, padded on the left so that all rows end at the
        last position.
    """
    rows_BPD, valid_BP = pad_left(rows)
    lengths_B, longest = valid_BP.sum(1), rows_BPD.shape[1]
    positions_BP = (valid_BP.long().cumsum(1) - 1).clamp_min(0)
    padded = any(len(row) < longest for row in rows)
    keys = KeyAxis(positions_BP, valid_BP, padded, longest)
    if cache is not None:
        cache.begin_everywhere(keys, lengths_B)
    own = None if cache is None else cache.upper
    return backbone.run(rows_BPD, 0, backbone.depth, positions_BP, valid_BP, keys, own)


def prefill_result(
    backbone: Backbone, last_BD: Tensor, cache: GrowingCache, conditioning: list[int]
) -> PrefillResult:
    """Logits and decoding step after a prefill through every layer.

    Args:
        last_BD: states at the last position of each row.
        cache: what the prefill filled.
        conditioning: number of positions that the decoder saw, row by row.
    """

    def advance(ids_B: Tensor) -> Tensor:
        return backbone.logits(step(backbone, 0, ids_B, cache))

    return PrefillResult(backbone.logits(last_BD), advance, conditioning)


def run_soft_prompts(
    backbone: Backbone,
    soft_tokens: Sequence[Tensor],
    ids_BP: Tensor,
    valid_BP: Tensor,
    cache: GrowingCache | None = None,
    apart: Sequence[Tensor] | None = None,
) -> Prefilled:
    """Run every layer on start token, soft tokens and text tokens, at contiguous positions from 0.

    Args:
        soft_tokens: soft tokens of each row `[U, D]`; rows may differ in U.
        ids_BP: start token and the tokens after the soft ones, padded on the left.
        valid_BP: False where a token is padding.
        cache: an empty cache to decode from afterwards; None if nothing follows.
        apart: block of each soft token `[U]`, from 0, if blocks are independent: each sees the
            start token and itself, at positions from 1 on. None means one block.
    """
    soft_BUD = pad_sequence(list(soft_tokens), batch_first=True)
    counts_B1 = torch.tensor([[len(row)] for row in soft_tokens], device=soft_BUD.device)
    valid_BU = torch.arange(soft_BUD.shape[1], device=soft_BUD.device) < counts_B1
    blocks = None
    if apart is not None:
        blocks = RestoredBlocks(pad_sequence(list(apart), batch_first=True), "independent")
    return prefill(backbone, 0, ids_BP, valid_BP, soft_BUD, valid_BU, blocks=blocks, cache=cache)


def prefill_soft_prompts(
    backbone: Backbone,
    soft_tokens: Sequence[Tensor],
    prompts: Sequence[list[int]],
    apart: Sequence[Tensor] | None = None,
) -> PrefillResult:
    """Prefill soft tokens `[U, D]` and start token, prompt and question of each row."""
    ids_BP, valid_BP = pad_left([torch.tensor(row, device=backbone.device) for row in prompts])
    cache = GrowingCache()
    filled = run_soft_prompts(backbone, soft_tokens, ids_BP, valid_BP, cache, apart)
    conditioning = [len(row) + len(p) for row, p in zip(soft_tokens, prompts, strict=True)]
    return prefill_result(backbone, filled.prefix[:, -1], cache, conditioning)


def continuation_loss(
    backbone: Backbone, soft_tokens: Sequence[Tensor], target_BA: Tensor, labels_BA: Tensor
) -> Tensor:
    """Cross-entropy of text right after soft tokens; the last soft token predicts its first token.

    Args:
        soft_tokens: soft tokens of each row `[U, D]`; all rows have the same U.
        labels_BA: the same tokens, with `IGNORED` where they do not count.
    """
    start_B1 = target_BA.new_full((len(target_BA), 1), backbone.bos_token_id)
    ids_BA = torch.cat([start_B1, target_BA[:, :-1]], dim=1)
    filled = run_soft_prompts(backbone, soft_tokens, ids_BA, torch.ones_like(ids_BA).bool())
    states_BAD = torch.cat([filled.restored[:, -1:], filled.prefix[:, 1:]], dim=1)
    return next_token_loss(backbone.logits(states_BAD), labels_BA)


def pad_left(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad tokens `[P]` or embeddings `[P, D]` on the left; the mask is False at padding."""
    padded = pad_sequence(list(rows), batch_first=True, padding_side="left")
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=padded.device)
    return padded, torch.arange(padded.shape[1], 0, -1, device=padded.device) <= lengths_B1

"""Soft tokens at the decoder's input: [start; states; prompt; answer], rows of any length.

Two-depth decoding with an injection at layer 0 is just this, and its masks are used here. Where
soft tokens stand elsewhere, rows of embeddings are run as they are.

Letters: B batch, U states of a row, P prompt and answer tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.baselines.memory import Begun
from sedem.method.injection import Prefilled, Stream, prefill, step
from sedem.method.losses import next_token_loss


def run_rows(
    backbone: Backbone, rows: Sequence[Tensor], cache: DynamicCache | None = None
) -> tuple[Tensor, Stream | None]:
    """Run every layer on rows of embeddings, each with positions contiguous from 0.

    Args:
        backbone: the decoder, with or without its adapters.
        rows: embeddings `[P, D]`; rows may differ in P.
        cache: an empty one to go on from; None when nothing follows.

    Returns:
        States before the closing norm `[B, P, D]`, padded on the left, so that the last position of
        every row is the last one; and where decoding goes on, None without a cache.
    """
    rows_BPD = pad_sequence(list(rows), batch_first=True, padding_side="left")
    device, longest = rows_BPD.device, rows_BPD.shape[1]
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    valid_BP = torch.arange(longest, 0, -1, device=device) <= lengths_B1
    positions_BP = (valid_BP.long().cumsum(1) - 1).clamp_min(0)
    padded = any(len(row) < longest for row in rows)
    keys = KeyAxis(positions_BP, valid_BP, padded, longest)
    states_BPD = backbone.run(rows_BPD, 0, backbone.depth, positions_BP, valid_BP, keys, cache)
    stream = None if cache is None else Stream(cache, keys, keys, lengths_B1[:, 0])
    return states_BPD, stream


def begun(
    backbone: Backbone, last_BD: Tensor, stream: Stream | None, conditioning: list[int]
) -> Begun:
    """Where answers begin after a prefill of every layer.

    Args:
        backbone: the decoder.
        last_BD: states of each row's last position.
        stream: where the rows stand; there is one after a prefill with a cache.
        conditioning: positions that the decoder saw, row by row.
    """
    assert stream is not None

    def advance(ids_B: Tensor, live: Sequence[int]) -> Tensor:
        return backbone.logits(step(backbone, 0, ids_B, stream))

    return Begun(backbone.logits(last_BD), advance, conditioning)


def run_soft(
    backbone: Backbone,
    states: Sequence[Tensor],
    ids_BP: Tensor,
    valid_BP: Tensor,
    cache: DynamicCache | None = None,
) -> Prefilled:
    """Run every layer on start token, states and tokens, positions contiguous from 0.

    Args:
        backbone: the decoder, with or without its adapters.
        states: of each row `[U, D]`; rows may differ in U.
        ids_BP: start token and what follows the states, padded on the left.
        valid_BP: False where a token is padding.
        cache: an empty one to go on from; None when nothing follows.
    """
    states_BUD = pad_sequence(list(states), batch_first=True)
    counts_B1 = torch.tensor([[len(row)] for row in states], device=states_BUD.device)
    valid_BU = torch.arange(states_BUD.shape[1], device=states_BUD.device) < counts_B1
    return prefill(backbone, 0, ids_BP, valid_BP, states_BUD, valid_BU, cache=cache)


def begin_soft(backbone: Backbone, states: Sequence[Tensor], prompts: Sequence[list[int]]) -> Begun:
    """Prefill a batch and say how it goes on.

    Args:
        backbone: the decoder.
        states: of each row `[U, D]`.
        prompts: start token, prompt and question of each row.
    """
    rows = [torch.tensor(prompt, device=backbone.device) for prompt in prompts]
    ids_BP, valid_BP = padded_left(rows)
    filled = run_soft(backbone, states, ids_BP, valid_BP, DynamicCache())
    conditioning = [len(row) + len(prompt) for row, prompt in zip(states, prompts, strict=True)]
    return begun(backbone, filled.prefix[:, -1], filled.stream, conditioning)


def continuation_loss(
    backbone: Backbone, states: Sequence[Tensor], target_BA: Tensor, labels_BA: Tensor
) -> Tensor:
    """Loss of text right after soft tokens: the last of them predicts its first token.

    Args:
        backbone: the decoder.
        states: of each row `[U, D]`, all of one length.
        target_BA: the text.
        labels_BA: its tokens where they count.
    """
    start_B1 = target_BA.new_full((len(target_BA), 1), backbone.bos_token_id)
    ids_BA = torch.cat([start_B1, target_BA[:, :-1]], dim=1)
    filled = run_soft(backbone, states, ids_BA, torch.ones_like(ids_BA, dtype=torch.bool))
    states_BAD = torch.cat([filled.restored[:, -1:], filled.prefix[:, 1:]], dim=1)
    return next_token_loss(backbone.logits(states_BAD), labels_BA)


def padded_left(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Token rows as a batch `[B, P]`, and where it is not padding; rows end together."""
    ids_BP = pad_sequence(list(rows), batch_first=True, padding_side="left")
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=ids_BP.device)
    return ids_BP, torch.arange(ids_BP.shape[1], 0, -1, device=ids_BP.device) <= lengths_B1

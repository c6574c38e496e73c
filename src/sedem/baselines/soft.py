"""Soft tokens at the decoder's input: [start; states; prompt; answer], rows of any length.

Two-depth decoding with an injection at layer 0 is just this, and its masks are used here.

Letters: B batch, U states of a row, P prompt and answer tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from sedem.backbone import Backbone
from sedem.baselines.memory import Begun
from sedem.injection import Prefilled, prefill, step


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
    device = backbone.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids_BP = pad_sequence(rows, batch_first=True, padding_side="left")
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1, device=device) <= lengths_B1
    filled = run_soft(backbone, states, ids_BP, valid_BP, DynamicCache())
    stream = filled.stream
    assert stream is not None

    def advance(ids_B: Tensor) -> Tensor:
        return backbone.logits(step(backbone, 0, ids_B, stream))

    conditioning = [len(row) + len(prompt) for row, prompt in zip(states, prompts, strict=True)]
    return Begun(backbone.logits(filled.prefix[:, -1]), advance, conditioning)

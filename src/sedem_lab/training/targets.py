"""Prompt and answer as decoder input and labels.

Letters: B batch, P prefix and answer tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import context_ids, context_place
from sedem.method.losses import IGNORED


def with_texts(
    backbone: Backbone,
    ids_BP: Tensor,
    valid_BP: Tensor,
    texts: Sequence[Sequence[str]],
    *,
    chat: bool = False,
) -> tuple[Tensor, Tensor]:
    """Insert texts before the question of each row, in the same place as for answering.

    Returns:
        Longer `ids` and `valid` `[B, P]`, padded on the left.
    """
    rows = []
    for ids_P, valid_P, row_texts in zip(ids_BP, valid_BP, texts, strict=True):
        context = ids_P.new_tensor(context_ids(backbone, row_texts, chat=chat))
        before, rest = ids_P[valid_P].tensor_split([context_place(backbone, chat=chat)])
        rows.append(torch.cat([before, context, rest]))
    return padded(rows, "left")


def targets(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Join prefixes and answers into decoder input, padded on the left, with the tokens to predict.

    Returns:
        `ids` and `valid` `[B, P]`, and `labels` of the last positions `[B, A]`; `valid` is False
        where `ids` is padding.
    """
    inputs, labels = [], []
    for prefix, answer in pairs:
        ids = [*prefix, *answer]
        inputs.append(torch.tensor(ids[:-1]))
        labels.append(torch.tensor([IGNORED] * (len(prefix) - 1) + answer))
    ids_BP, valid_BP = padded(inputs, "left")
    labels_BP = pad_sequence(labels, batch_first=True, padding_value=IGNORED, padding_side="left")
    longest = max(len(answer) for _, answer in pairs)
    return {"ids": ids_BP, "valid": valid_BP, "labels": labels_BP[:, -longest:]}


def padded(rows: Sequence[Tensor], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Token ids padded on one side `[B, P]`, and a mask that is False at padding."""
    real = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    ids_BP, valid_BP = (
        pad_sequence(list(given), batch_first=True, padding_side=side) for given in (rows, real)
    )
    return ids_BP, valid_BP

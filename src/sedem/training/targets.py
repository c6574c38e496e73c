"""Prompt and answer as decoder input and labels.

Letters: B batch, P prefix and answer tokens, A answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.method.losses import IGNORED


def targets(pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Join prefixes and answers to decoder input, padded on the left, with the tokens to predict.

    Args:
        pairs: prefix and answer of each row, as token ids.

    Returns:
        `ids` and `valid` `[B, P]`, and `labels` of the last positions `[B, A]`; `valid` is False
        where `ids` is padding.
    """
    inputs, labels = [], []
    for prefix, answer in pairs:
        ids = [*prefix, *answer]
        inputs.append(torch.tensor(ids[:-1]))
        labels.append(torch.tensor([IGNORED] * (len(prefix) - 1) + answer))
    ids_BP = pad_sequence(inputs, batch_first=True, padding_side="left")
    labels_BP = pad_sequence(labels, batch_first=True, padding_value=IGNORED, padding_side="left")
    lengths_B1 = torch.tensor([[len(row)] for row in inputs])
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1) <= lengths_B1
    longest = max(len(answer) for _, answer in pairs)
    return {"ids": ids_BP, "valid": valid_BP, "labels": labels_BP[:, -longest:]}

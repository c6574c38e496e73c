"""Inputs that are filled on the host and read on a device."""

from __future__ import annotations

import torch

from sedem.engine.buffers import Upload, fill, fill_lengths


def test_fields_arrive() -> None:
    fields = {"ids": ((2, 3), torch.long), "nothing": ((2, 0, 4), torch.float32)}
    upload = Upload(torch.device("cpu"), fields)
    upload.begin()
    upload.host["ids"].copy_(torch.arange(6).view(2, 3) - 3)
    upload.send()
    assert {name: (tuple(t.shape), t.dtype) for name, t in upload.device.items()} == fields
    assert upload.device["ids"].tolist() == [[-3, -2, -1], [0, 1, 2]]


def test_rows_of_different_lengths_are_padded_on_the_right() -> None:
    buffer = torch.full((3, 4), 7.0)
    fill(buffer, [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.ones(4)], padding=-torch.inf)
    gone = -torch.inf
    assert buffer.tolist() == [[1.0, 2.0, gone, gone], [gone] * 4, [1.0] * 4]
    mask = torch.ones(3, 4, dtype=torch.bool)
    fill_lengths(mask, [2, 0, 4])
    assert mask.tolist() == [[True, True, False, False], [False] * 4, [True] * 4]

"""Inputs that go to a device together."""

from __future__ import annotations

import torch

from sedem.engine.upload import ALIGNMENT, Upload, fill, fill_lengths

FIELDS = {
    "ids": ((2, 3), torch.long),
    "valid": ((2, 3), torch.bool),
    "nothing": ((2, 0, 4), torch.float32),
    "scores": ((5,), torch.float32),
}


def test_fields_are_apart_and_arrive() -> None:
    upload = Upload(torch.device("cpu"), FIELDS)
    upload.begin()
    upload.host["ids"].copy_(torch.arange(6).view(2, 3) - 3)
    upload.host["valid"].copy_(torch.tensor([[True, False, True], [False, True, False]]))
    upload.host["scores"].copy_(torch.tensor([1.5, -torch.inf, 0.0, 2.0, 3.0]))
    upload.send()
    found = upload.device
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == FIELDS
    assert found["ids"].tolist() == [[-3, -2, -1], [0, 1, 2]]
    assert found["valid"].tolist() == [[True, False, True], [False, True, False]]
    assert found["scores"].tolist() == [1.5, -torch.inf, 0.0, 2.0, 3.0]


def test_one_buffer_holds_all_and_each_field_is_aligned() -> None:
    upload = Upload(torch.device("cpu"), FIELDS)
    storages = {tensor.untyped_storage().data_ptr() for tensor in upload.device.values()}
    assert storages == {upload.buffer.untyped_storage().data_ptr()}
    starts = [t.storage_offset() * t.dtype.itemsize for t in upload.device.values()]
    assert [start % ALIGNMENT for start in starts] == [0, 0, 0, 0]


def test_rows_of_different_lengths_are_padded_on_the_right() -> None:
    buffer = torch.full((3, 4), 7.0)
    fill(buffer, [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.ones(4)], padding=-torch.inf)
    gone = -torch.inf
    assert buffer.tolist() == [[1.0, 2.0, gone, gone], [gone] * 4, [1.0] * 4]
    mask = torch.ones(3, 4, dtype=torch.bool)
    fill_lengths(mask, [2, 0, 4])
    assert mask.tolist() == [[True, True, False, False], [False] * 4, [True] * 4]

"""A result records the device that produced it."""

from __future__ import annotations

import pytest
import torch

from sedem_lab.provenance import provenance


def test_the_named_device_is_the_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {None: "current", torch.device("cuda:1"): "second"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[device])
    assert provenance()["machine"]["device"] == "current"
    assert provenance(torch.device("cuda:1"))["machine"]["device"] == "second"
    machine = provenance(torch.device("cpu"))["machine"]
    assert machine["device"] == machine["processor"]

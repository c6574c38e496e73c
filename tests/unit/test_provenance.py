"""Beside a result stands the device that it was made on."""

from __future__ import annotations

import pytest
import torch

from sedem.provenance import provenance


def test_the_device_that_ran_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {None: "current", torch.device("cuda:1"): "second"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[device])
    assert provenance()["machine"]["device"] == "current"
    assert provenance(torch.device("cuda:1"))["machine"]["device"] == "second"
    machine = provenance(torch.device("cpu"))["machine"]
    assert machine["device"] == machine["processor"]

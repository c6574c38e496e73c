from __future__ import annotations

from typing import Any

import pytest
import torch

from sedem.backbone.compiling import check_compiler
from sedem.errors import ConfigError


def test_a_machine_without_a_compiler_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(function: Any) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nTraceback: ...")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ConfigError) as raised:
        check_compiler("cpu", "optimization.compile")
    assert str(raised.value) == (
        "optimization.compile needs torch.compile, but nothing can be compiled on this machine "
        "(No working C++ compiler found); install a C++ compiler, or leave optimization.compile out"
    )


def test_a_machine_with_a_compiler_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    check_compiler("cpu", "optimization.compile")

"""Commands of the studies refuse what they cannot do, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments import gpu
from experiments.__main__ import app


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --dry-run", "--dry-run is of the scale paper, not of nano"),
        ("run --stand-in", "--stand-in is of the scale paper, not of nano"),
        ("run --scale paper --gpu-memory 1.5", "--gpu-memory is of a dry run"),
        ("run --scale large", "scale is 'large'; it can be nano, paper, gpu"),
        ("run nothing", "no study is called 'nothing'; `list` prints their names"),
        ("run --part 3/2", "part is '3/2'; it must be like 2/8"),
        ("run --part 0/2", "part is '0/2'; it must be like 2/8"),
        ("run --part half", "part is 'half'; it must be like 2/8"),
        ("probe base nowhere.txt --out x", "no file or folder 'nowhere.txt'"),
        ("probe base . --layers 16-10 --out x", "layers are '16-10'"),
    ],
)
def test_a_command_is_refused_in_one_sentence(words: str, sentence: str) -> None:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2 and sentence in " ".join(done.output.replace("│", "").split())


def test_a_machine_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(gpu.app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 1 and "this machine has no GPU" in str(result.exception)
    assert not (tmp_path / "out").exists()

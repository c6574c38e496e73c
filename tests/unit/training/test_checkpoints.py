from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from sedem.training import checkpoints
from sedem.training.checkpoints import COMPLETE, is_complete, last_complete_checkpoint, seal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three sealed checkpoints."""
    for step in (8, 9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        (folder / "inner").mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(range(100)))
        (folder / "inner" / "state").write_text("state")
        seal(folder)
    return tmp_path


def test_the_newest_sealed_checkpoint_is_the_last_complete_one(run: Path, tmp_path: Path) -> None:
    assert last_complete_checkpoint(run) == run / "checkpoint-10"
    assert last_complete_checkpoint(tmp_path / "nothing") is None


def unsealed(folder: Path) -> None:
    (folder / COMPLETE).unlink()


def half_sealed(folder: Path) -> None:
    (folder / COMPLETE).rename(folder / f".{COMPLETE}")


def broken_seal(folder: Path) -> None:
    (folder / COMPLETE).write_text('{"weights": [100')


def truncated(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(99)))


def changed(folder: Path) -> None:
    (folder / "weights").write_bytes(bytes(range(1, 101)))


def missing(folder: Path) -> None:
    (folder / "inner" / "state").unlink()


@pytest.mark.parametrize(
    "damage", [unsealed, half_sealed, broken_seal, truncated, changed, missing]
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    run: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(run / "checkpoint-10")
    assert not is_complete(run / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert last_complete_checkpoint(run) == run / "checkpoint-9"
    assert "checkpoint-10' is incomplete and is skipped" in caplog.text
    # The resumed run will write a checkpoint of that name.
    assert not (run / "checkpoint-10").exists()


def test_without_a_complete_checkpoint_there_is_none(run: Path) -> None:
    for folder in run.iterdir():
        unsealed(folder)
    assert last_complete_checkpoint(run) is None


def test_a_checkpoint_whose_sealing_failed_is_incomplete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run / "checkpoint-10"
    unsealed(folder)

    def fails(path: Path) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "sha256", fails)
    with pytest.raises(OSError, match="no space left"):
        seal(folder)
    monkeypatch.undo()
    assert not is_complete(folder)

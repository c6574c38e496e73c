from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sedem_lab.training import checkpoints
from sedem_lab.training.checkpoints import COMPLETE, is_complete, last_complete_checkpoint, seal


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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "broken seal": lambda folder: (folder / COMPLETE).write_text('{"weights": [100'),
    "truncated": lambda folder: (folder / "weights").write_bytes(bytes(range(99))),
    "changed": lambda folder: (folder / "weights").write_bytes(bytes(range(1, 101))),
    "missing": lambda folder: (folder / "inner" / "state").unlink(),
}


@pytest.mark.parametrize("half", [False, True])
def test_a_checkpoint_that_was_never_complete_is_removed_with_a_warning(
    run: Path, half: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(folder: Path) -> None:
        seal = (folder / COMPLETE).rename(folder / f".{COMPLETE}")
        if not half:
            seal.unlink()

    assert last_complete_checkpoint(run) == run / "checkpoint-10"
    assert last_complete_checkpoint(run / "nothing") is None
    damage(run / "checkpoint-10")
    assert not is_complete(run / "checkpoint-10")
    with caplog.at_level(logging.WARNING):
        assert last_complete_checkpoint(run) == run / "checkpoint-9"
    assert "checkpoint-10' is incomplete and is skipped" in caplog.text
    # The resumed run will write a checkpoint of that name.
    assert not list(run.glob("*checkpoint-10*"))
    for step in (8, 9):
        damage(run / f"checkpoint-{step}")
    assert last_complete_checkpoint(run) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_kept_under_another_name(
    run: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run / "checkpoint-10"
    for name in ("damaged-checkpoint-10", "damaged-checkpoint-10-2"):
        shutil.copytree(run / "checkpoint-9", folder, dirs_exist_ok=True)
        DAMAGES[damage](folder)
        with caplog.at_level(logging.WARNING):
            assert last_complete_checkpoint(run) == run / "checkpoint-9"
        assert f"checkpoint-10' is damaged; it is kept as '{run / name}'" in caplog.text
        assert (run / name / COMPLETE).is_file() and not folder.exists()


def test_all_of_a_checkpoint_is_synced_before_its_seal_appears(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done = run / "checkpoint-10", []
    (folder / COMPLETE).unlink()
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def named(source: Path, target: Path) -> None:
        done.append(Path(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    seal(folder)
    before = set(done[: done.index(folder / COMPLETE)])
    assert before >= {folder, folder / "weights", folder / "inner", folder / "inner" / "state"}
    assert done[-2:] == [folder, run]


def test_a_checkpoint_that_is_left_half_removed_was_never_complete(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.remove(run / "checkpoint-10")
    monkeypatch.undo()
    assert last_complete_checkpoint(run) == run / "checkpoint-9"
    assert not list(run.glob("damaged*"))

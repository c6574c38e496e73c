"""Training runs of the tiny recipes: interrupted, repeated elsewhere, compared."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from sedem_lab.training.baseline import BaselineRecipe, train_baseline
from sedem_lab.training.recipe import as_yaml
from sedem_lab.training.shipped_recipes import launch_file
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe, train_stage1, train_stage2

Recipe = Stage1Recipe | Stage2Recipe | BaselineRecipe


@contextmanager
def one_thread() -> Iterator[None]:
    """Sum in one order on every machine, so that runs can be compared exactly."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(recipe: Recipe) -> Path:
    if isinstance(recipe, BaselineRecipe):
        return train_baseline(recipe)
    return train_stage1(recipe) if isinstance(recipe, Stage1Recipe) else train_stage2(recipe)


def elsewhere(recipe: Any, name: str, **run: Any) -> Any:
    """The recipe with another output folder."""
    output = Path(recipe.run.output).with_name(name)
    return recipe.with_changes(run=recipe.run.with_changes(output=str(output), **run))


def copied(recipe: Any, folder: Path) -> Any:
    """A copy of a run, its recipe included, that a test may change."""
    copy = recipe.with_changes(run=recipe.run.with_changes(output=str(folder / "copy")))
    shutil.copytree(recipe.run.output, copy.run.output)
    (Path(copy.run.output) / "recipe.yaml").write_text(as_yaml(copy))
    return copy


@contextmanager
def killed_in_step(step: int) -> Iterator[None]:
    """Interrupt training in the middle of an optimizer step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        clip, steps = Accelerator.clip_grad_norm_, iter(range(1, step + 1))

        def interrupted(self: Accelerator, *args: Any, **options: Any) -> Any:
            if next(steps) == step:
                raise KeyboardInterrupt
            return clip(self, *args, **options)

        patch.setattr(Accelerator, "clip_grad_norm_", interrupted)
        yield


RANK = """
import sys
from pathlib import Path
from sedem_lab.training.stages import load_run

for path in map(Path, sys.argv[1:]):
    recipe, train = load_run(path)
    train(recipe)
"""


def train_in_two_processes(recipes: Sequence[Recipe], folder: Path) -> None:
    """Train recipes one after the other, as accelerate starts one process on each machine."""
    paths, script = [], folder / "train.py"
    script.write_text(RANK)
    for number, recipe in enumerate(recipes):
        paths.append(folder / f"{number}.yaml")
        paths[-1].write_text(as_yaml(recipe))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    launch += ["--config_file", str(launch_file("two-machines"))]
    launch += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    started = [
        subprocess.Popen(
            [*launch, "--machine_rank", machine, str(script), *map(str, paths)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in ("0", "1")
    ]
    errors = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors


def summary(recipe: Recipe) -> dict[str, Any]:
    return dict(json.loads((Path(recipe.run.output) / "training.json").read_text()))


def losses(recipe: Recipe) -> list[dict[str, float]]:
    """The lines of the log."""
    return list(summary(recipe)["log"])


def final_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Of the parts and the adapters."""
    files = (Path(recipe.run.output) / "final").rglob("*.safetensors")
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def assert_same_training(found: Recipe, expected: Recipe) -> None:
    assert losses(found) == losses(expected)
    weights, wanted = final_weights(found), final_weights(expected)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in weights)

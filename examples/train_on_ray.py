"""Train on the machines of a Ray cluster; Ray starts the processes, accelerate joins them.

    python train_on_ray.py ADDRESS PROCESSES [--cpu] RECIPE [--set KEY=VALUE]...

ADDRESS is HOST:PORT, `auto`, or `local` for a cluster on this machine. What follows
PROCESSES goes to `sedem train`, which each process runs on a GPU of its own, or on a CPU. Recipe,
data and `run.output` must be where every machine sees them under the same path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(settings: dict[str, list[str]]) -> None:
    """Run `sedem train` in one of the processes; Ray has set what torchrun would set."""
    from sedem.cli.main import app

    app(["train", *settings["words"]], standalone_mode=False)


address, processes, *words = sys.argv[1:]
use_gpu = words[0] != "--cpu"
if address == "local":
    ray.init(num_cpus=int(processes) + 1, include_dashboard=False)
else:
    ray.init(address=address)
result = TorchTrainer(
    train,
    train_loop_config={"words": words if use_gpu else words[1:]},
    scaling_config=ScalingConfig(num_workers=int(processes), use_gpu=use_gpu),
    run_config=RunConfig(
        storage_path=os.path.abspath("ray"),
        # A process or a machine is lost: all start again, and go on after the last checkpoint.
        failure_config=FailureConfig(max_failures=3),
    ),
).fit()
print(f"trained by {processes} processes; Ray's files are in {Path(result.path).parent}")

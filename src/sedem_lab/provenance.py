"""The machine, package versions and commit that are recorded with every result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("sedem", "torch", "transformers", "peft", "accelerate")


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """Facts about this process, as values for JSON.

    Args:
        device: where the work runs; None means a GPU if there is one.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "machine": {
            "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any] | None:
    """The commit of the source tree that this code runs from; None for an installed package."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Fails if this file is not in a repository of sedem.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None

"""One set of weights in two forms of attention: the paper's, and guided over independent blocks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from sedem.checkpoint.folder import ADAPTER, EXTRA_ENTRIES, WEIGHTS_FILE, unfinished
from sedem.config import SedemConfig
from sedem.guidance.bias import Guidance

PAPER_FORM = "joint"
FORMS = {
    PAPER_FORM: {"block_context": "joint", "guidance": False},
    "guided": {"block_context": "independent", "guidance": True},
}
"""Settings of a checkpoint that can be changed without training, by form."""
TAU = "guidance.log_tau"


def with_settings(checkpoint: Path, settings: Mapping[str, Any], folder: Path) -> Path:
    """Write a checkpoint with other settings and the same weights.

    Args:
        checkpoint: the checkpoint.
        settings: the settings to change, such as an entry of `FORMS`. None of them changes a shape.
            Guidance uses the checkpoint's tau, or the initial one.
        folder: where to write it; an existing one is replaced.
    """
    config = SedemConfig.load(checkpoint, extra=EXTRA_ENTRIES)
    if (checkpoint / config.encoder).is_dir():
        config = config.with_changes(encoder=str((checkpoint / config.encoder).resolve()))
    config = config.with_changes(**settings)
    weights = load_file(checkpoint / WEIGHTS_FILE)
    if config.guidance:
        weights.setdefault(TAU, Guidance().log_tau.detach())
    else:
        weights.pop(TAU, None)
    with unfinished(folder) as place:
        config.save(place)
        save_file(weights, place / WEIGHTS_FILE)
        if (checkpoint / ADAPTER).is_dir():
            shutil.copytree(checkpoint / ADAPTER, place / ADAPTER)
    return folder


def with_new_selector(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint with an untrained selector, which is the same every time.

    Args:
        checkpoint: the checkpoint.
        folder: where to write it.
    """
    import torch

    from sedem import SeDeM
    from sedem.method.selector import build_selector

    model = SeDeM.from_pretrained(checkpoint, device="cpu", engine="eager")
    torch.manual_seed(0)
    model.selector = build_selector(model.config, model.encoder.width, model.decoder.width)
    model.save_pretrained(folder)
    return folder

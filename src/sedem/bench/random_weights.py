"""Checkpoints with random weights in a public shape: correct times, meaningless answers.

They are written to a folder and opened like any checkpoint, so the measured code is the same. The
tokenizer is sedem-nano's, since that of a gated model cannot be shipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from sedem.backbone.loading import empty_model
from sedem.checkpoint.folder import locate, open_backbones
from sedem.checkpoint.portable import BACKBONE
from sedem.config import DEFAULT_MODEL, SedemConfig
from sedem.evaluation.cost import PRESETS, shape_file
from sedem.model import SeDeM

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SEED = 0


def write_random_checkpoint(
    shape: str, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> Path:
    """Write a checkpoint whose weights are all random.

    Args:
        shape: a name in `PRESETS`.
        folder: an empty folder; backbones and checkpoint are written there.
        dtype: data type of the backbones.
        device: device that draws the weights.

    Returns:
        The checkpoint's folder.
    """
    make, encoder, decoder = PRESETS[shape]
    torch.manual_seed(SEED)
    for name in {encoder, decoder}:
        _write_backbone(name, folder / name, dtype, device)
    config = make(
        encoder=str(folder / encoder),
        decoder=None if decoder == encoder else str(folder / decoder),
    )
    return _write_sedem(config, folder / "checkpoint", dtype, device)


def _write_backbone(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    # A CPU takes minutes to draw billions of random numbers.
    with device:
        model = empty_model(shape_file(name), dtype=dtype)
    model.save_pretrained(folder)
    for file in TOKENIZER:
        shutil.copy(locate(DEFAULT_MODEL) / BACKBONE / file, folder / file)


def _write_sedem(
    config: SedemConfig, folder: Path, dtype: torch.dtype, device: torch.device
) -> Path:
    encoder, decoder = open_backbones(config, dtype=dtype, device=device)
    model = SeDeM(config, encoder, decoder)
    if config.lora_rank:
        decoder.add_lora(config.lora_rank, config.lora_alpha)
    model.save_pretrained(folder)
    return folder

"""Checkpoints on random weights in a public shape: right for times, their answers are noise.

They are written to a folder and opened like any other, so that nothing that is measured knows of
them. Text is cut by sedem-nano's tokenizer, since that of a gated model cannot be shipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from sedem.backbone.loading import empty_model
from sedem.config import DEFAULT_MODEL, SedemConfig
from sedem.evaluation.cost import PRESETS, shape_file
from sedem.inference.checkpoint import BACKBONE, locate, open_backbones
from sedem.model import SeDeM

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SEED = 0


def write_random_checkpoint(
    shape: str, folder: Path, *, dtype: torch.dtype, device: torch.device
) -> Path:
    """Write a checkpoint with every weight random.

    Args:
        shape: a name in `PRESETS`.
        folder: an empty one; holds backbones and checkpoint afterwards.
        dtype: of the backbones.
        device: where the weights are drawn.

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
    # Drawn where they will run: drawing billions of numbers on a CPU takes minutes.
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

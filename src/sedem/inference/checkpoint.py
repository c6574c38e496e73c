"""A checkpoint on disk: config.json, sedem.safetensors, adapter/ and, if small, backbone/."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.backbone.safetensors import check_weights, dequantize_int8, load_weights, quantize_int8
from sedem.config import CONFIG_FILE, SedemConfig
from sedem.errors import CheckpointError

WEIGHTS_FILE = "sedem.safetensors"
ADAPTER = "adapter"
BACKBONE = "backbone"
EXTRA_ENTRIES = frozenset({"sedem_version", "transformers_version"})


def locate(name: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a folder here, one that sedem brings, or a hub's snapshot.

    Raises:
        CheckpointError: it is none of them.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if (own := embedded(name)) is not None:
        return own
    if folder.exists():
        raise CheckpointError(f"'{name}' is a file; a checkpoint is a folder with {CONFIG_FILE}")
    # A name on the hub has one slash at most, and no dot in front.
    if name.startswith(("/", ".", "~")) or len(folder.parts) > 2:
        raise CheckpointError(
            f"checkpoint '{name}' is no folder here; 'sedem train' leaves one in 'final' of its "
            "run.output when it is through"
        )
    try:
        return Path(snapshot_download(name, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{name}' is neither a folder here nor to be had from the hub: {reason}"
        ) from None


def embedded(name: str) -> Path | None:
    """The folder of a checkpoint that sedem brings, or one inside it; None if it is no such name.

    Args:
        name: such as "sedem-nano", "icae-nano" or "sedem-nano/backbone".
    """
    package = Path(__file__).parents[1]
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        return None
    # Beside the package in an installed wheel, at the root of a source tree.
    for place in (package / "checkpoints", package.parents[1] / "checkpoints"):
        with suppress(OSError):  # a name that is too long for a file
            if (place / name).is_dir():
                return place / name
    return None


def open_backbones(
    config: SedemConfig,
    folder: Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
) -> tuple[Backbone, Backbone]:
    """Open encoder and decoder; in the same-backbone setting they are one object.

    Args:
        config: names them.
        folder: the checkpoint; a backbone named like a folder inside it is that folder.
        dtype: type of weights and hidden states.
        device: where to put them.
        attention: "sdpa" or "eager".
    """

    options: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention}
    encoder = open_named(config.encoder, config.encoder_revision, folder, **options)
    if not config.cross_model:
        return encoder, encoder
    assert config.decoder is not None
    return encoder, open_named(config.decoder, config.decoder_revision, folder, **options)


def open_named(name: str, revision: str | None, folder: Path | None, **options: Any) -> Backbone:
    """Open a backbone that a checkpoint names.

    Args:
        name: a folder inside the checkpoint, any other folder, one inside a checkpoint that
            sedem brings, or a hub id.
        revision: hub revision.
        folder: the checkpoint, None if there is none.
        options: passed on to `open_backbone`.
    """
    place: Path | str = name
    if folder is not None and (folder / name).is_dir():
        place = folder / name
    elif not Path(name).is_dir():
        place = embedded(name) or name
    return open_backbone(str(place), revision=revision, **options)


def read_weights(folder: Path, parts: nn.Module) -> None:
    """Fill the trained parts from a checkpoint.

    Raises:
        CheckpointError: weights are missing, extra or of another shape.
    """
    path = folder / WEIGHTS_FILE
    weights = dequantize_int8(load_weights(path), torch.float32, str(path))
    check_weights(parts.state_dict(), weights, str(path))
    parts.load_state_dict(weights)


def write(
    folder: Path,
    config: SedemConfig,
    parts: nn.Module,
    decoder: Backbone,
    *,
    backbone: Path | None = None,
    int8: bool = False,
) -> None:
    """Write a checkpoint; a new one appears whole or not at all.

    In a folder that is there only the checkpoint's own files are replaced, config.json last.

    Args:
        folder: where to.
        config: the model's.
        parts: the trained parts.
        decoder: its adapters are written if it has any.
        backbone: folder of the backbone if it is to travel with the checkpoint.
        int8: matrices as int8 rows with a scale a row, and adapters as bfloat16.
    """
    with unfinished(folder) as place:
        if backbone is not None:
            shutil.copytree(backbone, place / BACKBONE)
            config = config.with_changes(encoder=BACKBONE)
        config = config.with_changes(lora_rank=config.lora_rank if decoder.has_lora else 0)
        config.save(
            place, sedem_version=version("sedem"), transformers_version=version("transformers")
        )
        write_weights(place, parts, int8=int8)
        if decoder.has_lora:
            base = config.decoder or config.encoder
            decoder.save_lora(place / ADAPTER, base, torch.bfloat16 if int8 else torch.float32)


def write_weights(folder: Path, parts: nn.Module, *, int8: bool = False) -> None:
    """Write the trained parts; matrices as int8 rows with a scale a row if asked for."""
    weights: dict[str, Tensor] = {n: t.contiguous() for n, t in parts.state_dict().items()}
    save_file(quantize_int8(weights) if int8 else weights, folder / WEIGHTS_FILE)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A place to write a checkpoint in, which then becomes `folder`, whole or not at all.

    In a folder that is there only the entries that were written are replaced, config.json last.
    """
    place = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    if not folder.exists():
        place.rename(folder)
        return
    for entry in sorted(place.iterdir(), key=lambda entry: entry.name == CONFIG_FILE):
        if (folder / entry.name).is_dir():
            shutil.rmtree(folder / entry.name)
        entry.replace(folder / entry.name)
    place.rmdir()

"""A checkpoint on disk: config.json, sedem.safetensors, adapter/ and sometimes backbone/.

Its manifest.json has sizes and hashes of these. Other files, such as README.md, are the user's.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.backbone.gguf import ENDING, gguf_file, is_gguf
from sedem.backbone.loading import open_backbone
from sedem.backbone.safetensors import (
    check_weights,
    dequantize_int8,
    load_weights,
    quantize_int8,
    save_tensors,
)
from sedem.bank.parts import Place, store_at
from sedem.checkpoint.manifest import MANIFEST, check_manifest, write_manifest
from sedem.checkpoint.portable import BACKBONE, portable, shipped_folders
from sedem.config import CONFIG_FILE, DEFAULT_MODEL, SedemConfig
from sedem.durable_files import link_missing, replaced_folder, whole_folder
from sedem.errors import BankError, CheckpointError
from sedem.untrusted import check_folder, read_json

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "sedem.safetensors"
ADAPTER = "adapter"
OWN = (CONFIG_FILE, WEIGHTS_FILE, ADAPTER)
"""What a checkpoint holds besides a backbone."""
EXTRA_ENTRIES = frozenset({"sedem_version", "transformers_version"})


def locate(name: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local one, one shipped with sedem, or a hub snapshot.

    Args:
        name: a path, the name of a shipped checkpoint, or a hub id.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if (aside := whole_folder(folder)) != folder:
        logger.warning("saving over '%s' was cut off; the previous checkpoint is opened", name)
        return aside
    if (shipped := embedded(name)) is not None:
        return shipped
    if folder.exists():
        raise CheckpointError(f"'{name}' is a file; a checkpoint is a folder with {CONFIG_FILE}")
    # A hub id has at most one slash and does not start with a dot.
    if name.startswith(("/", ".", "~")) or len(folder.parts) > 2:
        raise CheckpointError(
            f"checkpoint '{name}' is not a local folder; a finished 'sedem train' leaves one in "
            "'final' of its run.output"
        )
    # Imported here: it brings an HTTP client, which a folder on this machine does not need.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision))
    except (OSError, ValueError) as error:  # all errors of huggingface_hub are one of these
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{name}' is neither a local folder nor available from the hub: {reason}"
        ) from None


def entries_of(folder: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint of any method.

    Raises:
        CheckpointError: there is none, or it is not a JSON object.
    """
    try:
        entries = read_json(folder / CONFIG_FILE, CheckpointError)
    except FileNotFoundError:
        entries = None
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"'{folder}' has no readable {CONFIG_FILE}; give a checkpoint, such as the folder "
            "'final' of a finished 'sedem train'"
        )
    return entries


def versions() -> dict[str, str]:
    """The versions that a config.json tells."""
    return {f"{name}_version": version(name) for name in ("sedem", "transformers")}


def seal(folder: Path) -> list[str]:
    """Write the manifest of a checkpoint for its files as they are.

    Returns:
        Names of what is in the folder, but is no part of a checkpoint.

    Raises:
        CheckpointError: the folder is not a checkpoint, or a file must not be read.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"'{folder}' is not a checkpoint; it has no {name}")
    check_folder(folder, CheckpointError)
    return write_manifest(folder, (*OWN, BACKBONE))


def check(folder: Path, *used: str) -> None:
    """Refuse a checkpoint with a file that is missing, damaged or from another checkpoint.

    Args:
        used: parts whose content is checked; for all others, only presence and sizes are.

    Raises:
        CheckpointError: a file does not match the manifest, or must not be read; the message names
            it.
    """
    check_folder(folder, CheckpointError)
    # For any other folder, reading its config.json reports what is wrong.
    if any((folder / name).is_file() for name in (WEIGHTS_FILE, MANIFEST)):
        check_manifest(folder, (*OWN, BACKBONE), used)


@contextmanager
def opening(folder: Path) -> Iterator[None]:
    """Read a checkpoint inside the `with` block, from the files that its manifest describes.

    Its backbone is checked by `open_named`, not here.

    Raises:
        CheckpointError: the files do not match the manifest, or were replaced meanwhile.
    """
    before = _state(folder)
    try:
        check(folder, *OWN)
        yield
    finally:
        if _state(folder) != before:
            raise CheckpointError(
                f"'{folder}' was changed while it was opened; open it again"
            ) from None


def _state(folder: Path) -> list[tuple[str, int, int, int]]:
    """State of the files of a checkpoint; it changes if one is replaced or written to."""
    files = (path for part in OWN for path in [folder / part, *sorted((folder / part).glob("*"))])
    told = ((str(path), path.stat()) for path in files if path.is_file())
    return [(name, at.st_ino, at.st_size, at.st_mtime_ns) for name, at in told]


def embedded(name: str) -> Path | None:
    """Return a shipped folder, such as "sedem-nano" or "sedem-nano/backbone"; None if missing."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        return None
    for place in shipped_folders("checkpoints"):
        with suppress(OSError):  # the name may be too long for a file
            if (place / name).is_dir():
                return place / name
    return None


def model_of(bank: Place) -> str:
    """Return the model that made a bank, or the default model for a new bank.

    A bank may come from anybody, so the model that it names is opened only if it ships with sedem.

    Raises:
        BankError: the bank names another model.
    """
    store = store_at(bank)
    if not store.exists():
        return DEFAULT_MODEL
    claimed = str(store.meta().made_by.get("model") or DEFAULT_MODEL)
    # The path, because a folder of the same name in the working directory would be opened instead.
    if (shipped := embedded(claimed)) is not None:
        return str(shipped)
    raise BankError(
        f"bank '{bank}' says that it was built by model '{claimed}'; sedem opens the model that a "
        f"bank names only if it ships with sedem; give -m {shlex.quote(claimed)} if you trust it"
    )


def is_checkpoint(name: str) -> bool:
    """Return whether a folder, a shipped name or a hub id has a trained model, not a backbone.

    False if it cannot be read; opening it as a backbone then reports what is wrong.
    """
    if is_gguf(name):
        return False
    place = Path(name) if Path(name).is_dir() else embedded(name)
    try:
        if place is None:
            from huggingface_hub import hf_hub_download

            place = Path(hf_hub_download(name, CONFIG_FILE)).parent
        return bool({"extract_layers", "method"} & entries_of(place).keys())
    except (OSError, ValueError, CheckpointError):
        return False


def open_backbones(
    config: SedemConfig, folder: Path | None = None, **options: Any
) -> tuple[Backbone, Backbone]:
    """Open encoder and decoder, which are one object in the same-backbone setting.

    Args:
        folder: folder of the checkpoint, where a backbone's folder may be; None if there is none.
        options: arguments of `open_backbone`.
    """
    encoder = open_named(config.encoder, config.encoder_revision, folder, **options)
    if not config.cross_model:
        return encoder, encoder
    assert config.decoder is not None
    return encoder, open_named(config.decoder, config.decoder_revision, folder, **options)


def open_named(name: str, revision: str | None, folder: Path | None, **options: Any) -> Backbone:
    """Open a backbone that a checkpoint names.

    Args:
        name: a folder inside the checkpoint, any other folder or GGUF file, one inside a checkpoint
            that ships with sedem, or a hub id; they are tried in this order.
        folder: folder of the checkpoint; None if there is none.
        options: arguments of `open_backbone`.

    Raises:
        CheckpointError: the checkpoint names a folder that this machine does not have.
    """
    place: Path | str = name
    if folder is not None and (folder / name).is_dir():
        place = folder / name
    elif folder is not None and Path(name).is_absolute() and not Path(name).exists():
        raise CheckpointError(
            f"checkpoint '{folder}' needs the backbone in '{name}', which is not on this machine; "
            f"name a folder with those weights in its {CONFIG_FILE} and run 'sedem "
            "seal', or save it where the backbone is: save_pretrained(folder, with_backbone=True)"
        )
    elif not Path(name).exists():
        place = embedded(name) or name
    parent = Path(place).parent
    # Any folder may have this name, next to a manifest of something else.
    if Path(place).name == BACKBONE and all(
        (parent / file).is_file() for file in (WEIGHTS_FILE, MANIFEST)
    ):
        check(parent, BACKBONE)
    return open_backbone(str(place), revision=revision, **options)


def local_backbone(name: str) -> Path | None:
    """The folder or GGUF file of a backbone on this machine; None for a hub id."""
    if Path(name).is_dir():
        return Path(name)
    return embedded(name) or (gguf_file(name) if is_gguf(name) else None)


def copy_backbone(backbone: Path, folder: Path) -> None:
    """Copy a backbone's folder, or put its GGUF file into a new folder."""
    if backbone.is_dir():
        shutil.copytree(backbone, folder)
        return
    folder.mkdir()
    shutil.copy(backbone, folder / f"{backbone.stem}{ENDING}")


def read_weights(folder: Path, parts: nn.Module) -> None:
    """Load the weights of the trained parts.

    Raises:
        CheckpointError: weights are missing, unknown or of another shape.
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
    """Write a checkpoint; see `unfinished` for how its folder appears.

    Args:
        config: the configuration of the model.
        decoder: the decoder, whose adapters are written if it has any.
        backbone: folder or GGUF file of a backbone to copy into the checkpoint; None copies none.
        int8: store matrices as int8 rows with one scale each.
    """
    config = portable(config)
    with unfinished(folder) as place:
        if backbone is not None:
            copy_backbone(backbone, place / BACKBONE)
            config = config.with_changes(encoder=BACKBONE, decoder=None)
        config = config.with_changes(lora_rank=config.lora_rank if decoder.has_lora else 0)
        config.save(place, **versions())
        write_weights(place, parts, int8=int8)
        if decoder.has_lora:
            base = config.decoder or config.encoder
            decoder.save_lora(place / ADAPTER, base, int8=int8)


def write_weights(folder: Path, parts: nn.Module, *, int8: bool = False) -> None:
    """Write the weights of the trained parts; with `int8`, matrices as int8 rows with scales."""
    weights: dict[str, Tensor] = {n: t.contiguous() for n, t in parts.state_dict().items()}
    save_tensors(quantize_int8(weights) if int8 else weights, folder / WEIGHTS_FILE)


def copy_with_parts(
    source: Path, folder: Path, parts: Mapping[str, nn.Module], **settings: Any
) -> None:
    """Write a copy of a checkpoint with some parts added or replaced.

    All other weights keep their bytes, so banks of the model stay valid. Matrices become int8 rows
    if those of the source are. A damaged source is refused, because the copy's manifest would
    otherwise describe the damage.

    Args:
        folder: folder of the copy; the same one changes the checkpoint itself.
        parts: the parts by their names in sedem.safetensors.
        settings: settings of the configuration to change.
    """
    check(source, *OWN, BACKBONE)
    config = portable(SedemConfig.load(source, extra=EXTRA_ENTRIES)).with_changes(**settings)
    weights = load_weights(source / WEIGHTS_FILE)
    kept = {key: tensor for key, tensor in weights.items() if key.split(".")[0] not in parts}
    added = {
        f"{name}.{key}": tensor.cpu().contiguous()
        for name, part in parts.items()
        for key, tensor in part.state_dict().items()
    }
    if any(tensor.dtype == torch.int8 for tensor in kept.values()):
        added = quantize_int8(added)
    with unfinished(folder) as place:
        shutil.copytree(source, place, dirs_exist_ok=True)
        config.save(place, **versions())
        save_tensors({**kept, **added}, place / WEIGHTS_FILE)


@contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Write a checkpoint in a hidden folder, which becomes `folder` when the block ends.

    It replaces an existing one in one step, with its manifest. Files of the existing folder that
    were not written, such as README.md, are kept.

    Yields:
        The hidden folder.
    """
    with replaced_folder(folder) as place:
        yield place
        if folder.is_dir():
            link_missing(folder, place)
        seal(place)

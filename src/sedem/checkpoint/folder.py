"""A checkpoint on disk: config.json, sedem.safetensors, adapter/ and sometimes backbone/.

Its manifest.json has sizes and hashes of these. Other files, such as README.md, are the user's.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.bank.file import Place
from sedem.bank.memory_bank import store_at
from sedem.config import CONFIG_FILE, DEFAULT_MODEL, GGUF, SedemConfig, is_gguf
from sedem.durable_files import link_missing, replaced_folder, sha256, whole_folder, write_text
from sedem.errors import BankError, CheckpointError
from sedem.tensors import (
    check_weights,
    dequantize_int8,
    load_weights,
    quantize_int8,
    save_tensors,
)
from sedem.untrusted import check_folder, read_json

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "sedem.safetensors"
ADAPTER = "adapter"
BACKBONE = "backbone"
"""The folder of a backbone inside a checkpoint."""
MANIFEST = "manifest.json"
OWN = (CONFIG_FILE, WEIGHTS_FILE, ADAPTER)
"""What a checkpoint holds besides a backbone."""
EXTRA_ENTRIES = frozenset({"sedem_version", "transformers_version"})

Files = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of files, by their path in a folder."""


def locate(name: str, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: a local one, one shipped with sedem, or a hub snapshot.

    Args:
        name: a path, the name of a shipped checkpoint, or a hub id.
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
    found = survey(folder, list(_own_files(folder)))
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in found.items()}
    write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")
    inside = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    names = [path.relative_to(folder).as_posix() for path in inside]
    return [name for name in names if name not in files and name != MANIFEST]


def check(folder: Path, *used: str) -> None:
    """Refuse a checkpoint with a file that is missing, damaged or from another checkpoint.

    A checkpoint without a manifest passes with a warning.

    Args:
        used: parts whose content is checked; for all others, only presence and sizes are.

    Raises:
        CheckpointError: a file does not match the manifest, or must not be read; the message names
            it.
    """
    check_folder(folder, CheckpointError)
    # For any other folder, reading its config.json reports what is wrong.
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, MANIFEST)):
        return
    renew = f"'sedem seal {shlex.quote(str(folder))}'"
    try:
        entries = read_json(folder / MANIFEST, CheckpointError)["files"]
        files = {name: (int(one["bytes"]), str(one["sha256"])) for name, one in entries.items()}
    except FileNotFoundError:
        logger.warning(
            "checkpoint '%s' has no %s, so damage would not be noticed; %s adds one",
            folder,
            MANIFEST,
            renew,
        )
        return
    except (CheckpointError, AttributeError, KeyError, OverflowError, TypeError, ValueError):
        damage: str | None = f"'{folder / MANIFEST}' is damaged"
    else:
        strangers = [name for name in _own_files(folder) if name not in files]
        if strangers:
            damage = f"'{folder / strangers[0]}' does not belong to its checkpoint"
        else:
            chosen = [name for name in files if {name, name.partition("/")[0]} & {*used}]
            damage = first_damage(folder, files, chosen)
    if damage is not None:
        raise CheckpointError(
            f"{damage}; fetch the checkpoint again, or accept its files as they are with {renew}"
        )


def _own_files(folder: Path) -> Iterator[str]:
    """Files of a checkpoint; hidden ones, which operating systems create, are ignored."""
    for part in (folder / name for name in (*OWN, BACKBONE)):
        for path in [part] if part.is_file() else sorted(part.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not any(step.startswith(".") for step in name.parts):
                yield name.as_posix()


def survey(folder: Path, names: Collection[str]) -> Files:
    """Size and SHA-256 of files of a folder, by name."""
    hashes = _hashes(folder, names)
    return {name: ((folder / name).stat().st_size, hashes[name]) for name in names}


def first_damage(folder: Path, files: Files, read: Collection[str] | None = None) -> str | None:
    """What is wrong with the first damaged file of a folder; None if nothing is.

    The content of `read` is compared, None means of all; of others only presence and size are.
    """
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"'{path}' is missing"
        if (found := path.stat().st_size) != size:
            return f"'{path}' is damaged (it has {found:,} bytes, {size:,} were written)"
    for name, digest in _hashes(folder, files if read is None else read).items():
        if digest != files[name][1]:
            return f"'{folder / name}' is damaged (its content is not what was written)"
    return None


def _hashes(folder: Path, names: Collection[str]) -> dict[str, str]:
    """SHA-256 by name; several files are hashed at once."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(sha256, [folder / name for name in names])
        return dict(zip(names, found, strict=True))


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


def shipped_folders(kind: str) -> list[Path]:
    """Folders of "checkpoints" or "recipes" that ship with sedem, in its wheel or source tree."""
    package = Path(__file__).parents[1]
    places = (package / kind, package.parents[1] / kind)
    return [place for place in places if place.is_dir()]


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


def portable_name(name: str) -> str:
    """The name of a backbone as a checkpoint stores it, the same from any working folder.

    Returns:
        The name of a shipped backbone, such as "sedem-nano/backbone", the absolute path of any
        other folder or file, and a hub id as it is.
    """
    if not Path(name).exists():
        return name
    folder = Path(name).resolve()
    for place in shipped_folders("checkpoints"):
        if folder.is_relative_to(place):
            return folder.relative_to(place).as_posix()
    return str(folder)


def portable(config: SedemConfig) -> SedemConfig:
    """A configuration whose backbones have portable names.

    The backbone inside a checkpoint keeps its name, which is relative to that checkpoint.
    """
    if config.encoder == BACKBONE and not config.cross_model:
        return config
    decoder = config.decoder and portable_name(config.decoder)
    return config.with_changes(encoder=portable_name(config.encoder), decoder=decoder)


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
    if (shipped := embedded(name)) is not None or not is_gguf(name):
        return shipped
    from sedem.backbone.gguf import gguf_file

    return gguf_file(name)


def copy_backbone(backbone: Path, folder: Path) -> None:
    """Copy a backbone's folder, or put its GGUF file into a new folder."""
    if backbone.is_dir():
        shutil.copytree(backbone, folder)
        return
    folder.mkdir()
    shutil.copy(backbone, folder / f"{backbone.stem}{GGUF}")


def read_weights(folder: Path, parts: nn.Module) -> None:
    """Load the weights of the trained parts."""
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

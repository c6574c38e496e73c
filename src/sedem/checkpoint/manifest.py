"""The manifest of a checkpoint: sizes and hashes of its files, which are checked before use."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sedem.durable_files import sha256, write_text
from sedem.errors import CheckpointError
from sedem.untrusted import read_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

Files = Mapping[str, tuple[int, str]]
"""Size and SHA-256 of files, by their path in a folder."""


def write_manifest(folder: Path, parts: Collection[str]) -> list[str]:
    """Record sizes and hashes of a checkpoint's files; it need not have all of these parts.

    Returns:
        What else is in the folder, by name.
    """
    found = survey(folder, list(_names(folder, parts)))
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in found.items()}
    write_text(folder / MANIFEST, json.dumps({"files": files}, indent=1) + "\n")
    inside = (path for path in sorted(folder.rglob("*")) if not path.is_dir())
    names = [path.relative_to(folder).as_posix() for path in inside]
    return [name for name in names if name not in files and name != MANIFEST]


def check_manifest(folder: Path, parts: Collection[str], used: Collection[str]) -> None:
    """Refuse a checkpoint whose files differ from those that were written.

    Presence and size of all files are checked, and the content of those that will be used. A
    checkpoint without a manifest passes with a warning.

    Args:
        parts: names of the files and folders that belong to it.
        used: those whose content is checked.

    Raises:
        CheckpointError: a file is damaged, missing or from another checkpoint.
    """
    renew = f"'sedem seal {shlex.quote(str(folder))}'"
    try:
        files = _read(folder / MANIFEST)
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
        strangers = [name for name in _names(folder, parts) if name not in files]
        if strangers:
            damage = f"'{folder / strangers[0]}' does not belong to its checkpoint"
        else:
            chosen = [name for name in files if _is_part(name, used)]
            damage = first_damage(folder, files, chosen)
    if damage is not None:
        raise CheckpointError(
            f"{damage}; fetch the checkpoint again, or accept its files as they are with {renew}"
        )


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


def _read(path: Path) -> Files:
    entries = read_json(path, CheckpointError)["files"]
    return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()}


def _names(folder: Path, parts: Collection[str]) -> Iterator[str]:
    """Files of a checkpoint; hidden ones, which operating systems create, are ignored."""
    for part in (folder / name for name in parts):
        for path in [part] if part.is_file() else sorted(part.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not any(step.startswith(".") for step in name.parts):
                yield name.as_posix()


def _is_part(name: str, parts: Collection[str]) -> bool:
    return name in parts or name.partition("/")[0] in parts


def _hashes(folder: Path, names: Collection[str]) -> dict[str, str]:
    """SHA-256 by name; several files are hashed at once."""
    with ThreadPoolExecutor() as threads:
        found = threads.map(sha256, [folder / name for name in names])
        return dict(zip(names, found, strict=True))

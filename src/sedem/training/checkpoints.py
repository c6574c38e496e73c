"""Checkpoints of a run on disk; a sealed one has a manifest, written last, and is complete."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from sedem.durable_files import sha256, write_text

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE.json"


def seal(folder: Path) -> None:
    """Mark a checkpoint as complete: write a manifest of its files' sizes and hashes."""
    manifest = {
        str(file.relative_to(folder)): [file.stat().st_size, sha256(file)]
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != COMPLETE
    }
    write_text(folder / COMPLETE, json.dumps(manifest, indent=1))


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was sealed, and every file still has the recorded size and hash."""
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return all(
        (folder / name).is_file()
        and (folder / name).stat().st_size == size
        and sha256(folder / name) == digest
        for name, (size, digest) in manifest.items()
    )


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, complete or not, newest first."""
    found = run.glob("checkpoint-*")
    return sorted(found, key=lambda folder: int(folder.name.split("-")[1]), reverse=True)


def last_complete_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; newer, incomplete ones are removed."""
    for folder in checkpoints(run):
        if is_complete(folder):
            return folder
        logger.warning("checkpoint '%s' is incomplete and is skipped", folder)
        # The resumed run will write a checkpoint of the same name.
        shutil.rmtree(folder)
    return None

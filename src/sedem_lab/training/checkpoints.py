"""Checkpoints of a run on disk; a complete one is sealed by a manifest, written last."""

from __future__ import annotations

import json
import logging
import shutil
from itertools import chain, count
from pathlib import Path

from sedem.checkpoint.folder import first_damage, survey
from sedem.durable_files import sync_folder, sync_tree, write_text

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE.json"


def seal(folder: Path) -> None:
    """Mark a checkpoint as complete: write a manifest of its files' sizes and hashes.

    All of it survives a power cut once this returns, so older checkpoints may be removed.
    """
    names = [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != COMPLETE
    ]
    sync_tree(folder)
    write_text(folder / COMPLETE, json.dumps(survey(folder, names), indent=1))
    sync_folder(folder.parent)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is sealed and every file still has the recorded size and hash."""
    try:
        manifest = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))
        files = {name: (size, digest) for name, (size, digest) in manifest.items()}
        return first_damage(folder, files) is None
    except (FileNotFoundError, AttributeError, TypeError, ValueError):
        return False


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, complete or not, newest first."""
    found = run.glob("checkpoint-*")
    return sorted(found, key=lambda folder: int(folder.name.split("-")[1]), reverse=True)


def last_complete_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run.

    The resumed run will write newer ones again. Therefore, newer ones that were never sealed are
    removed, and damaged ones are set aside.
    """
    for folder in checkpoints(run):
        if is_complete(folder):
            return folder
        if not (folder / COMPLETE).is_file():
            logger.warning("checkpoint '%s' is incomplete and is skipped", folder)
            shutil.rmtree(folder)
            continue
        # A damaged one may be all that is left of its training.
        name = f"damaged-{folder.name}"
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        place = next(place for name in names if not (place := folder.with_name(name)).exists())
        folder.rename(place)
        logger.warning("checkpoint '%s' is damaged; it is kept as '%s' and not used", folder, place)
    return None


def remove(folder: Path) -> None:
    """Remove a checkpoint; a partly removed one does not count as damaged."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)

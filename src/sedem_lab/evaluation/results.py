"""A folder of results: its settings, and the process that made each part.

A killed run is resumed when its command is given again, perhaps after a commit or on another
machine. So each process signs the parts that it makes, and the final document names every process.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from sedem import untrusted
from sedem.durable_files import write_text
from sedem.errors import ConfigError, DataError
from sedem_lab.provenance import provenance

SETTINGS = "settings.json"
SIGNATURES = "provenance.json"
SIGNED = ("machine", "versions", "commit")
EARLIER = "earlier"

_ENTRIES: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_SIGNATURES: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, dict[str, Any] | None])


def claim(out: Path, settings: dict[str, Any]) -> None:
    """Create a folder for the results of some settings.

    Raises:
        ConfigError: the folder has results of other settings, or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{out}' cannot be a folder for results ({error.strerror})") from None
    path = out / SETTINGS
    if path.is_file():
        try:
            same = untrusted.read_json(path, DataError) == settings
        except DataError:
            same = False
        if not same:
            raise ConfigError(
                f"'{out}' holds results of other settings (see '{path}'); give another --out"
            )
    else:
        write_json(path, settings)


def write_json(path: Path, entries: dict[str, Any]) -> None:
    """Write a JSON file that appears only when it is complete."""
    write_text(path, json.dumps(entries, indent=1) + "\n")


class Signatures:
    """The provenance of each part of a folder's results, in the order in which they were made.

    Args:
        folder: the claimed folder of the results.
        kept: names of the parts that exist. Folders of early versions have no signatures; their
            parts are attributed to the process that the document names.
        document: name of the file that is built from the parts; it may be missing.
        device: device of this process; None means a GPU if there is one.

    Raises:
        ConfigError: the signatures or the document are damaged.
    """

    def __init__(
        self, folder: Path, kept: Iterable[str], document: str, device: torch.device | None = None
    ) -> None:
        self.path = folder / SIGNATURES
        self.device = device
        self.made: dict[str, dict[str, Any] | None] = _read(self.path, _SIGNATURES) or {}
        if unsigned := [part for part in kept if part not in self.made]:
            signed = read_json(folder / document) or {}
            known = {name: signed[name] for name in SIGNED if name in signed} or None
            self.made = {**dict.fromkeys(unsigned, known), **self.made}
            # Written now, because this process will overwrite the document.
            write_json(self.path, self.made)

    def sign(self, part: str) -> None:
        """Record that this process makes a part, and the unsigned parts that follow it."""
        self.made.pop(part, None)
        self.made[part] = provenance(self.device)
        write_json(self.path, self.made)

    def of(self, parts: Container[str]) -> dict[str, Any]:
        """The provenance of a document that is built from some parts.

        Returns:
            The provenance of the process that made the last part. `earlier` has that of the other
            processes, each once, or None for an unknown process. If no process is known, the
            provenance is that of this one.
        """
        signatures = [signature for part, signature in self.made.items() if part in parts]
        last = next(filter(None, reversed(signatures)), None) or provenance(self.device)
        others: list[dict[str, Any] | None] = []
        for signature in signatures:
            if signature != last and signature not in others:
                others.append(signature)
        return {**last, EARLIER: others} if others else last


def read_json(path: Path) -> dict[str, Any] | None:
    """Read what `write_json` wrote; None if there is no file.

    Raises:
        ConfigError: the file is damaged.
    """
    return _read(path, _ENTRIES)


def _read(path: Path, kind: TypeAdapter[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return kind.validate_python(untrusted.read_json(path, DataError))
    except FileNotFoundError:
        return None
    except (DataError, ValueError):
        raise ConfigError(
            f"'{path}', which says what each process made, is damaged; remove it and run the "
            "command again: its results are kept, from an unknown machine"
        ) from None

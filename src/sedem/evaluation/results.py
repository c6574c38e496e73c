"""A folder of results: of which settings they are, and which process made which part of them.

A run that was killed goes on when its command is given again, after a commit or on another machine.
So each process signs the parts that it makes, and a document of all of them names everyone.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch

from sedem.durable_files import write_text
from sedem.errors import ConfigError
from sedem.provenance import provenance

SETTINGS = "settings.json"
SIGNATURES = "provenance.json"
SIGNED = ("machine", "versions", "commit")
EARLIER = "earlier"


def claim(out: Path, settings: dict[str, Any]) -> None:
    """Make a folder for the results of some settings.

    Raises:
        ConfigError: it holds results of others, or cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'{out}' cannot be a folder for results ({error.strerror})") from None
    path = out / SETTINGS
    if path.is_file():
        try:
            same = json.loads(path.read_text(encoding="utf-8")) == settings
        except ValueError:
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
    """What made each part of a folder's results, in the order in which they were made.

    Args:
        folder: of the results, claimed.
        kept: parts that are there. Nobody signs those of a folder that is older than signatures;
            they are taken to be of whom the document names.
        document: file that is made of the parts; it need not be there.
        device: that this process runs on; None means a GPU if there is one.

    Raises:
        ConfigError: signatures or document are damaged.
    """

    def __init__(
        self, folder: Path, kept: Iterable[str], document: str, device: torch.device | None = None
    ) -> None:
        self.path = folder / SIGNATURES
        self.device = device
        self.made: dict[str, dict[str, Any] | None] = read_json(self.path) or {}
        if unsigned := [part for part in kept if part not in self.made]:
            signed = read_json(folder / document) or {}
            known = {name: signed[name] for name in SIGNED if name in signed} or None
            self.made = {**dict.fromkeys(unsigned, known), **self.made}
            # Written at once: the document will be of others too.
            write_json(self.path, self.made)

    def sign(self, part: str) -> None:
        """Note that this process makes a part, or what there is from this one on."""
        self.made.pop(part, None)
        self.made[part] = provenance(self.device)
        write_json(self.path, self.made)

    def of(self, parts: Container[str]) -> dict[str, Any]:
        """What stands beside a document of some parts.

        Returns:
            The provenance of who made the last one, and as `earlier` that of everyone else, each
            once; None where it is not known. This process signs where nothing at all is known.
        """
        made = [signature for part, signature in self.made.items() if part in parts]
        last = next(filter(None, reversed(made)), None) or provenance(self.device)
        others: list[dict[str, Any] | None] = []
        for signature in made:
            if signature != last and signature not in others:
                others.append(signature)
        return {**last, EARLIER: others} if others else last


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write_json` wrote; None where nothing was.

    Raises:
        ConfigError: something else is there.
    """
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"'{path}' is damaged and does not say which process made what; remove it and give the "
            "command again: results that are there are kept, as of an unknown machine"
        )
    return found

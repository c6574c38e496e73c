"""The files of recipes state only what differs from what they inherit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sedem_lab.training.recipe import BACKBONES, read_entries, variants

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != BACKBONES)
TEMPLATES = [path for path in FILES if path.name.startswith("_")]
"""Files that are no recipes themselves, so that they can hold what all their variants say."""


def settings(entries: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values; a list is one value."""
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from settings(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def layers(file: Path) -> Iterator[tuple[dict[str, Any], Path | None]]:
    """What a file and each of its variants says, and the recipe that it inherits from."""
    own = yaml.safe_load(file.read_text("utf-8"))
    shared = [(dict(each), file.name) for each in variants(file).values()]
    for entries, base in [(own, None), *shared]:
        base = entries.pop("base", base)
        entries.pop("variants", None)
        yield entries, None if base is None else file.parent / base


@pytest.mark.parametrize("file", FILES, ids=[str(path.relative_to(RECIPES)) for path in FILES])
def test_nothing_is_said_that_is_inherited(file: Path) -> None:
    for entries, base in layers(file):
        inherited = dict(settings(read_entries(base))) if base else {}
        for key, value in settings(entries):
            assert inherited.get(key) != value, f"{key} is {value} in the base already"
            if value == "None":
                assert any(f"{name}.".startswith(f"{key}.") for name in inherited), (
                    f"{key}: nothing of that name is inherited that could be taken away"
                )


@pytest.mark.parametrize("file", TEMPLATES, ids=[path.name for path in TEMPLATES])
def test_what_all_variants_of_a_file_say_stands_above_them(file: Path) -> None:
    said = [set(settings(each)) for each in variants(file).values() if "base" not in each]
    assert len(said) < 2 or not set.intersection(*said)

"""The recipes of the repository state only what differs from their bases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from sedem.training.recipe import read_entries

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILIES = [RECIPES / "nano", RECIPES / "paper"]

Setting = tuple[str, str]


def settings(entries: dict[str, Any], before: str = "") -> Iterator[Setting]:
    """Dotted keys and values; a list is one value."""
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from settings(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


def own(path: Path) -> dict[str, Any]:
    """What a file itself says, besides its base."""
    entries: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return {key: value for key, value in entries.items() if key != "base"}


def base_of(path: Path) -> Path | None:
    base = yaml.safe_load(path.read_text("utf-8")).get("base")
    return None if base is None else (path.parent / base).resolve()


FILES = sorted(RECIPES.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(RECIPES)) for path in FILES])
def test_no_file_says_what_its_base_says(path: Path) -> None:
    base = base_of(path)
    inherited = dict(settings(read_entries(base))) if base else {}
    for key, value in settings(own(path)):
        assert inherited.get(key) != value, f"{key} is {value} in the base already"
        if value == "None":
            assert any(f"{name}.".startswith(f"{key}.") for name in inherited), (
                f"{key}: nothing of that name is inherited that could be taken away"
            )


def test_what_all_files_of_a_base_say_stands_in_the_base() -> None:
    heirs: dict[Path, list[Path]] = {}
    for path in FILES:
        base = base_of(path)
        if base is not None:
            heirs.setdefault(base, []).append(path)
    for base, paths in heirs.items():
        said = {path: set(settings(own(path))) for path in paths}
        if base.name.startswith("_"):
            # It is there for several, and what all of them say is what they share.
            assert len(paths) > 1, base
            assert not set.intersection(*said.values()), base
        for one, other in combinations(paths, 2):
            alike = said[one] & said[other]
            smaller = min(len(said[one]), len(said[other]))
            assert len(alike) <= smaller / 2, f"{one} and {other}: {sorted(alike)}"
    assert heirs.keys() >= {path for path in FILES if path.name.startswith("_")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda path: path.name)
def test_little_is_said_twice_in_a_family(family: Path) -> None:
    said = Counter(s for path in family.rglob("*.yaml") for s in settings(own(path)))
    # Before recipes had bases, it was 70 % of the nano recipes and 84 % of the paper's.
    assert 1 - len(said) / said.total() < 0.36

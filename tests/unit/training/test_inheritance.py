"""A recipe takes over what its base says; those of the repository say nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from sedem.errors import ConfigError
from sedem.training.recipe import as_yaml, load_recipe, read_entries
from sedem.training.run import Stage1Recipe

RECIPES = Path(__file__).parents[3] / "recipes"
FAMILIES = [RECIPES / "nano", RECIPES / "paper"]

WHOLE: dict[str, Any] = {
    "model": {"encoder": "tiny", "extract_layers": [3], "inject_layer": 2},
    "text": {"path": "texts.jsonl", "exclude_titles": ["Trier", "Maldives"], "windows": 9},
    "optimization": {"learning_rates": {"compressor": 0.001, "decompressor": 0.01}, "steps": 10},
    "run": {"output": "runs/one"},
}


def save(path: Path, entries: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(entries))
    return path


def test_a_recipe_takes_over_what_its_base_says(tmp_path: Path) -> None:
    save(tmp_path / "shared" / "base.yaml", WHOLE)
    middle = {
        "base": "../shared/base.yaml",
        "optimization": {"learning_rates": {"decompressor": 0.5}, "seed": 3},
        "text": {"exclude_titles": ["Trier"]},
    }
    save(tmp_path / "large" / "middle.yaml", middle)
    last = {"base": "middle.yaml", "run": {"output": "runs/two"}, "optimization": {"seed": 4}}
    path = save(tmp_path / "large" / "last.yaml", last)
    recipe = load_recipe(Stage1Recipe, path, ["text.held_out=5"])
    # Mappings are merged at every depth, lists are replaced.
    assert recipe.optimization.learning_rates == {"compressor": 0.001, "decompressor": 0.5}
    assert (recipe.optimization.steps, recipe.optimization.seed) == (10, 4)
    assert recipe.text.exclude_titles == ("Trier",)
    assert (recipe.text.windows, recipe.text.held_out) == (9, 5)
    assert recipe.run.output == "runs/two"
    # The base itself stays what it is.
    assert load_recipe(Stage1Recipe, tmp_path / "shared" / "base.yaml").optimization.seed == 0


def test_null_takes_an_inherited_key_away(tmp_path: Path) -> None:
    base = {**WHOLE, "losses": {"regress": 0.5}, "data": {"training": []}}
    save(tmp_path / "base.yaml", base)
    own = {
        "base": "base.yaml",
        "data": None,
        "text": {"windows": None},
        "losses": {"regress": None},
    }
    recipe = load_recipe(Stage1Recipe, save(tmp_path / "own.yaml", own))
    assert recipe.text.windows is None
    assert recipe.losses.regress == 0.0
    # Where nothing is inherited it is a value like any other.
    wrong = {"base": "base.yaml", "data": None, "optimization": {"warmup": None}}
    with pytest.raises(ConfigError, match=r"optimization\.warmup is None; a whole number is"):
        load_recipe(Stage1Recipe, save(tmp_path / "wrong.yaml", wrong))


def test_a_written_recipe_is_whole(tmp_path: Path) -> None:
    save(tmp_path / "base.yaml", WHOLE)
    path = save(tmp_path / "own.yaml", {"base": "base.yaml", "run": {"output": "runs/two"}})
    entries = yaml.safe_load(as_yaml(load_recipe(Stage1Recipe, path)))
    assert "base" not in entries
    assert entries["model"]["encoder"] == "tiny"
    assert entries["run"] == {
        "output": "runs/two", "log_every": 50, "save_every": 500, "eval_every": 0, "keep": 2,
        "workers": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "b.yaml", "b": "c.yaml", "c": "a.yaml"},
            r"a\.yaml' inherits from itself \('a\.yaml' -> 'b\.yaml' -> 'c\.yaml' -> 'a\.yaml'\)",
        ),
        ({"a": "a.yaml"}, r"inherits from itself \('a\.yaml' -> 'a\.yaml'\); remove one of"),
        ({"a": "b.yaml", "b": "b.yaml"}, r"inherits from itself \('b\.yaml' -> 'b\.yaml'\)"),
        ({"a": "no.yaml"}, r"there is no recipe '.*no\.yaml', which '.*a\.yaml' names as its base"),
        ({"a": ["b.yaml"]}, r"a\.yaml: base is \['b\.yaml'\]; the path of one recipe is needed"),
        ({"a": None}, r"base is None; the path of one recipe is needed"),
    ],
)
def test_a_base_that_cannot_be_is_refused(
    files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name, base in files.items():
        save(tmp_path / f"{name}.yaml", {"base": base})
    with pytest.raises(ConfigError, match=message):
        load_recipe(Stage1Recipe, tmp_path / "a.yaml")


def test_an_error_in_a_base_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("- 1")
    path = save(tmp_path / "own.yaml", {"base": "base.yaml"})
    with pytest.raises(ConfigError, match=r"base\.yaml' is not a recipe: it holds no keys"):
        load_recipe(Stage1Recipe, path)


def test_a_base_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'base'"):
        load_recipe(Stage1Recipe, save(tmp_path / "own.yaml", WHOLE), ["base=other.yaml"])


# The recipes of the repository

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

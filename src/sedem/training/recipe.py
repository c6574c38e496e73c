"""A recipe: a YAML file with all settings of a training run.

With `base: PATH` a recipe inherits the settings of another file and states only the differences.
`--set optimization.steps=100` changes one value. Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar

import yaml
from pydantic import Field, model_validator

from sedem.errors import ConfigError
from sedem.validation import (
    Flag,
    NumberAbove0,
    NumberFrom0,
    Settings,
    Whole,
    WholeAbove0,
    WholeFrom0,
)

RecipeKind = TypeVar("RecipeKind", bound=Settings)
Schedule = Literal["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]

BASE = "base"
"""The key that names the file a recipe inherits from."""


class Optimization(Settings):
    """AdamW and its schedule.

    Attributes:
        learning_rates: by part: compressor, decompressor, selector, lora.
        steps: optimizer steps; either this or epochs.
        epochs: passes over the data.
        batch_size: examples on one device at a time.
        accumulation: batches of one optimizer step.
        schedule: name of a transformers schedule.
        warmup: steps of linear warm-up.
        weight_decay: on matrices.
        max_grad_norm: gradients are clipped to this norm.
        bf16: mixed precision.
        backbone_dtype: type of the frozen weights.
        seed: of order, sampling and start values.
    """

    learning_rates: Annotated[dict[str, NumberFrom0], Field(min_length=1)]
    steps: WholeAbove0 | None = None
    epochs: NumberAbove0 | None = None
    batch_size: WholeAbove0 = 16
    accumulation: WholeAbove0 = 1
    schedule: Schedule = "cosine"
    warmup: WholeFrom0 = 0
    weight_decay: NumberFrom0 = 0.0
    max_grad_norm: NumberAbove0 = 1.0
    bf16: Flag = True
    backbone_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: Whole = 0

    @model_validator(mode="after")
    def _length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give exactly one")
        return self


class RunSettings(Settings):
    """Where a run is kept and how often it speaks.

    Attributes:
        output: folder of checkpoints, logs and the final model.
        log_every: steps between log lines.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations; 0 means only at the end. Above 0 the final checkpoint
            of a baseline has the weights of the lowest loss; SeDeM's has the last ones.
        keep: newest checkpoints kept; the best one is kept besides where it is needed.
        workers: processes that load data.
    """

    output: str
    log_every: WholeAbove0 = 50
    save_every: WholeAbove0 = 500
    eval_every: WholeFrom0 = 0
    keep: WholeAbove0 = 2
    workers: WholeFrom0 = 0


class DataSource(Settings):
    """One set of examples in a mixture.

    Attributes:
        path: the file or folder, relative to the recipe's data_root; or the public name of a set,
            whose training split is read.
        set: name of its schema; None means that it is found out.
        records: which records of the file, as "start:stop".
        repeat: how many times the examples count in an epoch.
        label: "evidence" uses the file's labels, "answer" the blocks that hold an answer string.
        options: of the set's reader.
    """

    path: str
    set: str | None = None
    records: str | None = None
    repeat: WholeAbove0 = 1
    label: Literal["evidence", "answer"] = "evidence"
    options: dict[str, Any] = Field(default_factory=dict)


class Mixture(Settings):
    """Questions that a run learns from; each kind of run adds its own settings.

    Attributes:
        training: the sets that are mixed.
        evaluation: examples whose losses are followed; never those of a reported evaluation.
    """

    training: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    evaluation: tuple[DataSource, ...] = ()


class TextSource(Settings):
    """Stage-1 text.

    Attributes:
        path: file or folder, relative to the recipe's data_root; or "hub:" and the id of a set on
            the hub, which is streamed.
        continuation: A, tokens after each context.
        held_out: the last texts, kept for evaluation.
        evaluation_windows: windows of them that are evaluated.
        exclude_titles: lines or rows that are left out, by their field `title`.
        windows: at most this many training windows; None means all.
        tokens: stop reading after so many; None means all. Windows lie within one text and do not
            overlap, so they hold less than is read: a budget is a number of windows.
    """

    path: str
    continuation: WholeAbove0 = 64
    held_out: WholeFrom0 = 0
    evaluation_windows: WholeAbove0 = 256
    exclude_titles: tuple[str, ...] = ()
    windows: WholeAbove0 | None = None
    tokens: WholeAbove0 | None = None


class Recipe(Protocol):
    """What every kind of recipe has."""

    @property
    def optimization(self) -> Optimization:
        """How it learns."""
        ...

    @property
    def run(self) -> RunSettings:
        """Where it is kept."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON types: nested dicts and lists."""
        ...


def load_recipe(kind: type[RecipeKind], path: Path, overrides: Sequence[str] = ()) -> RecipeKind:
    """Read a recipe, its inherited settings included.

    Args:
        kind: its model.
        path: the YAML file.
        overrides: "dotted.key=value" entries that replace values of the file.

    Raises:
        ConfigError: a file is missing, not YAML, or has an unknown key or a value that is not
            allowed.
    """
    return kind.from_entries(read_entries(path, overrides), str(path))


def read_entries(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The entries of a recipe with its bases and overrides applied, not yet validated.

    Raises:
        ConfigError: a file is missing or not YAML, or inherits from itself.
    """
    entries = _inherited(path, ())
    for override in overrides:
        _set(entries, override)
    return entries


def as_yaml(recipe: Recipe) -> str:
    """The whole recipe with every default written out."""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False)


def _inherited(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """Entries of a file, merged over those of its base.

    Args:
        path: the file.
        heirs: resolved paths of the files that inherit from it, outermost first.
    """
    chain = (*heirs, path.resolve())
    if path.resolve() in heirs:
        circle = " -> ".join(f"'{file.name}'" for file in chain[chain.index(path.resolve()) :])
        raise ConfigError(
            f"'{heirs[0]}' inherits from itself ({circle}); remove one of these bases"
        )
    own = _read(path, heirs)
    if BASE not in own:
        return own
    base = own.pop(BASE)
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: {BASE} is {base!r}; the path of one recipe is needed, relative to this file"
        )
    return merge(_inherited(path.parent / base, chain), own)


def merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Merge a recipe's own entries over the inherited ones.

    Mappings are merged key by key. Any other value, a list included, replaces the inherited one.
    `null` removes an inherited key, so that its default applies.
    """
    merged = dict(base)
    for key, value in own.items():
        inherited = merged.get(key)
        if key in merged and value is None:
            del merged[key]
        elif isinstance(inherited, dict) and isinstance(value, dict):
            merged[key] = merge(inherited, value)
        else:
            merged[key] = value
    return merged


def _read(path: Path, heirs: Sequence[Path]) -> dict[str, Any]:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        wanted = f", which '{heirs[-1]}' names as its {BASE}" if heirs else ""
        raise ConfigError(
            f"there is no recipe '{path}'{wanted}; recipes/ holds those that exist"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"'{path}' is not a recipe: it holds no keys")
    return entries


def _set(entries: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{override}' is not of the form key=value")
    *parents, last = key.split(".")
    place = entries
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"'{override}': '{parent}' holds a value, not keys")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"'{override}' has a value that is not YAML: {reason}") from None

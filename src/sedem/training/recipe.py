"""A recipe: one YAML file that says everything about a training run, and can be diffed.

`--set optimization.steps=100` changes one value. Unknown keys are refused with the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from sedem.config import from_mapping
from sedem.errors import ConfigError

RecipeKind = TypeVar("RecipeKind")
Schedule = Literal["linear", "cosine", "constant_with_warmup", "warmup_stable_decay"]


@dataclass(frozen=True)
class Optimization:
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

    learning_rates: dict[str, float]
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 16
    accumulation: int = 1
    schedule: Schedule = "cosine"
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    bf16: bool = True
    backbone_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"optimization has steps {self.steps} and epochs {self.epochs}; give exactly one"
            )
        if not self.learning_rates:
            raise ConfigError("optimization.learning_rates is empty; give one for each part")
        for name, rate in self.learning_rates.items():
            if rate < 0:
                raise ConfigError(
                    f"optimization.learning_rates.{name} is {rate}; it must be 0 or more"
                )
        check_numbers(
            self,
            "optimization",
            positive=("steps", "epochs", "batch_size", "accumulation", "max_grad_norm"),
            not_negative=("warmup", "weight_decay"),
        )


@dataclass(frozen=True)
class Run:
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
    log_every: int = 50
    save_every: int = 500
    eval_every: int = 0
    keep: int = 2
    workers: int = 0

    def __post_init__(self) -> None:
        check_numbers(
            self,
            "run",
            positive=("log_every", "save_every", "keep"),
            not_negative=("eval_every", "workers"),
        )


@dataclass(frozen=True)
class DataSource:
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
    repeat: int = 1
    label: Literal["evidence", "answer"] = "evidence"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers(self, f"'{self.path}'", positive=("repeat",))


@dataclass(frozen=True)
class TextSource:
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
    continuation: int = 64
    held_out: int = 0
    evaluation_windows: int = 256
    exclude_titles: tuple[str, ...] = ()
    windows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_numbers(
            self,
            "text",
            positive=("continuation", "evaluation_windows", "windows", "tokens"),
            not_negative=("held_out",),
        )


def check_numbers(
    settings: Any,
    section: str,
    *,
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
) -> None:
    """Refuse impossible numbers; None is possible where a setting allows it.

    Raises:
        ConfigError: with the setting and its value.
    """
    for name in (*positive, *not_negative):
        value = getattr(settings, name)
        if value is not None and (value < 0 or (value == 0 and name in positive)):
            needed = "above 0" if name in positive else "0 or more"
            raise ConfigError(f"{section}.{name} is {value}; it must be {needed}")


def load_recipe(kind: type[RecipeKind], path: Path, overrides: Sequence[str] = ()) -> RecipeKind:
    """Read a recipe.

    Args:
        kind: its dataclass.
        path: the YAML file.
        overrides: "dotted.key=value" entries that replace what the file says.

    Raises:
        ConfigError: it is missing, not YAML, or has an unknown key or an impossible value.
    """
    recipe = _build(kind, read_entries(path, overrides), str(path))
    assert isinstance(recipe, kind)
    return recipe


def read_entries(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a recipe's file says, with its overrides, before anything is checked against a kind.

    Raises:
        ConfigError: it is missing or not YAML.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe '{path}'; recipes/ holds those that exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"'{path}' is not a recipe: it holds no keys")
    for override in overrides:
        _set(entries, override)
    return entries


def as_yaml(recipe: Any) -> str:
    """A recipe with every default written out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value

    return yaml.safe_dump(plain(asdict(recipe)), sort_keys=False)


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


def _build(kind: type, entries: Any, source: str) -> Any:
    """A dataclass from nested mappings, every value checked against its field's type."""
    if not isinstance(entries, dict):
        raise ConfigError(f"{source}: keys are needed here, got {entries!r}")
    hints = get_type_hints(kind)
    values = {
        name: _value(hints[name], value, f"{source}: {name}") if name in hints else value
        for name, value in entries.items()
    }
    return from_mapping(kind, values, source)


_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _value(hint: Any, value: Any, place: str) -> Any:
    """What YAML holds as a value of one type."""
    if is_dataclass(hint):
        return _build(cast(type, hint), value, place)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:  # always with None
        return None if value is None else _value(parts[0], value, place)
    if origin is Literal:
        if value not in parts:
            raise ConfigError(f"{place} is {value!r}; it can be {', '.join(parts)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{place} is {value!r}; a list is needed")
        return tuple(_value(parts[0], entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: keys are needed here, got {value!r}")
        return {key: _value(parts[1], entry, f"{place}.{key}") for key, entry in value.items()}
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        # YAML reads 1e-4 as text; a number written like that is meant as one.
        with suppress(ValueError):
            value = float(value)
    # A bool is an int to Python, not to people.
    if hint is not Any and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise ConfigError(f"{place} is {value!r}; {_NEEDED[hint]} is needed")
    return value

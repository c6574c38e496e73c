"""A recipe: a YAML file with all settings of a training run.

With `base: PATH` a recipe inherits the settings of another file and states only the differences.
Recipes that differ little share a file: `questions` under `variants` of `_icae.yaml` is the recipe
`icae-questions.yaml`, and inherits from the rest of its file unless it names another base. If its
folder has `backbones/NAME.yaml`, `NAME/icae-questions.yaml` is the recipe on that backbone.
`--set optimization.steps=100` changes one value. The error for an unknown key names the nearest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from sedem.config import (
    Flag,
    NumberAbove0,
    NumberFrom0,
    Settings,
    Whole,
    WholeAbove0,
    WholeFrom0,
)
from sedem.engine.device import multiplies_bfloat16
from sedem.errors import ConfigError
from sedem.untrusted import DEPTH, YAML_BYTES, parse_yaml, read_text

RecipeKind = TypeVar("RecipeKind", bound=Settings)
Schedule = Literal["linear", "cosine", "constant_with_warmup"]
ShareBelow1 = Annotated[NumberFrom0, Field(lt=1)]

BASE, VARIANTS = "base", "variants"
"""The keys for the file that a recipe inherits from, and for the short recipes of a file."""
BACKBONES = "backbones"
"""The folder of backbones that the recipes next to it can be trained on."""


class Optimization(Settings):
    """AdamW and its schedule.

    Attributes:
        learning_rates: of each trained part, such as compressor, decompressor, selector and lora.
        steps: optimizer steps; give either steps or epochs.
        batch_size: examples of a batch.
        accumulation: batches of a step.
        batch_tokens: most tokens of a batch, those of its longest example times its examples. The
            `batch_size` x `accumulation` examples of a step are then divided by length instead,
            into as few batches as the tokens allow; a longer example is a batch of its own. None
            divides them by number alone.
        schedule: name of a learning-rate schedule of transformers.
        warmup_ratio: the same as a share of all steps; give one of the two.
        max_grad_norm: gradients are clipped to this norm.
        keep_start: share of the starting weights in those that are written at the end. A mean of
            both forgets less (Wortsman et al., 2022).
        bf16: train with mixed precision. "auto" does so if the machine supports bfloat16 natively;
            other CPUs emulate it, two to four times slower than float32. A run records which was
            used.
        backbone_dtype: type of the frozen weights; "auto" is bfloat16 if `bf16` would be true.
        logits_at_once: positions whose logits a loss holds at a time; None means all. Fewer take
            less memory, but their logits are computed again in the backward pass.
        compile: compile the layers of SeDeM's backbones with torch.compile, which needs a compiler.
        shard_backbone: divide the frozen layers among the processes, for backbones too large for
            one GPU. A single process keeps them whole.
        checkpointing: keep only the input of each layer for the backward pass, and run the layer
            again there: less memory, a third more work, the same losses. "auto" does so if the
            longest batch would not fit the GPU, and never on a CPU.
        seed: of order, sampling and initial values.
    """

    learning_rates: Annotated[dict[str, NumberFrom0], Field(min_length=1)]
    steps: WholeAbove0 | None = None
    epochs: NumberAbove0 | None = None
    batch_size: WholeAbove0 = 16
    accumulation: WholeAbove0 = 1
    batch_tokens: WholeAbove0 | None = None
    schedule: Schedule = "cosine"
    warmup: WholeFrom0 = 0
    warmup_ratio: ShareBelow1 = 0.0
    weight_decay: NumberFrom0 = 0.0
    max_grad_norm: NumberAbove0 = 1.0
    keep_start: ShareBelow1 = 0.0
    bf16: Flag = Field(default="auto", validate_default=True)
    backbone_dtype: Literal["bfloat16", "float32"] = Field(default="auto", validate_default=True)
    logits_at_once: WholeAbove0 | None = None
    compile: Flag = False
    shard_backbone: Flag = False
    checkpointing: Flag | Literal["auto"] = "auto"
    seed: Whole = 0

    def rows(self, longest: int) -> int:
        """Examples of a batch whose longest one has so many tokens."""
        if self.batch_tokens is None:
            return self.batch_size
        return min(max(1, self.batch_tokens // longest), self.batch_size * self.accumulation)

    @field_validator("bf16", "backbone_dtype", mode="before")
    @classmethod
    def _suits_the_machine(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "auto":
            return value
        native = multiplies_bfloat16()
        return native if info.field_name == "bf16" else "bfloat16" if native else "float32"

    @model_validator(mode="after")
    def _has_one_length_and_one_warmup(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give exactly one")
        if self.warmup and self.warmup_ratio:
            raise ValueError(
                f"warmup is {self.warmup} and warmup_ratio {self.warmup_ratio}; give steps or a "
                "share, and set the other to 0"
            )
        return self


class RunSettings(Settings):
    """Output folder of a run, and how often it logs, saves and evaluates.

    Attributes:
        output: folder of checkpoints, logs and the final model.
        eval_every: steps between evaluations; 0 evaluates only at the end. Above 0 the final
            checkpoint of a baseline has the weights of the lowest loss; SeDeM's has the last ones
            unless stage 2 sets `best`.
        keep: number of newest checkpoints to keep; the best one is also kept if it is needed.
        trackers: where log lines go besides training.json: "tensorboard", "wandb" or another
            tracker of accelerate.
        push_to: a repository of the hub, "owner/name", that every saved step is pushed to; a new
            one is private.
    """

    output: str
    log_every: WholeAbove0 = 50
    save_every: WholeAbove0 = 500
    eval_every: WholeFrom0 = 0
    keep: WholeAbove0 = 2
    workers: WholeFrom0 = 0
    trackers: tuple[str, ...] = ("tensorboard",)
    push_to: str | None = None


class DataSource(Settings):
    """One set of examples in a mixture.

    Attributes:
        path: the file or folder, relative to the recipe's data_root; or the public name of a set,
            whose training split is read.
        set: name of its schema; None detects it.
        records: range of records of the file, as "start:stop".
        repeat: how often each example occurs in an epoch.
        label: "evidence" takes the file's labels; "answer" labels blocks with an answer string.
        options: options of the set's reader.
    """

    path: str
    set: str | None = None
    records: str | None = None
    repeat: WholeAbove0 = 1
    label: Literal["evidence", "answer"] = "evidence"
    options: dict[str, Any] = Field(default_factory=dict)


class Mixture(Settings):
    """Questions that a run learns from; a subclass adds the settings of its kind of run.

    Attributes:
        evaluation: sets whose losses are evaluated; never those of a reported evaluation.
        evidence_only: leave out and count the training examples without any positive block, for a
            method that selects blocks. The evaluated ones stay.
    """

    training: Annotated[tuple[DataSource, ...], Field(min_length=1)]
    evaluation: tuple[DataSource, ...] = ()
    evidence_only: Flag = False


class TextSource(Settings):
    """Text that a run learns from.

    Attributes:
        path: file or folder, relative to the recipe's data_root; or "hub:" and the id of a dataset
            on the hub, which is streamed.
        field: name of the field of lines and rows that has the text.
        join: join consecutive texts, a blank line between them, until they have this many
            characters, so that windows may span several short texts; None keeps each text apart.
        continuation: A, tokens after each context.
        held_out: number of texts at the end that are kept for evaluation.
        evaluation_windows: maximum windows of the held-out texts to evaluate.
        exclude_titles: titles (field `title`) of the lines or rows to leave out.
        windows: maximum training windows of an epoch; None means all. Every epoch cuts them at
            other positions of the same texts.
        tokens: maximum tokens to read; None means all. Windows do not overlap and never span two
            texts, so they contain fewer tokens than are read. Set a training budget by `windows`.
        shard_seed: seed of the order in which the files of a folder, or the shards of a dataset on
            the hub, are read, so that the first tokens are not all from one source; None reads them
            in order of their names.
    """

    path: str
    field: str = "text"
    join: WholeAbove0 | None = None
    continuation: WholeAbove0 = 64
    held_out: WholeFrom0 = 0
    evaluation_windows: WholeAbove0 = 256
    exclude_titles: tuple[str, ...] = ()
    windows: WholeAbove0 | None = None
    tokens: WholeAbove0 | None = None
    shard_seed: WholeFrom0 | None = None


class Recipe(Settings):
    """The settings of a training run.

    Attributes:
        data_root: folder that data paths are relative to.
        start_from: checkpoint to continue from; None means new parts.
    """

    if TYPE_CHECKING:  # Each subclass places these among its own, in the order of a written recipe.
        optimization: Optimization
        run: RunSettings
        data_root: str
        cache: str
        start_from: str | None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        text, data = getattr(self, "text", None), getattr(self, "data", None)
        held_out = text.held_out if text else data and data.evaluation
        if self.run.eval_every and not held_out:
            raise ValueError(
                f"run.eval_every is {self.run.eval_every}, but nothing is kept apart to evaluate "
                f"on; give {'text.held_out' if text else 'data.evaluation'}, or set run.eval_every "
                "to 0"
            )
        if (kept := self.optimization.keep_start) and self.start_from is None:
            raise ValueError(
                f"optimization.keep_start is {kept}, but nothing is trained at the start; give "
                "start_from, or set it to 0"
            )
        return self


def load_recipe(kind: type[RecipeKind], path: Path, overrides: Sequence[str] = ()) -> RecipeKind:
    """Read and validate a recipe, including its inherited settings.

    Args:
        overrides: "dotted.key=value" entries that replace values of the file.

    Raises:
        ConfigError: a file is missing or not YAML, a key is unknown, or a value is not allowed.
    """
    return kind.from_entries(read_entries(path, overrides), str(path))


def read_entries(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the entries of a recipe, with bases and overrides applied but not yet validated.

    Raises:
        ConfigError: a file is missing or not YAML, or inherits from itself.
    """
    entries = _inherited(path, ())
    for override in overrides:
        key, separator, text = override.partition("=")
        shown = repr(override if len(override) <= 80 else f"{override[:77]}...")
        if not separator or not key:
            raise ConfigError(f"{shown} is not of the form key=value")
        *parents, last = key.split(".")
        if len(parents) > DEPTH:
            raise ConfigError(f"'{key[:80]}...' names keys more than {DEPTH} deep; no setting is")
        section = entries
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{shown}: '{parent}' has a value, not keys")
        section[last] = parse_yaml(text, f"{shown} has a value that is", ConfigError)
    return entries


def what_trains(path: Path, overrides: Sequence[str] = ()) -> str:
    """What a recipe trains: "stage1", "stage2" or a baseline."""
    entries = read_entries(path, overrides)
    return str(entries.get("method") or ("stage2" if "data" in entries else "stage1"))


def as_yaml(recipe: Recipe) -> str:
    """The complete recipe as YAML, with all defaults written out."""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False)


def _inherited(path: Path, heirs: tuple[Path, ...]) -> dict[str, Any]:
    """Read the entries of a file, merged over those of its base.

    Args:
        heirs: resolved paths of the files that inherit from it, outermost first.
    """
    backbone = path.parent.parent / BACKBONES / f"{path.parent.name}.yaml"
    if os.path.isfile(backbone) and not os.path.exists(path.parent):
        # The recipe beside the folder of backbones, with the settings of this one.
        entries = _inherited(path.parent.parent / path.name, heirs)
        kind = "baseline" if "method" in entries else "sedem"
        sections = _read(backbone, heirs)
        if kind not in sections:
            raise ConfigError(
                f"backbone '{backbone.stem}' is for SeDeM only, and '{path.stem}' trains "
                f"{entries['method']}; choose another"
            )
        for name in (kind, path.stem):
            entries = merge(entries, sections.get(name) or {})
        return _filled(entries, backbone.stem)
    entries = _read(path, heirs)
    # Path.resolve raises its own RuntimeError for a loop of links.
    resolved = Path(os.path.realpath(path))
    chain = (*heirs, resolved)
    if resolved in heirs:
        circle = " -> ".join(f"'{file.name}'" for file in chain[chain.index(resolved) :])
        raise ConfigError(
            f"'{heirs[0]}' inherits from itself ({circle}); remove one of these bases"
        )
    if len(heirs) > DEPTH:
        raise ConfigError(f"'{heirs[0]}' has more than {DEPTH} bases; merge some")
    if BASE not in entries:
        return entries
    base = entries.pop(BASE)
    if not isinstance(base, str):
        raise ConfigError(
            f"{path}: {BASE} is {base!r}; the path of one recipe is needed, relative to this file"
        )
    return merge(_inherited(path.parent / base, chain), entries)


def merge(base: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Merge the entries of a recipe over the inherited ones.

    Mappings are merged key by key. Any other value, a list included, replaces the inherited one.
    `null` removes an inherited key, so that its default applies.
    """
    merged = dict(base)
    for key, value in entries.items():
        inherited = merged.get(key)
        if key in merged and value is None:
            del merged[key]
        elif isinstance(inherited, dict) and isinstance(value, dict):
            merged[key] = merge(inherited, value)
        else:
            merged[key] = value
    return merged


def variants(file: Path) -> dict[Path, Any]:
    """The entries of each recipe under `variants` of a file, by the path that reads it."""
    entries = _of_file(file)
    found = entries.get(VARIANTS) if isinstance(entries, dict) else None
    if not isinstance(found, dict):
        return {}
    shared = file.stem.removeprefix("_")
    return {file.with_name(f"{shared}-{name}.yaml"): own for name, own in found.items()}


def _of_file(file: Path) -> Any:
    """The entries of a file as they are written; many recipes share one, and parsing is slow."""
    return deepcopy(_parsed(read_text(file, ConfigError, YAML_BYTES), f"'{file}' is", ConfigError))


_parsed = lru_cache(maxsize=64)(parse_yaml)


def _filled(value: Any, backbone: str) -> Any:
    """Settings with the name of a backbone in place of `{backbone}`."""
    if isinstance(value, dict):
        return {key: _filled(entry, backbone) for key, entry in value.items()}
    return value.replace("{backbone}", backbone) if isinstance(value, str) else value


def _read(path: Path, heirs: Sequence[Path]) -> dict[str, Any]:
    """The entries of a recipe in its own file, or as a variant in a file that several share."""
    words = path.stem.split("-")
    for count in range(1, len(words) if not os.path.isfile(path) else 0):
        shared = "-".join(words[:count])
        for name in (f"{shared}.yaml", f"_{shared}.yaml"):
            file = path.with_name(name)
            if os.path.isfile(file) and isinstance(own := variants(file).get(path), dict):
                return {BASE: name, **own}
    try:
        entries = _of_file(path)
    except FileNotFoundError:
        named_by = f", which '{heirs[-1]}' names as its {BASE}" if heirs else ""
        raise ConfigError(
            f"there is no recipe '{path}'{named_by}; recipes/ has the known ones"
        ) from None
    if not isinstance(entries, dict):
        raise ConfigError(f"'{path}' is not a recipe: it has no keys")
    return {key: value for key, value in entries.items() if key != VARIANTS}

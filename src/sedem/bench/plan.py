"""The plan of a bench, validated before anything is opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from sedem.baselines.registry import METHODS, TRAINED
from sedem.baselines.settings import SelectionBudget
from sedem.bench.contexts import LONGEST, source
from sedem.checkpoint.folder import is_checkpoint, locate
from sedem.config import CONFIG_FILE, DEFAULT_MODEL, BlockContext
from sedem.durable_files import sha256
from sedem.engine.device import unusable
from sedem.errors import ConfigError
from sedem.evaluation.command import weight_files
from sedem.evaluation.config import Dtype
from sedem.evaluation.cost import PRESETS
from sedem.quantization import BFLOAT16, check_dtype
from sedem.validation import Flag, Settings, Whole, WholeAbove0

FULL = "full"
"""The name for unquantized weights."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""The files of a tokenizer that random weights are given."""

Entry = TypeVar("Entry")


def _distinct(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    if len(set(entries)) < len(entries):
        raise PydanticCustomError("distinct", "give each entry once")
    return entries


def _method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"there is no method '{name}'; there are {', '.join(METHODS)}")
    return name


def _length(tokens: int) -> int:
    if not 1 <= tokens <= LONGEST:
        raise PydanticCustomError("length", f"a context can have 1 to {LONGEST:,} tokens")
    return tokens


def _memory_type(kind: str) -> str:
    try:
        check_dtype(kind)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return kind


def _shape(name: str) -> str:
    if name.lower() in PRESETS:
        return name.lower()
    if not all(file.is_file() for file in _shape_files(name)) or is_checkpoint(name):
        raise ValueError(
            f"there is no shape '{name}'; there are {', '.join(PRESETS)}, or give the folder of a "
            f"backbone with {CONFIG_FILE}, {' and '.join(TOKENIZER)} (a trained model is given "
            "with -m)"
        )
    return name


def _shape_files(folder: str) -> list[Path]:
    return [Path(folder) / file for file in (CONFIG_FILE, *TOKENIZER)]


def _device(name: str) -> str:
    if (reason := unusable(name)) is not None:
        raise PydanticCustomError("device", reason)
    return name


DISTINCT, NOT_EMPTY = AfterValidator(_distinct), Field(min_length=1)


class Plan(Settings):
    """What to measure, and how.

    Attributes:
        contexts: context lengths in tokens.
        k: selection budget; None means the model's own.
        batches: batch sizes to measure, in addition to the single question.
        memory: data types of SeDeM's slots; each is a method in the results, such as "sedem-int8".
        weights: weights of SeDeM's decoding steps; "int8" is "sedem-int8-weights" in the results.
        backbone: a shape to measure with random weights, instead of checkpoints: a public one, or
            the folder of a backbone, whose weights are not read.
        runs: number of measured rounds over each context.
        answer_tokens: tokens of every answer.
        device: None means a GPU if there is one.
        dtype: None means bfloat16 on a GPU and float32 elsewhere.
        kept: "cold" keeps no keys and values of blocks between answers; "warm" computes and keeps
            those of all blocks ahead, and is called "sedem-warm" in the results.
        block_context: replaces the setting of SeDeM's checkpoint, without training; times are
            valid, answers are not. None leaves it unchanged.
        online: whether documents are read again in every round. If not, they are read once, and
            only answers from the memory are timed.
        text: file that contexts are cut from; None means the demo's documents.
        cold_start: whether to measure a question in a fresh process.

    Raises:
        ConfigError: a setting is not allowed, or this machine has no such device.
    """

    methods: Annotated[tuple[Annotated[str, AfterValidator(_method)], ...], DISTINCT] = tuple(
        name for name in METHODS if name not in TRAINED
    )
    contexts: Annotated[tuple[Annotated[Whole, AfterValidator(_length)], ...], DISTINCT] = (
        1024,
        8192,
    )
    k: SelectionBudget | None = None
    batches: Annotated[tuple[WholeAbove0, ...], DISTINCT] = ()
    memory: Annotated[
        tuple[Annotated[str, AfterValidator(_memory_type)], ...], NOT_EMPTY, DISTINCT
    ] = (BFLOAT16,)
    weights: Annotated[tuple[Literal["full", "int8"], ...], NOT_EMPTY, DISTINCT] = ("full",)
    checkpoint: str = DEFAULT_MODEL
    backbone: Annotated[str, AfterValidator(_shape)] | None = None
    runs: WholeAbove0 = 20
    answer_tokens: Annotated[Whole, Field(ge=2, le=512)] = 33
    device: Annotated[str, AfterValidator(_device)] | None = None
    dtype: Dtype | None = None
    engine: str = "auto"
    kept: Annotated[tuple[Literal["cold", "warm"], ...], NOT_EMPTY, DISTINCT] = ("cold",)
    block_context: BlockContext | None = None
    online: Flag = True
    text: Path | None = None
    cold_start: Flag = False

    @property
    def place(self) -> torch.device:
        """The device to measure on."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def dtype_name(self) -> Dtype:
        """The data type of the backbones."""
        return self.dtype or ("bfloat16" if self.place.type == "cuda" else "float32")

    @property
    def type(self) -> torch.dtype:
        """The data type of the backbones, as torch's."""
        chosen: torch.dtype = getattr(torch, self.dtype_name)
        return chosen

    def settings(self) -> dict[str, Any]:
        """All settings that affect the results except the machine, as JSON types.

        Context lengths and the cold start are left out, since they can be added to a results folder
        later.
        """
        entries = self.model_dump(mode="json", exclude={"contexts", "text", "cold_start"})
        text, description = source(self.text)
        return {
            **entries,
            "device": str(self.place),
            "dtype": self.dtype_name,
            "threads": torch.get_num_threads(),
            "text": description,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            **self._digest(),
        }

    def _digest(self) -> dict[str, Any]:
        """Digest of SeDeM's weights; of random ones, that of a folder's shape and tokenizer."""
        if self.backbone is None:
            return {"weights_sha256": sha256(*weight_files(locate(self.checkpoint), "sedem"))}
        if self.backbone in PRESETS:
            return {}
        return {"shape_sha256": sha256(*_shape_files(self.backbone))}

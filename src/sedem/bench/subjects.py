"""The methods that a bench measures, opened as its plan says.

SeDeM is opened cold or warm. For a question there are three cases. "cold": nothing is ever kept, so
the keys and values of its blocks are computed and dropped. "missed": they are kept but not there
yet, so they are computed and stored. "found": they are there, so only the question is run.

A shape is measured on random weights: correct times, meaningless answers. SeDeM and the trained
baselines have the paper's settings. They are written to a folder and opened like any checkpoint,
adapters included, so the measured code is the same. A backbone's folder has its own tokenizer; a
public shape has sedem-nano's, since that of a gated model cannot be shipped.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import empty_model, open_backbone
from sedem.bank.keys import prepare
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.baselines.full_context import FullContext
from sedem.baselines.registry import TRAINED, reader_class
from sedem.bench.plan import FULL, TOKENIZER, Plan
from sedem.checkpoint.folder import EXTRA_ENTRIES, locate, open_backbones
from sedem.checkpoint.portable import BACKBONE
from sedem.config import SMALL_MODEL, SedemConfig
from sedem.engine.kept import Kept, KeptBudget
from sedem.engine.static import open_engine
from sedem.engine.warming import keeping_engine
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.cost import PRESETS, model_shapes
from sedem.evaluation.readers import BoundSedem
from sedem.evaluation.registry import (
    decoding_of,
    has_selection_budget,
    open_method,
)
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16
from sedem.selecting.plan import budget_of
from sedem.types import Reader

NO_TOKEN = -1
"""An end token that no model generates, so that every answer has its full length."""
NOTHING = KeptBudget(device_bytes=0, ram_bytes=0)


@dataclass(frozen=True)
class Subject:
    """A method to measure.

    Attributes:
        name: its name in the results.
        backbone: the backbone that answers; None if unknown.
        reads_text: whether the decoder reads raw text, and truncates it if it is too long.
    """

    name: str
    reader: Reader
    backbone: Backbone | None
    reads_text: bool = False


Opener = Callable[[MethodSettings], Subject]


@runtime_checkable
class Keeper(Protocol):
    """A reader that keeps keys and values of blocks."""

    def warm(self, memory: Any) -> int:
        """Compute the keys and values of all blocks ahead; return how many blocks are ready."""
        ...

    def anew(self, memory: Any) -> Any:
        """The same memory, with nothing kept."""
        ...

    def kept_bytes(self, memory: Any) -> int:
        """Bytes of the keys and values of all its blocks."""
        ...


class WarmSedem(BoundSedem):
    """SeDeM that keeps keys and values of independent blocks; arguments as in `BoundSedem`."""

    def warm(self, memory: BankReader) -> int:
        """Compute the keys and values of all blocks ahead; return how many blocks are ready."""
        return self.model.warm(memory)

    def anew(self, memory: BankReader) -> Snapshot:
        """The same bank as another snapshot, with its selector's keys but nothing kept."""
        # The files are shared. Kept keys and values belong to the snapshot.
        bank = memory.snapshot().part(range(len(memory)))
        prepare(bank, self.model.selector)
        return bank

    def kept_bytes(self, memory: BankReader) -> int:
        """Bytes of the keys and values of all blocks above injection."""
        return every_block_bytes(keeping_engine(self.model.engine).kept, memory)


def every_block_bytes(kept: Kept, source: BankReader) -> int:
    """Bytes of the keys and values of all blocks, whether they are computed or not."""
    return sum(kept.entry_bytes(n) for n in kept.walk.sizes(source, range(len(source))))


def open_subjects(
    plan: Plan, checkpoint: Path | str, peers: Mapping[str, Opener] | None = None
) -> tuple[list[Subject], dict[str, str]]:
    """Open every method of a plan, and peers of a study.

    Returns:
        The methods to measure, and the reason for each peer or trained baseline that cannot run.

    Raises:
        ConfigError: no method can run.
    """
    settings = MethodSettings.from_entries(
        {
            "checkpoint": str(checkpoint),
            "k": plan.k,
            "max_new_tokens": plan.answer_tokens,
            "dtype": plan.dtype_name,
            "device": str(plan.place),
            "engine": plan.engine,
        },
        "sedem bench",
    )
    peers = peers or {}
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    for name in (*plan.methods, *peers):
        try:
            if name in peers:
                subjects.append(peers[name](settings))
            elif name == "sedem":
                subjects += _open_sedem(settings, plan, left_out)
            else:
                subjects.append(_open_method(name, settings, plan))
        except ConfigError as error:
            if name not in TRAINED and name not in peers:
                raise
            left_out[name] = str(error)
    if not subjects:
        raise ConfigError("; ".join(left_out.values()) or "there is no method; name at least one")
    for subject in subjects:
        if subject.backbone is not None:
            subject.backbone.eos_token_id = NO_TOKEN
    return subjects, left_out


def _open_method(name: str, settings: MethodSettings, plan: Plan) -> Subject:
    """Open any method other than SeDeM."""
    if name in TRAINED:
        if plan.backbone is None:
            raise ConfigError("a trained baseline has random weights here; name a --backbone")
        settings = write_random_baseline(name, settings)
    if not has_selection_budget(name):
        settings = settings.with_changes(k=None)
    method = open_method(name, settings)
    return Subject(name, method.reader, method.backbone, isinstance(method.reader, FullContext))


def _open_sedem(
    settings: MethodSettings, plan: Plan, left_out: dict[str, str]
) -> Iterator[Subject]:
    """Open SeDeM cold and warm, as one subject for each type of memory, which share a model.

    Why another row than that with full weights cannot run is added to `left_out`.

    Raises:
        ConfigError: SeDeM cannot be opened at all.
    """
    for weights, keeping in product(plan.weights, plan.kept):
        name = "sedem" if keeping == "cold" else "sedem-warm"
        rounded = "" if weights == FULL else f"-{weights}-weights"
        try:
            model = _open_model(settings, plan, weights, keeping)
        except ConfigError as error:
            if (weights, keeping) == (FULL, "cold"):
                raise
            left_out[name + rounded] = str(error)
            continue
        reader = BoundSedem if keeping == "cold" else WarmSedem
        for kind in plan.memory:
            yield Subject(
                (name if kind == BFLOAT16 else f"{name}-{kind}") + rounded,
                reader(model, settings.k, decoding_of(settings), kind),
                model.decoder,
            )


def _open_model(settings: MethodSettings, plan: Plan, weights: str, keeping: str) -> SeDeM:
    """Open SeDeM with the plan's block context.

    Raises:
        ConfigError: a setting cannot be used, or "warm" is requested and the model or its engine
            cannot keep anything.
    """
    # A fast engine reads the configuration when it is opened, so it is opened afterwards.
    model = SeDeM.from_pretrained(
        settings.checkpoint, dtype=plan.type, device=plan.place, engine="eager"
    )
    if plan.block_context is not None:
        model.config = model.config.with_changes(block_context=plan.block_context)
    # The same prompt for all methods, and one end token, which the bench disables. A quotation
    # comes as a whole, so it would have no first token.
    model.config = model.config.with_changes(chat_template=False, answer="free")
    budget = NOTHING if keeping == "cold" else None
    model.engine = open_engine(plan.engine, model, budget=budget, weights=weights)
    budget_of(model, plan.k)
    if keeping == "warm":
        keeping_engine(model.engine)
    return model


@contextmanager
def checkpoint_of(plan: Plan) -> Iterator[Path | str]:
    """The checkpoint of a plan; one with random weights is removed after the bench."""
    if plan.backbone is None:
        yield plan.checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _write_random_checkpoint(plan, plan.backbone, Path(folder))


def _write_random_checkpoint(plan: Plan, name: str, folder: Path) -> Path:
    """Write backbones of a shape, and a checkpoint; all weights are random."""
    config, encoder, decoder = model_shapes(name)
    tokenizer = locate(SMALL_MODEL) / BACKBONE if name in PRESETS else Path(name)
    shapes = {"encoder": encoder, **({"decoder": decoder} if config.cross_model else {})}
    torch.manual_seed(0)
    for part, shape in shapes.items():
        # A CPU takes minutes to draw billions of random numbers.
        with plan.place:
            backbone = empty_model(shape, dtype=plan.type)
        backbone.save_pretrained(folder / part)
        for file in TOKENIZER:
            shutil.copy(tokenizer / file, folder / part / file)
    config = config.with_changes(**{part: str(folder / part) for part in shapes})
    model = SeDeM(config, *open_backbones(config, dtype=plan.type, device=plan.place))
    if config.lora_rank:
        model.decoder.add_lora(config.lora_rank, config.lora_alpha)
    model.save_pretrained(folder / "checkpoint")
    return folder / "checkpoint"


def write_random_baseline(name: str, settings: MethodSettings) -> MethodSettings:
    """Write a trained baseline beside the random checkpoint of SeDeM, on the same decoder.

    Returns:
        The settings to open it with.

    Raises:
        ConfigError: the paper's settings of the method do not fit the shape.
    """
    kind, sedem = reader_class(name), Path(settings.checkpoint)
    config = SedemConfig.load(sedem, extra=EXTRA_ENTRIES)
    backbone = config.decoder or config.encoder
    options = {"dtype": getattr(torch, settings.dtype), "device": settings.device}
    reader = kind(kind.Config(backbone=backbone), open_backbone(backbone, **options))
    reader.save_pretrained(sedem.with_name(name))
    return settings.with_changes(checkpoint=str(sedem.with_name(name)))

"""What a bench measures: its plan, and the methods, opened with one prompt and one answer length.

A shape is measured on random weights: correct times, meaningless answers. SeDeM and the trained
baselines then have the paper's settings. They are written to a folder and opened like any
checkpoint, adapters included, so the measured code is the same. A backbone's folder has its own
tokenizer; a public shape has sedem-nano's, since that of a gated model cannot be shipped.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import empty_model, open_backbone
from sedem.checkpoint.folder import BACKBONE, EXTRA_ENTRIES, locate, open_backbones
from sedem.config import DEFAULT_MODEL, SMALL_MODEL, BlockContext, SedemConfig, Whole, WholeAbove0
from sedem.engine.device import chosen_device
from sedem.engine.kept import KeptBudget
from sedem.engine.static import open_engine
from sedem.errors import ConfigError
from sedem.model import SeDeM
from sedem.selecting.plan import budget_of
from sedem.types import DocumentReader
from sedem_lab.baselines.full_context import FullContext
from sedem_lab.baselines.registry import METHODS, TRAINED, reader_class
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.cost import PRESETS, model_shapes
from sedem_lab.evaluation.readers import BoundSedem, decoding_of, open_method

LONGEST = 2**22
"""Tokens of the longest context."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""The files of a tokenizer that random weights are given."""
NO_TOKEN = -1
"""An end token that no model generates, so that every answer has its full length."""
NOTHING = KeptBudget(device_bytes=0, ram_bytes=0)


def _method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"there is no method '{name}'; there are {', '.join(METHODS)}")
    return name


def _shape(name: str) -> str:
    return name.lower() if name.lower() in PRESETS else name


class BenchPlan(MethodSettings):
    """What to measure, and how methods are opened for it.

    Attributes:
        contexts: context lengths in tokens.
        runs: number of measured rounds over each context.
        backbone: a shape to measure with random weights, instead of checkpoints: a public one, or
            the folder of a backbone, whose weights are not read.
        max_new_tokens: tokens of every answer.
    """

    checkpoint: str = DEFAULT_MODEL
    methods: tuple[Annotated[str, AfterValidator(_method)], ...] = tuple(
        name for name in METHODS if name not in TRAINED
    )
    contexts: tuple[Annotated[Whole, Field(ge=1, le=LONGEST)], ...] = (1024, 8192)
    runs: WholeAbove0 = 20
    backbone: Annotated[str, AfterValidator(_shape)] | None = None
    max_new_tokens: Annotated[Whole, Field(ge=2)] = 33

    @property
    def place(self) -> torch.device:
        """The device to measure on."""
        return chosen_device(self.device)


def plan_of(entries: Mapping[str, Any]) -> BenchPlan:
    """A plan for a GPU if there is one and none is named, in bfloat16 on a GPU.

    Raises:
        ConfigError: a setting is not allowed, or this machine has no such device.
    """
    place = chosen_device(entries.get("device"))
    dtype = "bfloat16" if place.type == "cuda" else "float32"
    return BenchPlan.from_entries({"dtype": dtype, **entries, "device": str(place)}, "sedem bench")


@dataclass(frozen=True)
class Subject:
    """A method to measure.

    Attributes:
        name: its name in the results.
        backbone: the backbone that answers; None if unknown.
        reads_text: whether the decoder reads raw text, and truncates it if it is too long.
    """

    name: str
    reader: DocumentReader
    backbone: Backbone | None
    reads_text: bool = False


Opener = Callable[[BenchPlan], Subject]


def open_subjects(
    plan: BenchPlan, more: Mapping[str, Opener] | None = None
) -> tuple[list[Subject], dict[str, str]]:
    """Open every method of a plan, and more ones.

    Returns:
        The methods to measure, and the reason for each that cannot run.

    Raises:
        ConfigError: no method can run.
    """
    subjects: list[Subject] = []
    left_out: dict[str, str] = {}
    for name in (*plan.methods, *(more or {})):
        try:
            if more and name in more:
                subject = more[name](plan)
            elif name == "sedem":
                model = open_sedem(plan)
                reader = BoundSedem(model, plan.k, decoding_of(plan))
                subject = Subject(name, reader, model.decoder)
            else:
                own = with_random_baseline(name, plan) if name in TRAINED else plan
                budgeted = METHODS[name].load().has_selection_budget
                method = open_method(name, own if budgeted else own.with_changes(k=None))
                reads_text = isinstance(method.reader, FullContext)
                subject = Subject(name, method.reader, method.backbone, reads_text)
            subjects.append(subject)
        except ConfigError as error:
            left_out[name] = str(error)
    if not subjects:
        raise ConfigError("; ".join(dict.fromkeys(left_out.values())) or "name a method")
    for subject in subjects:
        if subject.backbone is not None:
            subject.backbone.eos_token_id = NO_TOKEN
    return subjects, left_out


def open_sedem(
    plan: BenchPlan, block_context: BlockContext | None = None, kept: KeptBudget | None = NOTHING
) -> SeDeM:
    """Open SeDeM; by default it keeps no keys and values between answers.

    Args:
        block_context: replaces the checkpoint's own, without training: times hold, answers do not.
    """
    dtype = getattr(torch, plan.dtype)
    model = SeDeM.from_pretrained(plan.checkpoint, dtype=dtype, device=plan.device, engine="eager")
    # The same prompt for all methods, and one end token, which the bench disables. A quotation
    # comes as a whole, so it would have no first token.
    changes = {"chat_template": False, "answer": "free"}
    changes |= {} if block_context is None else {"block_context": block_context}
    model.config = model.config.with_changes(**changes)
    # A fast engine reads the configuration when it is opened, so it is opened afterwards.
    model.engine = open_engine(plan.engine, model, budget=kept)
    budget_of(model, plan.k)
    return model


@contextmanager
def checkpoint_of(plan: BenchPlan) -> Iterator[BenchPlan]:
    """The plan with a checkpoint; one with random weights is removed after the bench."""
    if plan.backbone is None:
        yield plan
        return
    with tempfile.TemporaryDirectory() as place:
        folder, name, dtype = Path(place), plan.backbone, getattr(torch, plan.dtype)
        config, encoder, decoder = model_shapes(name)
        tokenizer = locate(SMALL_MODEL) / BACKBONE if name in PRESETS else Path(name)
        shapes = {"encoder": encoder, **({"decoder": decoder} if config.cross_model else {})}
        torch.manual_seed(0)
        for part, shape in shapes.items():
            # A CPU takes minutes to draw billions of random numbers.
            with plan.place:
                backbone = empty_model(shape, dtype=dtype)
            backbone.save_pretrained(folder / part)
            for file in TOKENIZER:
                if not (tokenizer / file).is_file():
                    raise ConfigError(
                        f"backbone '{name}' has no {file}; give {', '.join(PRESETS)}, or a folder "
                        f"with {' and '.join(TOKENIZER)} (a trained model is given with -m)"
                    )
                shutil.copy(tokenizer / file, folder / part / file)
        config = config.with_changes(**{part: str(folder / part) for part in shapes})
        model = SeDeM(config, *open_backbones(config, dtype=dtype, device=plan.place))
        if config.lora_rank:
            model.decoder.add_lora(config.lora_rank, config.lora_alpha)
        model.save_pretrained(folder / "checkpoint")
        yield plan.with_changes(checkpoint=str(folder / "checkpoint"))


def with_random_baseline(name: str, plan: BenchPlan) -> BenchPlan:
    """Write a trained baseline beside the random checkpoint of SeDeM, on the same decoder.

    Returns:
        The plan to open it with.

    Raises:
        ConfigError: the plan has no shape, or the paper's settings of the method do not fit it.
    """
    if plan.backbone is None:
        raise ConfigError("a trained baseline has random weights here; name a --backbone")
    kind, sedem = reader_class(name), Path(plan.checkpoint)
    config = SedemConfig.load(sedem, extra=EXTRA_ENTRIES)
    backbone = config.decoder or config.encoder
    opened = open_backbone(backbone, dtype=getattr(torch, plan.dtype), device=plan.place)
    kind(kind.Config(backbone=backbone), opened).save_pretrained(sedem.with_name(name))
    return plan.with_changes(checkpoint=str(sedem.with_name(name)))

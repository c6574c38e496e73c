"""What `sedem adapt` trains: the model's shape, the budgets, and the recipes of both stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from sedem.backbone.decoder import Backbone
from sedem.checkpoint.folder import EXTRA_ENTRIES, is_checkpoint, locate, open_named
from sedem.checkpoint.portable import portable_name
from sedem.checkpoint.untrained import middle_layer
from sedem.config import SedemConfig
from sedem.errors import ConfigError
from sedem.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem.training.stage1_losses import Stage1Losses
from sedem.training.stage2 import Stage2Losses
from sedem.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe
from sedem.validation import NumberFrom0, Settings, Whole, WholeAbove0

DOCUMENTS, QUESTIONS, HELD_OUT = "documents.jsonl", "questions.jsonl", "held-out.jsonl"
"""Files of the working folder that the recipes read."""

BATCH = 8
"""Windows or questions per step."""
CONTINUATION = 64
"""Maximum tokens after a window that its memory is trained to predict."""
WINDOWS = 256
"""Maximum held-out windows whose losses are evaluated."""
PASSES = (8, 4)
"""Passes over windows and over questions, if the number of steps is within the bounds."""
FEWEST, MOST = (300, 200), (20_000, 10_000)
"""Minimum and maximum steps of stage 1 and of stage 2."""

NEW = {"compressor": 1e-4, "decompressor": 1e-3, "selector": 5e-4, "lora": 3e-4, "guidance": 1e-2}
"""Learning rates of untrained parts, as in the nano recipes."""
TRAINED = {**NEW, "decompressor": 2e-4, "selector": 2e-4}
"""Learning rates of parts from a checkpoint, as used to train sedem-nano further."""


class Adaptation(Settings):
    """A user's request to `sedem adapt`, apart from the documents.

    Attributes:
        backbone: folder or hub id of a backbone, or a checkpoint, which is trained further.
        steps: steps of both stages; None derives them from the size of the documents.
        compression: C; None means the checkpoint's, or the paper's.
        layer: layers before states are read and injected; None means half of the backbone's.
        segment_length: tokens of a block; None means the checkpoint's, or the paper's.
        held_out: share of the documents that is held out from training.
        seed: seed of all random choices.
    """

    backbone: str
    steps: tuple[WholeAbove0, WholeAbove0] | None = None
    compression: WholeAbove0 | None = None
    layer: WholeAbove0 | None = None
    segment_length: WholeAbove0 | None = None
    held_out: Annotated[NumberFrom0, Field(gt=0, le=0.5)] = 0.1
    seed: Whole = 0


def start_of(wanted: Adaptation) -> tuple[SedemConfig, Backbone, str | None]:
    """Open the model to adapt.

    Returns:
        The shape of the model, the backbone that reads, and the checkpoint to start from. The
        checkpoint is None for a plain backbone, whose other parts are new.

    Raises:
        ConfigError: the backbone cannot be used, or a checkpoint has another shape than requested.
        CheckpointError: weights are missing or damaged.
    """
    if not is_checkpoint(wanted.backbone):
        backbone = open_named(wanted.backbone, None, None, dtype=torch.bfloat16)
        layer = middle_layer(backbone, wanted.backbone, wanted.layer)
        given = {"segment_length": wanted.segment_length, "compression": wanted.compression}
        config = SedemConfig(
            encoder=portable_name(wanted.backbone),
            extract_layers=(layer,),
            inject_layer=layer,
            block_context="independent",
            guidance=True,
        )
        changes = {name: value for name, value in given.items() if value is not None}
        return config.with_changes(**changes), backbone, None
    folder = locate(wanted.backbone)
    config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
    asked = {
        "compression": (wanted.compression, config.compression),
        "segment_length": (wanted.segment_length, config.segment_length),
        "layer": (wanted.layer, config.inject_layer),
    }
    for name, (value, found) in asked.items():
        if value not in (None, found):
            raise ConfigError(
                f"{name} is {value}, but checkpoint '{wanted.backbone}' has {found}, which it "
                "keeps; leave it out, or adapt a backbone"
            )
    backbone = open_named(config.encoder, config.encoder_revision, folder, dtype=torch.bfloat16)
    # The confidence was fitted to scores that will change. Adapters are needed to learn to answer.
    config = config.with_changes(confidence=False)
    if not config.lora_rank:
        fields = SedemConfig.model_fields
        rank, alpha = fields["lora_rank"].default, fields["lora_alpha"].default
        config = config.with_changes(lora_rank=rank, lora_alpha=alpha)
    start = str(folder.resolve()) if Path(wanted.backbone).is_dir() else wanted.backbone
    return config, backbone, start


def steps_of(wanted: Adaptation, windows: int, questions: int) -> tuple[int, int]:
    """Steps of both stages: those requested, or several passes within bounds.

    Args:
        wanted: the request, which may give the steps.
        windows: number of windows in a pass.
        questions: number of questions in a pass.
    """
    if wanted.steps is not None:
        return wanted.steps
    one, two = (
        min(max(count * passes // BATCH, fewest), most)
        for count, passes, fewest, most in zip(
            (windows, questions), PASSES, FEWEST, MOST, strict=True
        )
    )
    return one, two


def continuation_of(config: SedemConfig) -> int:
    """Tokens after a window; at most a window, because a span of the window may replace them."""
    return min(CONTINUATION, config.segment_length)


def recipes(
    wanted: Adaptation,
    config: SedemConfig,
    start: str | None,
    folder: Path,
    steps: tuple[int, int],
    held_out: int,
) -> tuple[Stage1Recipe, Stage2Recipe]:
    """The recipes of both stages, in the form that `sedem train` takes.

    Args:
        wanted: gives the seed.
        config: the shape of the model.
        start: the checkpoint to start from; None means new parts.
        folder: the working folder, with the data.
        steps: steps of each stage.
        held_out: number of texts at the end of the documents that are held out.
    """
    places: dict[str, Any] = {"data_root": str(folder), "cache": str(folder / "cache")}
    rates = NEW if start is None else TRAINED
    first = Stage1Recipe(
        model=config,
        text=TextSource(
            path=DOCUMENTS,
            continuation=continuation_of(config),
            held_out=held_out,
            evaluation_windows=WINDOWS,
        ),
        optimization=_optimization(rates, ("compressor", "decompressor"), steps[0], wanted.seed),
        run=_run(folder / "stage1", steps[0]),
        losses=_stage1_losses(config, new=start is None),
        start_from=start,
        **places,
    )
    parts = ("compressor", "decompressor", "selector", "lora", "guidance")
    second = Stage2Recipe(
        model=config,
        start_from=str(folder / "stage1" / "final"),
        data=Stage2Data(
            training=(DataSource(path=QUESTIONS),),
            evaluation=(DataSource(path=HELD_OUT),),
            max_blocks=12,
            budgets=(1, 2, 2, 4),
            # Caching frozen states is worth the disk space where steps are slow.
            cache_states=not torch.cuda.is_available(),
        ),
        optimization=_optimization(rates, parts, steps[1], wanted.seed),
        run=_run(folder / "stage2", steps[1]),
        losses=Stage2Losses(normalize_scores=True, reconstruct=0.0),
        **places,
    )
    return first, second


def _stage1_losses(config: SedemConfig, *, new: bool) -> Stage1Losses:
    """The losses of sedem-nano; new parts learn the decoder's own states first."""
    if config.decompressor == "none":
        return Stage1Losses(distill=0.0, reconstruct=0.0)
    losses = Stage1Losses(reconstruct=0.5, recall=0.35)
    if config.cross_model:
        return losses  # the tokenizers may differ, so states would stand for different tokens
    return losses.with_changes(regress=1.0 if new else 0.1, regress_first=0.6 if new else 0.0)


def _optimization(
    rates: dict[str, float], parts: tuple[str, ...], steps: int, seed: int
) -> Optimization:
    # A CPU without bfloat16 instructions emulates them, two to four times slower.
    half = torch.cuda.is_available()
    return Optimization(
        learning_rates={name: rates[name] for name in parts},
        steps=steps,
        batch_size=BATCH,
        warmup_ratio=0.05,
        weight_decay=0.01,
        bf16=half,
        backbone_dtype="bfloat16" if half else "float32",
        seed=seed,
    )


def _run(output: Path, steps: int) -> RunSettings:
    return RunSettings(
        output=str(output),
        log_every=max(1, steps // 50),
        save_every=max(1, steps // 20),
        keep=1,
    )

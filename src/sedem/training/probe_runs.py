"""The runs of a probe: short stage-1 trainings on the same windows, measured on others."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.data.tokenized_corpus import TOKENIZED_TOGETHER, TokenizedCorpus
from sedem.data.windows import Windows
from sedem.errors import DataError
from sedem.evaluation.continuation import continuation_losses
from sedem.evaluation.results import read_json, write_json
from sedem.evaluation.storage import state_bytes_per_token
from sedem.model import SeDeM
from sedem.provenance import provenance
from sedem.training.fit import fit
from sedem.training.recipe import Optimization, RunSettings, TextSource
from sedem.training.run_setup import processes, start_run
from sedem.training.stage1 import Stage1
from sedem.training.stage1_losses import Stage1Losses
from sedem.training.stages import Stage1Recipe, calibrate
from sedem.validation import Flag, NumberAbove0, Settings, Whole, WholeAbove0, WholeFrom0

LOSSES = Stage1Losses(reconstruct=0.5, regress=1.0, regress_first=0.6, recall=0.35)
"""The losses of the nano study: the regression teaches most in few steps, and costs least."""

Progress = Callable[[int, int], None]


class ProbeSettings(Settings):
    """What a probe tries, and for how long.

    Attributes:
        layers: pairs of extraction and injection layer; empty means quarters of the depth, with the
            injection no deeper than the extraction, as in the paper's best rows.
        compressions: values of C.
        full_grid: try every compression at every pair.
        steps: optimizer steps of one run.
        batch_size: windows of one step.
        held_out: windows to measure on.
        segment_length: T.
        continuation: A, tokens after each context.
        learning_rate: of the decompressor; the compressor's is a tenth.
        seed: seed of windows and initial weights.
    """

    layers: tuple[tuple[WholeAbove0, WholeFrom0], ...] = ()
    compressions: Annotated[tuple[WholeAbove0, ...], Field(min_length=1)] = (1, 2, 4)
    full_grid: Flag = False
    steps: WholeAbove0 = 100
    batch_size: WholeAbove0 = 16
    held_out: WholeAbove0 = 64
    segment_length: WholeAbove0 = 128
    continuation: WholeAbove0 = 64
    learning_rate: NumberAbove0 = 1e-3
    seed: Whole = 0


class Candidate(NamedTuple):
    """One configuration that is tried."""

    extract: int
    inject: int
    compression: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"extract-{self.extract}.inject-{self.inject}.c{self.compression}"


def cut_windows(
    texts: Iterator[str], backbone: Backbone, settings: ProbeSettings
) -> Subset[dict[str, Any]]:
    """Windows to train on, then windows to measure on; no window is seen twice.

    Raises:
        DataError: the texts do not have enough of them.
    """
    width = settings.segment_length + settings.continuation
    seen = settings.steps * settings.batch_size
    needed = seen + settings.held_out
    rows: list[list[int]] = []
    found = 0
    while found < needed and (together := list(islice(texts, TOKENIZED_TOGETHER))):
        new = backbone.tokenize(together)["input_ids"]
        rows += new
        # The first window of a text starts at a random token, which can cost one window.
        found += sum(max(len(ids) // width - 1, int(len(ids) >= width)) for ids in new)
    if found:
        bounds = np.cumsum([0, *map(len, rows)])
        windows = Windows(
            TokenizedCorpus(np.concatenate([np.asarray(ids) for ids in rows]), bounds),
            settings.segment_length,
            settings.continuation,
            settings.seed,
        )
        found = len(windows)
    if found < needed:
        raise DataError(
            f"the documents have {found:,} windows of {width} tokens, a probe needs {needed:,}: "
            f"{settings.steps} steps of {settings.batch_size}, and {settings.held_out} to measure "
            "on; give more or longer documents, or fewer steps"
        )
    return Subset(windows, range(needed))


class Runs:
    """The runs of one probe, and their files.

    Args:
        backbone: the opened backbone, which all runs share.
        windows: windows to train on, then windows to measure on.
        settings: settings of the probe.
        out: folder of the files.
        count: number of runs.
        progress: as for `probe`.
    """

    def __init__(
        self,
        backbone: Backbone,
        windows: Subset[dict[str, Any]],
        settings: ProbeSettings,
        out: Path,
        count: int,
        progress: Progress,
    ) -> None:
        seen = settings.steps * settings.batch_size
        self.training = Subset(windows, range(seen))
        self.held_out = Subset(windows, range(seen, len(windows)))
        self.backbone, self.settings, self.out = backbone, settings, out
        self.count, self.progress, self.finished = count, progress, 0

    def row(self, candidate: Candidate) -> dict[str, Any]:
        """Result of a candidate, from its file if it exists."""
        path = self.out / f"{candidate.name}.json"
        found = read_json(path)
        if found is None:
            found = {"run": self._run(candidate), **provenance(self.backbone.device)}
            write_json(path, found)
        self.finished += 1
        self._show(0)
        row: dict[str, Any] = found["run"]
        return row

    def ends(self, candidate: Candidate) -> dict[str, Any]:
        """Losses with the text itself and with nothing, which are the same for every candidate."""
        path = self.out / "ends.json"
        found = read_json(path)
        if found is None:
            found = self._losses(self._model(candidate), ("raw_text", "nothing"))
            write_json(path, found)
        return found

    def _run(self, candidate: Candidate) -> dict[str, Any]:
        started, settings = time.time(), self.settings
        folder = self.out / f"run-{candidate.name}"
        recipe = Stage1Recipe(
            model=config_of(candidate, self.backbone, settings),
            text=TextSource(path="documents of a probe", continuation=settings.continuation),
            optimization=optimization_of(settings),
            run=RunSettings(
                output=str(folder), log_every=settings.steps, save_every=settings.steps
            ),
            losses=LOSSES,
        )
        start_run(recipe)
        model = self._model(candidate)
        stage = Stage1(model, LOSSES, settings.seed)
        calibrate(stage, self.training)
        fit(stage, model, recipe, folder, self.training, None, progress=self._show)
        losses = self._losses(model, ("true_states", "memory"))
        shutil.rmtree(folder)
        return {
            "extract_layers": [candidate.extract],
            "inject_layer": candidate.inject,
            "compression": candidate.compression,
            "bytes_per_token": state_bytes_per_token(self.backbone.model.config)
            / candidate.compression,
            **losses,
            "seconds": round(time.time() - started, 1),
        }

    def _model(self, candidate: Candidate) -> SeDeM:
        config = config_of(candidate, self.backbone, self.settings)
        model = SeDeM(config, self.backbone, self.backbone)
        model.parts().to(self.backbone.device)
        return model

    def _losses(self, model: SeDeM, conditions: Sequence[str]) -> dict[str, Any]:
        return continuation_losses(model, self.held_out, lambda done, total: None, conditions)

    def _show(self, step: int) -> None:
        steps = self.settings.steps
        self.progress(self.finished * steps + step, self.count * steps)


def config_of(candidate: Candidate, backbone: Backbone, settings: ProbeSettings) -> SedemConfig:
    """The model of a candidate, without adapters, which belong to stage 2."""
    return SedemConfig(
        encoder=backbone.name,
        extract_layers=(candidate.extract,),
        inject_layer=candidate.inject,
        compression=candidate.compression,
        segment_length=settings.segment_length,
        lora_rank=0,
    )


def optimization_of(settings: ProbeSettings) -> Optimization:
    """Mixed precision on a GPU only; many CPUs emulate it slowly."""
    on_gpu = processes().device.type == "cuda"
    rate = settings.learning_rate
    return Optimization(
        learning_rates={"compressor": rate / 10, "decompressor": rate},
        steps=settings.steps,
        batch_size=settings.batch_size,
        warmup_ratio=0.1,
        bf16=on_gpu,
        backbone_dtype="bfloat16" if on_gpu else "float32",
        seed=settings.seed,
    )

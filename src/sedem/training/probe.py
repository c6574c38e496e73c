"""Short stage-1 runs that choose layers and compression for an untried backbone. Ours.

Every candidate is trained on the same windows in the same order, and measured on others. The
depths are compared first, at the largest compression, then the compressions at the best depths.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.checkpoint.folder import open_named
from sedem.config import SedemConfig
from sedem.data.corpus import TOKENIZED_TOGETHER, TokenizedCorpus, read_texts
from sedem.data.windows import Windows
from sedem.errors import ConfigError, DataError
from sedem.evaluation.continuation import continuation_losses
from sedem.evaluation.results import claim, read_json, write_json
from sedem.evaluation.storage import state_bytes_per_token
from sedem.model import SeDeM
from sedem.modules import check_layers
from sedem.pictures import pyplot_module, save
from sedem.provenance import provenance
from sedem.training.fit import fit
from sedem.training.recipe import Optimization, RunSettings, TextSource
from sedem.training.run_setup import backbone_options, start_run
from sedem.training.stage1 import Stage1, Stage1Losses
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
        continuation: A, tokens after each context.
        learning_rate: of the decompressor; the compressor's is a tenth.
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


class Depths(NamedTuple):
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
    """The runs of one probe, and their files."""

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

    def row(self, candidate: Depths) -> dict[str, Any]:
        """Result of a candidate."""
        found = self._kept(
            candidate.name,
            lambda: {"run": self._run(candidate), **provenance(self.backbone.device)},
        )
        self.finished += 1
        self._show(0)
        row: dict[str, Any] = found["run"]
        return row

    def ends(self, candidate: Depths) -> dict[str, Any]:
        """Losses with the text itself and with nothing, which are the same for every candidate."""
        conditions = "raw_text", "nothing"
        return self._kept("ends", lambda: self._losses(self._model(candidate), conditions))

    def _kept(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A result from its file, measured if the file does not exist."""
        path = self.out / f"{name}.json"
        found = read_json(path)
        if found is None:
            found = measure()
            write_json(path, found)
        return found

    def _run(self, candidate: Depths) -> dict[str, Any]:
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
        size = state_bytes_per_token(self.backbone.model.config)
        return {
            "extract_layers": [candidate.extract],
            "inject_layer": candidate.inject,
            "compression": candidate.compression,
            "bytes_per_token": size / candidate.compression,
            **losses,
            "seconds": round(time.time() - started, 1),
        }

    def _model(self, candidate: Depths) -> SeDeM:
        config = config_of(candidate, self.backbone, self.settings)
        model = SeDeM(config, self.backbone, self.backbone)
        model.parts().to(self.backbone.device)
        return model

    def _losses(self, model: SeDeM, conditions: Sequence[str]) -> dict[str, Any]:
        return continuation_losses(model, self.held_out, lambda done, total: None, conditions)

    def _show(self, step: int) -> None:
        steps = self.settings.steps
        self.progress(self.finished * steps + step, self.count * steps)


def config_of(candidate: Depths, backbone: Backbone, settings: ProbeSettings) -> SedemConfig:
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
    """Mixed precision wherever the machine has it."""
    rate = settings.learning_rate
    return Optimization(
        learning_rates={"compressor": rate / 10, "decompressor": rate},
        steps=settings.steps,
        batch_size=settings.batch_size,
        warmup_ratio=0.1,
        seed=settings.seed,
    )


SHARES = (0.25, 0.5, 0.75)
"""Candidate depths, as shares of the decoder's layers."""
LEAST_DEPTH = 4
"""Minimum number of layers for which these shares are three different ones."""
KEPT = 0.9
"""A larger compression is recommended if it keeps this share of what the best one keeps."""
RESULT, PICTURE = "probe.json", "probe.png"


def probe(
    name: str, texts: Iterator[str], settings: ProbeSettings, out: Path, progress: Progress
) -> dict[str, Any]:
    """Train and measure every candidate; results of an earlier call are reused.

    Args:
        name: folder or hub id of the backbone.
        texts: the documents; no more are read than the windows need.
        progress: called with the finished steps and the total steps of all runs.

    Returns:
        Both ends (with the text itself, and with nothing), a row for every candidate, best first,
        and the recommended candidate.

    Raises:
        ConfigError: the backbone or a setting cannot be used, or `out` has other results.
        DataError: the texts are too short.
    """
    backbone = open_named(name, None, None, **backbone_options(optimization_of(settings)))
    pairs = list(dict.fromkeys(settings.layers or quarters(backbone)))
    compressions = sorted(set(settings.compressions), reverse=True)
    first = compressions if settings.full_grid else compressions[:1]
    depths = [Depths(*pair, c) for pair in pairs for c in first]
    for pair in pairs:
        for compression in settings.compressions:
            config = config_of(Depths(*pair, compression), backbone, settings)
            check_layers(config, backbone, backbone)
    windows = cut_windows(texts, backbone, settings)
    tokens = hashlib.sha256()
    for index in range(len(windows)):
        for ids in windows[index].values():
            tokens.update(ids.tobytes())
    given = {"backbone": backbone.digest, "text": tokens.hexdigest()}
    claim(out, {**given, "settings": settings.to_dict()})
    left = compressions[len(first) :]
    runs = Runs(backbone, windows, settings, out, len(depths) + len(left), progress)
    rows = [runs.row(candidate) for candidate in depths]
    best = best_pair(rows)
    rows += [runs.row(Depths(*best, compression)) for compression in left]
    rows.sort(key=lambda row: (_loss(row), row["bytes_per_token"]))
    result = {
        "backbone": {"name": name, "layers": backbone.depth, "digest": backbone.digest},
        "settings": settings.to_dict(),
        "ends": runs.ends(depths[0]),
        "runs": rows,
        **provenance(backbone.device),
    }
    result["recommended"] = recommended(result)
    write_json(out / RESULT, result)
    return result


def read_documents(paths: Iterable[Path]) -> Iterator[str]:
    """Read the texts of files and folders, one at a time.

    Raises:
        DataError: there is no such file, or it cannot be read.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no file or folder '{path}'")
        yield from read_texts(path)


def quarters(backbone: Backbone) -> list[tuple[int, int]]:
    """Pairs of extraction and injection layer at quarters of the depth.

    Raises:
        ConfigError: the backbone has too few layers.
    """
    if backbone.depth < LEAST_DEPTH:
        raise ConfigError(
            f"backbone '{backbone.name}' has {backbone.depth} layers; a probe compares quarters of "
            f"the depth and needs at least {LEAST_DEPTH}: name the layers to try with --layers"
        )
    layers = [round(share * backbone.depth) for share in SHARES]
    return [(extract, inject) for inject in layers for extract in layers if extract >= inject]


def best_pair(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The layer pair with the lowest loss, over the compressions that every pair was tried with."""
    tried: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        tried.setdefault(_pair(row), {})[row["compression"]] = _loss(row)
    common = set.intersection(*map(set, tried.values()))
    return min(tried, key=lambda pair: sum(tried[pair][c] for c in common))


def recommended(result: dict[str, Any]) -> dict[str, Any]:
    """The recommended row: the best layers, and the largest compression that costs little."""
    best = best_pair(result["runs"])
    rows = sorted((r for r in result["runs"] if _pair(r) == best), key=lambda r: -r["compression"])
    most = max(kept(row, result["ends"]) for row in rows)
    return next(row for row in rows if kept(row, result["ends"]) >= min(most, KEPT * most))


def kept(row: dict[str, Any], ends: dict[str, Any]) -> float:
    """Share of the text's benefit to its continuation that memory keeps: 0 is none, 1 is all.

    It is also 0 if the text itself gives no benefit, as for a random decoder.
    """
    text, nothing = (float(ends["continuation"][end]["mean"]) for end in ("raw_text", "nothing"))
    return (nothing - _loss(row)) / (nothing - text) if text < nothing else 0.0


def _pair(row: dict[str, Any]) -> tuple[int, int]:
    return row["extract_layers"][0], row["inject_layer"]


def _loss(row: dict[str, Any]) -> float:
    return float(row["continuation"]["memory"]["mean"])


COLORS = ("#1b6ca8", "#b7791f", "#2f855a", "#9b2c2c", "#6b46c1", "#4a5568")
GREY = "#718096"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a probe.

    The left panel compares layers at the largest compression, the right one the compressions at the
    recommended layers. Lower is better. Dotted lines are the two ends: with nothing, and with the
    text itself. The dashed line is the loss with the decoder's own states, without any memory.
    """
    figure, (depths, sizes) = pyplot_module().subplots(
        1, 2, figsize=(10, 4.4), sharey=True, layout="constrained"
    )
    _depths(depths, result)
    _sizes(sizes, result)
    for axis in (depths, sizes):
        for end, name in (("nothing", "nothing"), ("raw_text", "the text itself")):
            loss = result["ends"]["continuation"][end]["mean"]
            axis.axhline(loss, color=GREY, linewidth=0.9, linestyle=":")
            axis.annotate(
                name, (0.01, loss), xycoords=("axes fraction", "data"), xytext=(0, 3),
                textcoords="offset points", color=GREY, fontsize=8,
            )  # fmt: skip
        axis.grid(alpha=0.3)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    depths.set_ylabel("held-out loss, nats a token")
    handles, labels = depths.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    backbone, steps = result["backbone"], result["settings"]["steps"]
    name = Path(backbone["name"]).name
    figure.suptitle(f"{name}, {backbone['layers']} layers, {steps} steps a run", fontsize=10)
    save(figure, path)


def _depths(axis: Any, result: dict[str, Any]) -> None:
    largest = max(row["compression"] for row in result["runs"])
    rows = [row for row in result["runs"] if row["compression"] == largest]
    rows.sort(key=lambda row: row["inject_layer"])

    def plot(rows: list[dict[str, Any]], condition: str, style: str, **options: Any) -> None:
        losses = [row["continuation"][condition]["mean"] for row in rows]
        axis.plot([row["inject_layer"] for row in rows], losses, style, **options)

    for number, extract in enumerate(sorted({_pair(row)[0] for row in rows})):
        own = [row for row in rows if _pair(row)[0] == extract]
        color, label = COLORS[number % len(COLORS)], f"extracted after layer {extract}"
        plot(own, "memory", "o-", color=color, label=label)
    plot(rows, "true_states", "--", color=GREY, label="own states, not a memory")
    axis.set_xticks(sorted({row["inject_layer"] for row in rows}))
    axis.set(title=f"layers, at C={largest}", xlabel="injected after layer")


def _sizes(axis: Any, result: dict[str, Any]) -> None:
    chosen = result["recommended"]
    extract, inject = _pair(chosen)
    rows = [row for row in result["runs"] if _pair(row) == (extract, inject)]
    rows.sort(key=lambda row: row["bytes_per_token"])
    sizes = [row["bytes_per_token"] for row in rows]
    axis.plot(sizes, [_loss(row) for row in rows], "o-", color=COLORS[0])
    for row, size in zip(rows, sizes, strict=True):
        text, place = f"C={row['compression']}" + "\nrecommended" * (row == chosen), _loss(row)
        axis.annotate(text, (size, place), xytext=(0, 6), textcoords="offset points", ha="center")
    # The axis is logarithmic: sizes that halve are equally spaced, so labels do not overlap.
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
    axis.minorticks_off()
    title = f"compression, layers {extract} to {inject}"
    axis.set(title=title, xlabel="bytes of memory a token")

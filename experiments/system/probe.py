"""Short stage-1 runs that choose layers and compression for an untried backbone. Ours.

Every candidate is trained on the same windows in the same order, and measured on others. The
depths are compared first, at the largest compression, then the compressions at the best depths.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.checkpoint.folder import open_named
from sedem.config import NumberAbove0, SedemConfig, Settings, WholeAbove0, WholeFrom0
from sedem.errors import ConfigError, DataError
from sedem.model import SeDeM
from sedem.modules import check_layers
from sedem_lab.data.corpus import TOKENIZED_TOGETHER, TokenizedCorpus
from sedem_lab.data.windows import Windows
from sedem_lab.evaluation.continuation import continuation_losses
from sedem_lab.evaluation.results import claim, read_json, write_json
from sedem_lab.evaluation.storage import state_bytes_per_token
from sedem_lab.provenance import provenance
from sedem_lab.training.fit import fit
from sedem_lab.training.recipe import (
    Optimization,
    RunSettings,
    TextSource,
)
from sedem_lab.training.run_setup import backbone_options, start_run
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stages import Stage1Recipe, calibrate

LOSSES = Stage1Losses(reconstruct=0.5, regress=1.0, regress_first=0.6, recall=0.35)
"""The losses of the nano study: the regression teaches most in few steps, and costs least."""
SHARES = (0.25, 0.5, 0.75)
"""Candidate depths, as shares of the decoder's layers."""
LEAST_DEPTH = 4
"""Minimum number of layers for which these shares are three different ones."""
KEPT = 0.9
"""A larger compression is recommended if it keeps this share of what the best one keeps."""
SEED = 0


class ProbeSettings(Settings):
    """What a probe tries, and for how long.

    Attributes:
        layers: pairs of extraction and injection layer; empty means quarters of the depth, with the
            injection no deeper than the extraction, as in the paper's best rows.
        compressions: values of C.
        continuation: A, tokens after each context.
        learning_rate: of the decompressor; the compressor's is a tenth.
    """

    layers: tuple[tuple[WholeAbove0, WholeFrom0], ...] = ()
    compressions: Annotated[tuple[WholeAbove0, ...], Field(min_length=1)] = (1, 2, 4)
    steps: WholeAbove0 = 100
    batch_size: WholeAbove0 = 16
    held_out: WholeAbove0 = 64
    segment_length: WholeAbove0 = 128
    continuation: WholeAbove0 = 64
    learning_rate: NumberAbove0 = 1e-3

    @property
    def optimization(self) -> Optimization:
        """That of one run, in mixed precision wherever the machine has it."""
        rates = {"compressor": self.learning_rate / 10, "decompressor": self.learning_rate}
        of_steps = {"steps": self.steps, "batch_size": self.batch_size}
        return Optimization(learning_rates=rates, warmup_ratio=0.1, seed=SEED, **of_steps)


def probe(
    name: str,
    texts: Iterator[str],
    settings: ProbeSettings,
    out: Path,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train and measure every candidate; results of an earlier call are reused.

    Args:
        name: folder or hub id of the backbone.
        texts: the documents; no more are read than the windows need.
        report: called with what begins.

    Returns:
        Both ends (with the text itself, and with nothing), a row for every candidate, best first,
        and the recommended candidate.
    """
    backbone = open_named(name, None, None, **backbone_options(settings.optimization))
    pairs = list(dict.fromkeys(settings.layers or quarters(backbone)))
    largest, *smaller = sorted(set(settings.compressions), reverse=True)

    def candidate(pair: tuple[int, int], compression: int) -> SedemConfig:
        """Its configuration, without adapters, which belong to stage 2."""
        own = {"extract_layers": pair[:1], "inject_layer": pair[1], "compression": compression}
        length = settings.segment_length
        return SedemConfig(encoder=backbone.name, segment_length=length, lora_rank=0, **own)

    for pair in pairs:
        for compression in (largest, *smaller):
            check_layers(candidate(pair, compression), backbone, backbone)
    windows = cut_windows(texts, backbone, settings)
    tokens = hashlib.sha256()
    for index in range(len(windows)):
        for ids in windows[index].values():
            tokens.update(ids.tobytes())
    given = {"backbone": backbone.digest, "text": tokens.hexdigest()}
    claim(out, {**given, "settings": settings.to_dict()})
    seen = settings.steps * settings.batch_size
    training, held_out = Subset(windows, range(seen)), Subset(windows, range(seen, len(windows)))

    def untrained(config: SedemConfig) -> SeDeM:
        model = SeDeM(config, backbone, backbone)
        model.parts().to(backbone.device)
        return model

    def losses(model: SeDeM, *conditions: str) -> dict[str, Any]:
        return continuation_losses(model, held_out, conditions)

    def kept_in(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A result from its file, measured if the file does not exist."""
        path = out / f"{name}.json"
        if (found := read_json(path)) is None:
            report(name)
            found = measure()
            write_json(path, found)
        return found

    def row(config: SedemConfig) -> dict[str, Any]:
        [extract], inject = config.extract_layers, config.inject_layer
        compression = config.compression
        file = f"extract-{extract}.inject-{inject}.c{compression}"

        def run() -> dict[str, Any]:
            started, folder = time.time(), out / f"run-{file}"
            steps = settings.steps
            recipe = Stage1Recipe(
                model=config,
                text=TextSource(path="documents of a probe", continuation=settings.continuation),
                optimization=settings.optimization,
                run=RunSettings(output=str(folder), log_every=steps, save_every=steps),
                losses=LOSSES,
            )
            start_run(recipe)
            model = untrained(config)
            stage = Stage1(model, LOSSES, SEED)
            calibrate(stage, training)
            fit(stage, model, recipe, training, None, shown=False)
            shutil.rmtree(folder)  # no checkpoint is kept
            found = {
                "extract_layers": [extract],
                "inject_layer": inject,
                "compression": compression,
                "bytes_per_token": state_bytes_per_token(backbone.model.config) / compression,
                **losses(model, "true_states", "memory"),
                "seconds": round(time.time() - started, 1),
            }
            return {"run": found, **provenance(backbone.device)}

        return dict(kept_in(file, run)["run"])

    rows = [row(candidate(pair, largest)) for pair in pairs]
    best = min(rows, key=_loss)
    chosen = best["extract_layers"][0], best["inject_layer"]
    rows += [row(candidate(chosen, compression)) for compression in smaller]
    rows.sort(key=lambda row: (_loss(row), row["bytes_per_token"]))
    # The same for every candidate: losses with the text itself, and with nothing.
    plain = untrained(candidate(chosen, largest))
    ends = kept_in("ends", lambda: losses(plain, "raw_text", "nothing"))
    result = {
        "backbone": {"name": name, "layers": backbone.depth, "digest": backbone.digest},
        "settings": settings.to_dict(),
        "ends": ends,
        "runs": rows,
        "recommended": recommended(rows, chosen, ends),
        **provenance(backbone.device),
    }
    write_json(out / "probe.json", result)
    return result


def quarters(backbone: Backbone) -> list[tuple[int, int]]:
    """Pairs of extraction and injection layer at quarters of the depth."""
    if backbone.depth < LEAST_DEPTH:
        raise ConfigError(
            f"backbone '{backbone.name}' has {backbone.depth} layers; a probe compares quarters of "
            f"the depth and needs at least {LEAST_DEPTH}: name the layers to try with --layers"
        )
    layers = [round(share * backbone.depth) for share in SHARES]
    return [(extract, inject) for inject in layers for extract in layers if extract >= inject]


def cut_windows(
    texts: Iterator[str], backbone: Backbone, settings: ProbeSettings
) -> Subset[dict[str, Any]]:
    """Windows to train on, then windows to measure on; no window is seen twice."""
    needed = settings.steps * settings.batch_size + settings.held_out
    width = settings.segment_length + settings.continuation
    rows: list[list[int]] = []
    found = 0
    while found < needed and (together := list(islice(texts, TOKENIZED_TOGETHER))):
        new = backbone.tokenize(together)["input_ids"]
        rows += new
        # The first window of a text starts at a random token, which can cost one window.
        found += sum(max(len(ids) // width - 1, int(len(ids) >= width)) for ids in new)
    if found:
        bounds = np.cumsum([0, *map(len, rows)])
        corpus = TokenizedCorpus(np.concatenate([np.asarray(ids) for ids in rows]), bounds)
        windows = Windows(corpus, settings.segment_length, settings.continuation, SEED)
        found = len(windows)
    if found < needed:
        raise DataError(
            f"the documents have {found:,} windows of {width} tokens, a probe needs {needed:,}: "
            f"{settings.steps} steps of {settings.batch_size}, and {settings.held_out} to measure "
            "on; give more or longer documents, or fewer steps"
        )
    return Subset(windows, range(needed))


def recommended(
    rows: Sequence[dict[str, Any]], best: tuple[int, int], ends: dict[str, Any]
) -> dict[str, Any]:
    """The recommended row: the best layers, and the largest compression that costs little."""
    own = [row for row in rows if (row["extract_layers"][0], row["inject_layer"]) == best]
    most = max(kept(row, ends) for row in own)
    enough = [row for row in own if kept(row, ends) >= min(most, KEPT * most)]
    return max(enough, key=lambda row: row["compression"])


def kept(row: dict[str, Any], ends: dict[str, Any]) -> float:
    """Share of the text's benefit to its continuation that memory keeps: 0 is none, 1 is all.

    It is also 0 if the text itself gives no benefit, as for a random decoder.
    """
    text, nothing = (float(ends["continuation"][end]["mean"]) for end in ("raw_text", "nothing"))
    return (nothing - _loss(row)) / (nothing - text) if text < nothing else 0.0


def _loss(row: dict[str, Any]) -> float:
    return float(row["continuation"]["memory"]["mean"])

"""Short stage-1 runs that choose layers and compression for an untried backbone. Ours.

Every candidate is trained on the same windows in the same order, and measured on others. The
depths are compared first, at the largest compression, then the compressions at the best depths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Subset

from sedem.backbone.decoder import Backbone
from sedem.checkpoint.folder import open_named
from sedem.data.corpus import read_texts
from sedem.errors import ConfigError, DataError
from sedem.evaluation.results import claim, write_json
from sedem.modules import check_layers
from sedem.provenance import provenance
from sedem.training.probe_runs import (
    Candidate,
    ProbeSettings,
    Progress,
    Runs,
    config_of,
    cut_windows,
    optimization_of,
)
from sedem.training.run_setup import backbone_options

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
        settings: what to try.
        out: folder of the results.
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
    depths, compressions = _stages(pairs, settings)
    for pair in pairs:
        for compression in settings.compressions:
            config = config_of(Candidate(*pair, compression), backbone, settings)
            check_layers(config, backbone, backbone)
    windows = cut_windows(texts, backbone, settings)
    claim(
        out,
        {
            "backbone": backbone.digest,
            "text": _digest(windows),
            "settings": settings.to_dict(),
        },
    )
    runs = Runs(backbone, windows, settings, out, len(depths) + len(compressions), progress)
    rows = [runs.row(candidate) for candidate in depths]
    best = best_pair(rows)
    rows += [runs.row(Candidate(*best, compression)) for compression in compressions]
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
    """The recommended row: the best layers, and the largest compression that costs little.

    Args:
        result: what `probe` found.
    """
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


def _stages(
    pairs: list[tuple[int, int]], settings: ProbeSettings
) -> tuple[list[Candidate], list[int]]:
    """Candidates that the best pair is chosen from, and compressions left to try on that pair."""
    compressions = sorted(set(settings.compressions), reverse=True)
    first = compressions if settings.full_grid else compressions[:1]
    left = [c for c in compressions if c not in first]
    return [Candidate(*pair, c) for pair in pairs for c in first], left


def _pair(row: dict[str, Any]) -> tuple[int, int]:
    return row["extract_layers"][0], row["inject_layer"]


def _loss(row: dict[str, Any]) -> float:
    return float(row["continuation"]["memory"]["mean"])


def _digest(windows: Subset[dict[str, Any]]) -> str:
    """Hash of the tokens of all windows."""
    digest = hashlib.sha256()
    for index in range(len(windows)):
        for tokens in windows[index].values():
            digest.update(tokens.tobytes())
    return digest.hexdigest()

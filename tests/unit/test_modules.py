"""The trained parts of a model: shapes that suit the backbones, and the fingerprint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from answers import build
from conftest import DEPTH, POSITIONS

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem.modules import SedemModules

# Layers and widths


@pytest.mark.parametrize(
    ("most", "beyond", "message"),
    [
        (
            {"extract_layers": (1, DEPTH)},
            {"extract_layers": (1, DEPTH + 1)},
            f"extract_layers reaches {DEPTH + 1}, encoder '.*' has {DEPTH} layers",
        ),
        (
            {"inject_layer": DEPTH - 1},
            {"inject_layer": DEPTH},
            f"inject_layer is {DEPTH}, decoder '.*' has {DEPTH} layers; at least one must",
        ),
        (
            {"segment_length": POSITIONS - 4},
            {"segment_length": POSITIONS},
            f"segment_length {POSITIONS} and a start token exceed the {POSITIONS} positions",
        ),
        (
            {"compressor": "query", "compressor_heads": 4},
            {"compressor": "query", "compressor_heads": 5},
            "decoder width 32 is not a multiple of compressor_heads 5",
        ),
        (
            {"selector_heads": 5, "selector_dim": 3},
            {"selector_heads": 5},
            "decoder width 32 is not a multiple of selector_heads 5; set selector_dim",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_shape_beyond_its_backbones_is_refused(
    most: dict[str, object],
    beyond: dict[str, object],
    message: str,
    config: SedemConfig,
    backbone: Backbone,
) -> None:
    SedemModules(config.with_changes(**most), backbone, backbone)
    with pytest.raises(ConfigError, match=message):
        SedemModules(config.with_changes(**beyond), backbone, backbone)


# Fingerprints


@pytest.mark.parametrize(
    "changes",
    [
        {"extract_layers": (2,)},
        {"extract_layers": (2, 3)},
        {"segment_length": 32},
        {"segment_shift": 4},
        {"compression": 2},
        {"compression": 8},
        {"block_slots": 2},
        {"compressor": "mlp"},
        {"compressor": "query"},
    ],
    ids=str,
)
def test_what_memory_depends_on_changes_the_fingerprint(
    changes: dict[str, object], model: SeDeM, config: SedemConfig, backbone: Backbone
) -> None:
    assert build(config, backbone, **changes).fingerprint() != model.fingerprint()


@pytest.mark.parametrize(
    "changes",
    [{"inject_layer": 1}, {"k": 5}, {"selector_heads": 2}],
    ids=str,
)
def test_what_memory_does_not_depend_on_leaves_the_fingerprint(
    changes: dict[str, object], model: SeDeM, config: SedemConfig, backbone: Backbone
) -> None:
    assert build(config, backbone, **changes).fingerprint() == model.fingerprint()


def test_the_fingerprint_follows_the_compressors_weights_and_the_encoders(
    model: SeDeM,
    config: SedemConfig,
    backbone: Backbone,
    tiny_folder: Callable[..., str],
) -> None:
    before = model.fingerprint()
    with torch.no_grad():
        model.compressor.w_in.weight[0, 0] += 1e-3
    assert model.fingerprint() != before
    stranger = open_backbone(tiny_folder(seed=7))
    assert SedemModules(config, stranger, stranger).fingerprint() != before
    same = open_backbone(backbone.name)
    assert SeDeM(config, same, same).fingerprint() == before

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


ROOM = POSITIONS - 4  # the last length that is a multiple of a slot


@pytest.mark.parametrize(
    ("name", "most", "beyond", "also", "message"),
    [
        ("extract_layers", (1, 4), (1, 5), {}, "extract_layers reaches 5, encoder .* has 4 l"),
        ("inject_layer", 3, 4, {}, "inject_layer is 4, decoder .* 4 layers; at least one must"),
        ("segment_length", ROOM, 512, {}, "segment_length 512 and a start token exceed the 512"),
        ("compressor_heads", 4, 5, {"compressor": "query"}, "width 32 .* compressor_heads 5"),
        ("selector_dim", 3, None, {"selector_heads": 5}, "selector_heads 5; set selector_dim"),
    ],
)
def test_a_shape_beyond_its_backbones_is_refused(
    name: str,
    most: object,
    beyond: object,
    also: dict[str, object],
    message: str,
    config: SedemConfig,
    backbone: Backbone,
) -> None:
    assert (DEPTH, POSITIONS) == (4, 512)
    SedemModules(config.with_changes(**{name: most, **also}), backbone, backbone)
    with pytest.raises(ConfigError, match=message):
        SedemModules(config.with_changes(**{name: beyond, **also}), backbone, backbone)


# Fingerprints


def test_the_fingerprint_changes_with_what_memory_depends_on_and_nothing_else(
    model: SeDeM, config: SedemConfig, backbone: Backbone
) -> None:
    for changes in (
        {"extract_layers": (2,)}, {"extract_layers": (2, 3)}, {"segment_length": 32},
        {"segment_shift": 4}, {"compression": 2}, {"compression": 8}, {"block_slots": 2},
        {"compressor": "mlp"}, {"compressor": "query"},
    ):  # fmt: skip
        assert build(config, backbone, **changes).fingerprint() != model.fingerprint(), changes
    for changes in ({"inject_layer": 1}, {"k": 5}, {"selector_heads": 2}):
        assert build(config, backbone, **changes).fingerprint() == model.fingerprint(), changes


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

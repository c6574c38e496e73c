from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sedem import SeDeM, SedemConfig
from sedem.errors import ConfigError
from sedem.training.adapt_recipes import (
    FEWEST,
    MOST,
    Adaptation,
    recipes,
    start_of,
    steps_of,
)


def test_a_backbone_gets_new_parts_at_half_of_its_layers(tiny_folder: Callable[..., str]) -> None:
    config, _, start = start_of(Adaptation(backbone=tiny_folder(), compression=2))
    assert start is None
    assert (config.extract_layers, config.inject_layer, config.compression) == ((2,), 2, 2)
    assert config.guidance and config.block_context == "independent"
    with pytest.raises(ConfigError, match=r"layer is 4, but backbone .* has 4 layers"):
        start_of(Adaptation(backbone=tiny_folder(), layer=4))


def test_a_checkpoint_keeps_its_shape(model: SeDeM, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    model.save_pretrained(place)
    wanted = Adaptation(backbone=str(place))
    config, backbone, start = start_of(wanted)
    assert start == str(place) and backbone.name == model.config.encoder
    changed = {"lora_rank": 64, "lora_alpha": 128}  # there were no adapters to keep
    assert config == model.config.with_changes(**changed)
    with pytest.raises(ConfigError, match=r"compression is 8, but checkpoint .* has 4, which it"):
        start_of(wanted.with_changes(compression=8))


def test_steps_are_several_passes_within_bounds() -> None:
    wanted = Adaptation(backbone="any")
    assert steps_of(wanted, 10, 10) == FEWEST
    assert steps_of(wanted, 1000, 1000) == (1000, 500)
    assert steps_of(wanted, 10**6, 10**6) == MOST
    assert steps_of(wanted.with_changes(steps=(3, 4)), 1000, 1000) == (3, 4)


@pytest.mark.parametrize(
    ("changes", "start", "regress"),
    [
        ({}, None, (1.0, 0.6)),
        ({}, "checkpoint", (0.1, 0.0)),
        ({"decoder": "other"}, "checkpoint", (0.0, 0.0)),
        ({"decompressor": "none", "inject_layer": 0}, "checkpoint", (0.0, 0.0)),
    ],
    ids=["new", "trained", "two backbones", "no decompressor"],
)
def test_new_parts_learn_states_first_and_others_as_far_as_they_can(
    config: SedemConfig,
    changes: dict[str, object],
    start: str | None,
    regress: tuple[float, float],
) -> None:
    shape, folder = config.with_changes(**changes), Path("/runs")
    first, second = recipes(Adaptation(backbone="any", seed=3), shape, start, folder, (40, 20), 2)
    assert (first.losses.regress, first.losses.regress_first) == regress
    assert first.start_from == start and second.start_from == "/runs/stage1/final"
    assert first.text.continuation <= shape.segment_length and first.text.held_out == 2
    assert [r.optimization.steps for r in (first, second)] == [40, 20]
    assert {r.optimization.seed for r in (first, second)} == {3}
    assert first.run.save_every == 2  # a killed run loses a twentieth

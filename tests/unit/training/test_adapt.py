"""`sedem adapt` end to end on a tiny backbone, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.training.runs import killed_in_step

from sedem import Document, SeDeM, SedemConfig
from sedem.checkpoint.folder import EXTRA_ENTRIES, locate
from sedem.demo import DOCUMENTS
from sedem.errors import CheckpointError, ConfigError, DataError
from sedem_lab.training import adapt as adapting
from sedem_lab.training.adapt import (
    FEWEST,
    MOST,
    Adaptation,
    adapt,
    finished,
    prepare,
    recipes,
    start_of,
    steps_of,
    working_folder,
)
from sedem_lab.training.recipe import load_recipe
from sedem_lab.training.stages import CALIBRATED, Stage2Recipe

TEXTS = [
    Document(f"/home/ada/{path.name}", path.read_text("utf-8")[:1500])
    for path in sorted(DOCUMENTS.glob("*.txt"))
]


@pytest.fixture
def wanted(tiny_folder: Callable[..., str]) -> Adaptation:
    return Adaptation(backbone=tiny_folder(depth=2), steps=(2, 2), segment_length=64, held_out=0.2)


def test_a_killed_adaptation_goes_on_to_a_checkpoint_with_a_card(
    wanted: Adaptation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "MOST_HELD_OUT", 8)
    out = tmp_path / "mine"
    assert finished(wanted, TEXTS, out) is None
    sizes, steps = prepare(wanted, TEXTS, out)
    with killed_in_step(2):
        adapt(out)
    # Moved files are the same documents.
    moved = [Document(Path(document.name).name, document.text) for document in TEXTS]
    assert prepare(wanted, moved, out) == (sizes, steps)
    report = adapt(out)
    assert finished(wanted, TEXTS, out) == json.loads(json.dumps(report))
    assert sizes.documents == 5 and 1 < sizes.held_out_questions <= 8 and steps == (2, 2)
    assert list(report["scores"]) == ["text loss", "answer loss", "recall@2"]
    model = SeDeM.from_pretrained(out, engine="eager")
    assert model.decoder.has_lora and model.answer(model.read(TEXTS[:1]), "Who?").citations
    card = (out / "README.md").read_text("utf-8")
    assert "| documents | 5, tokens: " in card and "| text loss | " in card
    written = card + (out / "adaptation.json").read_text("utf-8")
    assert str(tmp_path) not in written and "/home" not in written
    assert str(Path(wanted.backbone).parent) not in written
    # Each recipe is one that `sedem train` takes.
    recipe = load_recipe(Stage2Recipe, working_folder(out) / "stage2.yaml")
    assert Path(recipe.run.output, "final").is_dir()
    with pytest.raises(ConfigError, match=r"holds another adaptation \(seed was 0, is 1\)"):
        finished(wanted.with_changes(seed=1), TEXTS, out)
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match=r"another adaptation \(the documents differ\)"):
        prepare(wanted, TEXTS[1:], out)


def test_too_little_text_is_refused_with_what_is_needed(wanted: Adaptation, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already; give the name of a new folder"):
        finished(wanted, TEXTS, tmp_path)
    short = [Document("a.txt", TEXTS[0].text[:300]), Document("b.txt", TEXTS[1].text[:300])]
    with pytest.raises(DataError, match=r"\d windows of 128 tokens and \d questions are left"):
        prepare(wanted, short, tmp_path / "mine")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("model", ["sedem-nano", "sedem-smol"])
def test_what_was_calibrated_to_the_old_weights_goes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "open_named", lambda *_, **__: None)
    config, _, _ = start_of(Adaptation(backbone=model))
    assert not any(getattr(config, part) for part in CALIBRATED)
    assert SedemConfig.load(locate(model), extra=EXTRA_ENTRIES).confidence


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

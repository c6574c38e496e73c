"""What the recipes of the two stages open, and hand to the trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.training.runs import train

from sedem import SeDeM
from sedem.checkpoint.folder import open_backbones
from sedem.errors import ConfigError, DataError
from sedem_lab.training import stages
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe, open_model


class StoppedError(Exception):
    """Raised instead of training."""


Prepared = Callable[[Stage1Recipe | Stage2Recipe], dict[str, Any]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Return what a recipe hands to `fit`, which does not train."""
    given: dict[str, Any] = {}

    def fit(stage: Any, model: Any, *rest: Any, **_: Any) -> None:
        given.update(stage=stage, model=model, training=rest[1], evaluation=rest[2])
        raise StoppedError

    def run(recipe: Stage1Recipe | Stage2Recipe) -> dict[str, Any]:
        with pytest.raises(StoppedError):
            train(recipe)
        return given

    monkeypatch.setattr(stages, "fit", fit)
    return run


# Stage 1


def test_a_recipe_that_cannot_be_compiled_fails_before_anything_is_opened(
    stage1_recipe: Stage1Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function: fails)
    optimization = stage1_recipe.optimization.with_changes(compile=True)
    missing = stage1_recipe.model.with_changes(encoder="missing")
    with pytest.raises(
        ConfigError, match=r"optimization.compile needs .* \(no compiler\); install"
    ):
        open_model(missing, optimization, None)


def test_fresh_parts_are_calibrated_and_a_checkpoint_is_not(
    stage1_recipe: Stage1Recipe, prepared: Prepared, tmp_path: Path
) -> None:
    fitted = prepared(stage1_recipe)
    model = fitted["model"]
    assert len(fitted["evaluation"]) == 6 and len(fitted["training"]) > 500
    window = fitted["training"][0]
    assert (len(window["context"]), len(window["continuation"])) == (16, 8)
    assert not torch.equal(model.decompressor.spread, torch.ones(32))
    model.decompressor.spread.fill_(7.0)
    model.save_pretrained(tmp_path / "start")
    again = stage1_recipe.with_changes(start_from=str(tmp_path / "start"))
    model = prepared(again)["model"]
    assert torch.equal(model.decompressor.spread, torch.full((32,), 7.0))


def test_a_seed_decides_fresh_parts(stage2_recipe: Stage2Recipe, prepared: Prepared) -> None:
    def selector(seed: int) -> torch.Tensor:
        optimization = stage2_recipe.optimization.with_changes(seed=seed)
        recipe = stage2_recipe.with_changes(optimization=optimization)
        return prepared(recipe)["model"].selector.w_query.weight

    assert torch.equal(selector(0), selector(0))
    assert not torch.equal(selector(0), selector(1))


# Stage 2


def test_stage_2_starts_from_the_selector_that_the_recipe_asks_for(
    stage2_recipe: Stage2Recipe, prepared: Prepared, tmp_path: Path
) -> None:
    start = prepared(stage2_recipe)["model"]
    start.save_pretrained(tmp_path / "start")
    recipe = stage2_recipe.with_changes(start_from=str(tmp_path / "start"))

    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        found = prepared(recipe.with_changes(**changes))["model"].selector.state_dict()
        return {name: tensor.clone() for name, tensor in found.items()}

    for name, tensor in weights().items():
        assert torch.equal(tensor, start.selector.state_dict()[name])
    new, again = weights(new_selector="independent"), weights(new_selector="independent")
    assert all(torch.equal(new[name], again[name]) for name in new)
    assert not torch.equal(new["w_query.weight"], new["w_key.weight"])
    other = recipe.optimization.with_changes(seed=1)
    seeded = weights(new_selector="independent", optimization=other)
    assert not torch.equal(seeded["w_key.weight"], new["w_key.weight"])


@pytest.mark.parametrize(
    "fitted",
    [
        {"confidence": True, "selection": "both", "word_weight": 0.4},
        {"spans": True, "second_reading": True, "answer": "auto"},
        {"segmentation": "sentence"},
    ],
)
def test_training_goes_on_from_a_calibrated_checkpoint(
    fitted: dict[str, Any], stage2_recipe: Stage2Recipe, prepared: Prepared, tmp_path: Path
) -> None:
    config = stage2_recipe.model.with_changes(**fitted)
    backbones = open_backbones(config)
    SeDeM(config, *backbones).save_pretrained(tmp_path / "start")
    model = prepared(stage2_recipe.with_changes(start_from=str(tmp_path / "start")))["model"]
    assert model.config == stage2_recipe.model and model.confidence is None
    assert not {"confidence", "spans", "second_reading"} & set(model.parts())


def test_every_block_can_be_restored_from_kept_states_and_none_ranked(
    stage2_recipe: Stage2Recipe, prepared: Prepared
) -> None:
    few = DataSource(path="squad.json", records=":1", options={"distractors": 1})
    data = stage2_recipe.data.with_changes(
        training=(few,), max_blocks="all", budgets=("all",), cache_states=True
    )
    losses = stage2_recipe.losses.with_changes(select=0.0, conditioning="selected")
    fitted = prepared(stage2_recipe.with_changes(data=data, losses=losses))
    stage, items = fitted["stage"], [fitted["training"][index] for index in range(2)]
    counts = [len(item.blocks) for item in items]
    batch = stage.collate(items)
    assert "states" in batch and "question_states" in batch
    assert len([*Path(stage2_recipe.cache).glob("states-*/states.bin")]) == 2
    assert batch["blocks"].sum(1).tolist() == counts
    assert batch["budget"] == stage.collator.dataset.most_blocks >= max(counts)
    stage(**batch)["loss"].backward()
    assert not any(p.grad.any() for p in stage.model.selector.parameters())
    assert all(p.grad.any() for p in stage.model.compressor.parameters())


def test_sources_are_mixed_and_followed_ones_kept_apart(
    stage2_recipe: Stage2Recipe, prepared: Prepared
) -> None:
    sources = (
        DataSource(path="musique.jsonl", label="answer"),
        DataSource(path="squad.json", records=":1", repeat=3),
    )
    mixed = stage2_recipe.with_changes(data=stage2_recipe.data.with_changes(training=sources))
    fitted = prepared(mixed)
    assert len(fitted["training"]) == 2 + 3 * 12
    assert len(fitted["evaluation"]) == 12
    trained = {item.question for item in fitted["training"]}
    assert not trained & {item.question for item in fitted["evaluation"]}
    assert fitted["model"].decoder.has_lora


# Models


def test_a_start_gives_its_weights_and_the_recipe_its_free_settings(
    stage2_recipe: Stage2Recipe, model: SeDeM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "start")
    free = {"k": 5, "auto_max": 4, "lora_rank": 7}
    free |= {"guidance": True, "block_context": "independent"}
    config = stage2_recipe.model.with_changes(**free)
    for dtype in ("float32", "bfloat16"):
        optimization = stage2_recipe.optimization.with_changes(backbone_dtype=dtype)
        opened = open_model(config, optimization, str(tmp_path / "start"))
        assert opened.config == config and opened.decoder.dtype == getattr(torch, dtype)
        assert model.guidance is None and opened.guidance is not None
        # What is trained stays in float32.
        for name, tensor in model.parts().state_dict().items():
            assert torch.equal(opened.parts().state_dict()[name], tensor)


@pytest.mark.parametrize("part", ["confidence", "second_hop", "read_once", "second_reading"])
def test_a_recipe_cannot_ask_for_what_is_fitted_afterwards(
    part: str, stage2_recipe: Stage2Recipe
) -> None:
    needed = {"second_reading": {"spans": True}}.get(part, {})
    changes = {"block_context": "independent", part: True, **needed}
    config = stage2_recipe.model.with_changes(**changes)
    with pytest.raises(ConfigError, match=f"model.{part} is true .* run 'sedem calibrate'"):
        open_model(config, stage2_recipe.optimization, None)


def test_a_start_on_another_backbone_is_refused(
    stage2_recipe: Stage2Recipe, model: SeDeM, tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "start")
    other = stage2_recipe.model.with_changes(encoder=tiny_folder(seed=7))
    with pytest.raises(ConfigError, match=r"checkpoint '.*start' was trained on other weights"):
        open_model(other, stage2_recipe.optimization, str(tmp_path / "start"))
    # The same backbone may lie elsewhere.
    shutil.copytree(stage2_recipe.model.encoder, tmp_path / "moved")
    moved = stage2_recipe.model.with_changes(encoder=str(tmp_path / "moved"))
    opened = open_model(moved, stage2_recipe.optimization, str(tmp_path / "start"))
    assert opened.config.encoder == str(tmp_path / "moved")


@pytest.mark.parametrize(
    "change",
    [
        {"compression": 2},
        {"segment_length": 32},
        {"inject_layer": 1},
        {"lora_rank": 8},
        {"lora_rank": 0},
        {"lora_alpha": 16},
    ],
    ids=str,
)
def test_a_start_of_another_shape_or_with_other_adapters_is_refused(
    finished_stage2: Stage2Recipe, change: dict[str, int]
) -> None:
    (name,) = change
    config = finished_stage2.model.with_changes(**change)
    start = str(Path(finished_stage2.run.output) / "final")
    with pytest.raises(ConfigError, match=rf"model\.{name} is .* in the recipe, checkpoint"):
        open_model(config, finished_stage2.optimization, start)


def test_a_set_without_any_positive_block_is_refused_while_selection_is_trained(
    stage2_recipe: Stage2Recipe, prepared: Prepared, tmp_path: Path
) -> None:
    row = {"documents": [{"name": "a", "text": "The rent is due."}], "question": "What is owed?"}
    (tmp_path / "own.jsonl").write_text(json.dumps({**row, "answers": ["money"]}))
    data = stage2_recipe.data.with_changes(training=(DataSource(path=str(tmp_path / "own.jsonl")),))
    recipe = stage2_recipe.with_changes(data=data)
    with pytest.raises(DataError, match="cannot train a selector"):
        train(recipe)
    without = recipe.with_changes(losses=recipe.losses.with_changes(select=0.0))
    assert len(prepared(without)["training"]) == 1


def test_a_backbone_that_both_name_is_opened_once(
    finished_stage1: Stage1Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("opened a second time")

    monkeypatch.setattr(stages, "open_backbones", refused)
    folder = Path(finished_stage1.model.encoder)
    monkeypatch.chdir(folder.parent)
    start = f"{finished_stage1.run.output}/final"
    relative = finished_stage1.model.with_changes(encoder=folder.name)
    assert open_model(relative, finished_stage1.optimization, start).config == relative

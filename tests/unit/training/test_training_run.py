"""What a recipe opens and hands to the trainer."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sedem import SeDeM
from sedem.data.windows import Windows
from sedem.errors import ConfigError, DataError
from sedem.training import run as training_run
from sedem.training.prepare import Prepared
from sedem.training.recipe import DataSource
from sedem.training.run import (
    Stage1Recipe,
    Stage2Recipe,
    add_source,
    open_model,
    train_stage1,
    train_stage2,
)


class StoppedError(Exception):
    """Raised instead of training."""


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be trained; training itself is left out."""
    given: dict[str, Any] = {}

    def fit(stage: Any, model: Any, recipe: Any, output: Any, *sets: Any) -> None:
        given.update(stage=stage, model=model, training=sets[0], evaluation=sets[1])
        raise StoppedError

    monkeypatch.setattr(training_run, "fit", fit)
    return given


def prepared_for(
    recipe: Any, train: Callable[[Any], Path], fitted: dict[str, Any]
) -> dict[str, Any]:
    with pytest.raises(StoppedError):
        train(recipe)
    return fitted


# Stage 1


def test_held_out_texts_are_evaluated_and_never_trained_on(
    stage1_recipe: Stage1Recipe, fitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[range | None] = []
    build = Windows.__init__

    def noted(self: Windows, *args: Any) -> None:
        texts.append(args[4])
        build(self, *args)

    monkeypatch.setattr(Windows, "__init__", noted)
    prepared_for(stage1_recipe, train_stage1, fitted)
    assert texts == [range(7), range(7, 9)]
    assert len(fitted["evaluation"]) == 6
    assert len(fitted["training"]) > 500


def test_tokens_can_be_limited(stage1_recipe: Stage1Recipe, fitted: dict[str, Any]) -> None:
    few = stage1_recipe.with_changes(text=stage1_recipe.text.with_changes(tokens=240, held_out=0))
    prepared_for(few, train_stage1, fitted)
    # Windows of 16 and 8 tokens of the first 240; an offset may cost one.
    assert 9 <= len(fitted["training"]) <= 10


def test_text_of_the_hub_is_not_looked_for_in_a_folder(
    stage1_recipe: Stage1Recipe, fitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "hub:DKYoon/SlimPajama-6B"
    asked: list[Any] = []
    of = training_run.Tokens.of

    def local(given: Any, backbone: Any, cache: Path, *settings: Any) -> Any:
        asked.append((given, settings))
        return of(Path(stage1_recipe.data_root) / "articles.jsonl", backbone, cache, *settings)

    monkeypatch.setattr(training_run.Tokens, "of", local)
    recipe = stage1_recipe.with_changes(
        text=stage1_recipe.text.with_changes(path=source, tokens=9000)
    )
    prepared_for(
        recipe.with_changes(text=recipe.text.with_changes(held_out=0)), train_stage1, fitted
    )
    assert asked == [(source, ((), 9000))]


def test_windows_can_be_limited(stage1_recipe: Stage1Recipe, fitted: dict[str, Any]) -> None:
    few = stage1_recipe.with_changes(text=stage1_recipe.text.with_changes(windows=5, held_out=0))
    prepared_for(few, train_stage1, fitted)
    assert len(fitted["training"]) == 5
    assert fitted["evaluation"] is None


def test_fewer_windows_than_asked_for_are_said(
    stage1_recipe: Stage1Recipe, fitted: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    few = stage1_recipe.text.with_changes(tokens=240, windows=11, held_out=0)
    prepared_for(stage1_recipe.with_changes(text=few), train_stage1, fitted)
    found = len(fitted["training"])
    assert f"text.windows asks for 11 windows, the text that is read has {found};" in caplog.text


def test_more_texts_cannot_be_held_out_than_there_are(stage1_recipe: Stage1Recipe) -> None:
    text = stage1_recipe.text.with_changes(held_out=9)
    with pytest.raises(ConfigError, match=r"text\.held_out is 9, the corpus has 9 texts"):
        train_stage1(stage1_recipe.with_changes(text=text))


def test_fresh_parts_are_calibrated_and_a_checkpoint_is_not(
    stage1_recipe: Stage1Recipe, fitted: dict[str, Any], tmp_path: Path
) -> None:
    model = prepared_for(stage1_recipe, train_stage1, fitted)["model"]
    assert not torch.equal(model.decompressor.spread, torch.ones(32))
    model.decompressor.spread.fill_(7.0)
    model.save_pretrained(tmp_path / "start")
    again = stage1_recipe.with_changes(start_from=str(tmp_path / "start"))
    model = prepared_for(again, train_stage1, fitted)["model"]
    assert torch.equal(model.decompressor.spread, torch.full((32,), 7.0))


def test_a_seed_decides_fresh_parts(stage2_recipe: Stage2Recipe, fitted: dict[str, Any]) -> None:
    def selector(seed: int) -> torch.Tensor:
        optimization = stage2_recipe.optimization.with_changes(seed=seed)
        recipe = stage2_recipe.with_changes(optimization=optimization)
        weight = prepared_for(recipe, train_stage2, fitted)["model"].selector.w_query.weight
        return weight.detach().clone()

    assert torch.equal(selector(0), selector(0))
    assert not torch.equal(selector(0), selector(1))


# Stage 2


def test_sources_are_mixed_and_followed_ones_kept_apart(
    stage2_recipe: Stage2Recipe, fitted: dict[str, Any]
) -> None:
    sources = (
        DataSource(path="musique.jsonl", label="answer"),
        DataSource(path="squad.json", records=":1", repeat=3),
    )
    mixed = stage2_recipe.with_changes(data=stage2_recipe.data.with_changes(training=sources))
    prepared_for(mixed, train_stage2, fitted)
    assert len(fitted["training"]) == 2 + 3 * 12
    assert len(fitted["evaluation"]) == 12
    trained = {item.question for item in fitted["training"]}
    assert not trained & {item.question for item in fitted["evaluation"]}
    assert fitted["model"].decoder.has_lora


def test_a_source_says_what_it_gave_and_what_was_left_out(
    model: SeDeM, fixtures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = Prepared(model, answer_limit=8)
    with caplog.at_level(logging.INFO):
        add_source(prepared, DataSource(path="musique.jsonl"), fixtures)
        add_source(prepared, DataSource(path="qasper.json"), fixtures)
        add_source(prepared, DataSource(path="hotpotqa-hub.jsonl", repeat=2), fixtures)
    assert [record.getMessage() for record in caplog.records] == [
        "musique: 2 examples (2 in an epoch); left out: none",
        "qasper: 3 examples (1 in an epoch); left out: "
        "{'unanswerable': 1, 'answer longer than 8 tokens': 2}",
        "hotpotqa: 2 examples (2 in an epoch); left out: {'answer longer than 8 tokens': 1}",
    ]


def test_a_source_may_be_a_public_name_whose_training_split_is_read(
    model: SeDeM, fixtures: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    open_examples = training_run.open_examples

    def local(source: Any, schema: Any = None, **options: Any) -> Any:
        asked.append((source, options.pop("split", None)))
        return open_examples(fixtures / "musique.jsonl", schema, **options)

    monkeypatch.setattr(training_run, "open_examples", local)
    prepared = Prepared(model, answer_limit=100)
    add_source(prepared, DataSource(path="musique"), tmp_path)
    add_source(prepared, DataSource(path="musique", options={"split": "validation"}), tmp_path)
    (tmp_path / "musique").write_text("a file of that name wins")
    add_source(prepared, DataSource(path="musique"), tmp_path)
    assert asked == [
        ("musique", "train"), ("musique", "validation"), (tmp_path / "musique", None)
    ]  # fmt: skip


def test_a_missing_source_is_named(stage2_recipe: Stage2Recipe) -> None:
    data = stage2_recipe.data.with_changes(training=(DataSource(path="nowhere.json"),))
    with pytest.raises(DataError, match=r"there is no file '.*nowhere\.json'"):
        train_stage2(stage2_recipe.with_changes(data=data))


def test_states_are_kept_where_the_recipe_says(
    stage2_recipe: Stage2Recipe, fitted: dict[str, Any], tmp_path: Path
) -> None:
    data = stage2_recipe.data.with_changes(cache_states=True)
    cached = stage2_recipe.with_changes(data=data, cache=str(tmp_path / "states"))
    prepared_for(cached, train_stage2, fitted)
    assert len(list((tmp_path / "states").glob("states-*/states.bin"))) == 2
    batch = fitted["stage"].collate([fitted["training"][0]])
    assert "states" in batch and "question_states" in batch


def test_cached_and_online_training_agree(stage2_recipe: Stage2Recipe, tmp_path: Path) -> None:
    # Frozen weights in bfloat16: what is cached is what would be computed.
    optimization = stage2_recipe.optimization.with_changes(backbone_dtype="bfloat16", steps=3)

    def answers(name: str, **data: Any) -> list[float]:
        recipe = stage2_recipe.with_changes(
            optimization=optimization,
            data=stage2_recipe.data.with_changes(**data),
            run=stage2_recipe.run.with_changes(output=str(tmp_path / name)),
        )
        train_stage2(recipe)
        log = json.loads((tmp_path / name / "training.json").read_text())["log"]
        return [line["loss"] for line in log if "loss" in line]

    assert answers("cached", cache_states=True) == pytest.approx(answers("online"), rel=0.02)


# Models


def test_a_model_is_opened_in_the_type_the_recipe_says(stage2_recipe: Stage2Recipe) -> None:
    for dtype in ("float32", "bfloat16"):
        optimization = stage2_recipe.optimization.with_changes(backbone_dtype=dtype)
        model = open_model(stage2_recipe.model, optimization, None)
        assert model.decoder.dtype == getattr(torch, dtype)
        # What is trained stays in float32.
        assert {p.dtype for p in model.parts().parameters()} == {torch.float32}


def test_a_start_gives_its_weights_and_the_recipe_its_free_settings(
    stage2_recipe: Stage2Recipe, model: SeDeM, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "start")
    config = stage2_recipe.model.with_changes(k=5, block_order="score", lora_rank=7)
    opened = open_model(config, stage2_recipe.optimization, str(tmp_path / "start"))
    assert opened.config == config
    for name, tensor in model.parts().state_dict().items():
        assert torch.equal(opened.parts().state_dict()[name], tensor)


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

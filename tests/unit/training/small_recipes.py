"""Recipes of the repository shrunk to two steps on tiny backbones and small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.baselines.registry import reader_class
from sedem.training.baseline import BaselineRecipe, load_baseline_recipe, train_baseline
from sedem.training.recipe import DataSource, Optimization, RunSettings, load_recipe
from sedem.training.shipped_recipes import shipped_recipe, what_trains
from sedem.training.stages import STAGES, Stage1Recipe, Stage2Recipe

FIXTURES = Path(__file__).parents[2] / "fixtures"
RENT = Document("rent", "The rent is 900 euros a month.")
SHORT = Decoding(max_new_tokens=2)

BY_SET = {
    "squad": "squad.json",
    "covidqa": "covidqa.json",
    "hotpotqa": "hotpotqa-hub.jsonl",
    "2wikimultihopqa": "2wikimultihopqa.json",
    "musique": "musique.jsonl",
    "qasper": "qasper.json",
    "exact-facts": "articles.jsonl",
    "cloze": "articles.jsonl",
}


def small_model(config: SedemConfig) -> SedemConfig:
    """The recipe's shape with as few layers as keep the order of extraction and injection.

    The backbones are named "encoder" and "decoder"; see `on_tiny_backbones`.
    """
    numbers = {0, *config.extract_layers, config.inject_layer}
    small = {layer: rank for rank, layer in enumerate(sorted(numbers))}
    return config.with_changes(
        encoder="encoder",
        decoder="decoder" if config.cross_model else None,
        extract_layers=tuple(small[layer] for layer in config.extract_layers),
        inject_layer=small[config.inject_layer],
        decompressor_hidden=config.decompressor_hidden and 40,
        lora_rank=config.lora_rank and 2,
    )


def on_tiny_backbones(config: SedemConfig, tiny_folder: Callable[..., str]) -> SedemConfig:
    """The small shape with the paths of its backbones."""
    options = {"depth": max(config.extract_layer, config.inject_layer) + 1}
    encoder = tiny_folder(max_position_embeddings=4096, **options)
    decoder = tiny_folder(max_position_embeddings=4096, width=48, seed=1, **options)
    return config.with_changes(encoder=encoder, decoder=decoder if config.cross_model else None)


def load(path: Path, trains: str | None = None) -> Any:
    """A recipe of any kind."""
    trains = trains or what_trains(path)
    if trains in STAGES:
        return load_recipe(STAGES[trains][0], path)
    return load_baseline_recipe(trains, path)


def train_small(
    name: str, backbone: str | None, tiny_folder: Callable[..., str], folder: Path
) -> None:
    """Train two steps of a shipped recipe on a few examples of the same sets; it then answers."""
    recipe = load(shipped_recipe(name, backbone))
    recipe = recipe.with_changes(
        optimization=two_steps(recipe.optimization),
        run=small_run(recipe.run, folder),
        start_from=None,
        data_root=str(FIXTURES),
        cache=str(folder / "cache"),
        **({"best": False} if isinstance(recipe, Stage2Recipe) else {}),
    )
    if isinstance(recipe, BaselineRecipe):
        final = train_baseline(_small_baseline(recipe, tiny_folder))
        reader = reader_class(recipe.method).from_pretrained(final)
    else:
        small = small_stage1 if isinstance(recipe, Stage1Recipe) else small_stage2
        recipe = small(recipe)
        recipe = recipe.with_changes(model=on_tiny_backbones(recipe.model, tiny_folder))
        train = STAGES["stage1" if isinstance(recipe, Stage1Recipe) else "stage2"][1]
        final, reader = train(recipe), None
        model = SeDeM.from_pretrained(final)
        if isinstance(recipe, Stage2Recipe):
            assert model.answer(model.read([RENT]), "How much?", decoding=SHORT).k == 1
    summary = json.loads((folder / "out" / "training.json").read_text())
    losses = [line["loss"] for line in summary["log"] if "loss" in line]
    assert summary["steps"] == len(losses) == 2 and all(0 < loss < 1000 for loss in losses)
    if reader is not None:
        answer = reader.answer(reader.read([RENT]), "How much?", decoding=SHORT)
        assert answer.finish_reason in ("end", "length")


def small_stage1(recipe: Stage1Recipe) -> Stage1Recipe:
    """The recipe on a few articles."""
    text = recipe.text.with_changes(
        path="articles.jsonl", held_out=min(recipe.text.held_out, 2), evaluation_windows=2
    )
    return recipe.with_changes(model=small_model(recipe.model), text=text)


def small_stage2(recipe: Stage2Recipe) -> Stage2Recipe:
    """The recipe on a few questions of the same sets."""
    most = recipe.data.max_blocks
    data = recipe.data.with_changes(
        training=tuple(map(small_source, recipe.data.training)),
        evaluation=tuple(map(small_source, recipe.data.evaluation)),
        max_blocks=most if most == "all" else min(most, 6),
        answer_limit=200,
    )
    return recipe.with_changes(model=small_model(recipe.model), data=data)


def _small_baseline(recipe: BaselineRecipe, tiny_folder: Callable[..., str]) -> BaselineRecipe:
    changes = {
        "backbone": tiny_folder(max_position_embeddings=16384),
        "lora_rank": recipe.model.lora_rank and 2,
        **({"extract_layer": 2} if recipe.method == "rag" else {}),
    }
    # The articles are short: nine of about 3,000 tokens.
    text = recipe.text and recipe.text.with_changes(
        path="articles.jsonl",
        held_out=0,
        tokens=None,
        evaluation_windows=2,
        context=min(recipe.text.context, 1000),
    )
    data = recipe.data and recipe.data.with_changes(
        training=tuple(map(small_source, recipe.data.training)),
        evaluation=tuple(map(small_source, recipe.data.evaluation)),
        answer_limit=200,
        context_limit=700,
    )
    return recipe.with_changes(model=recipe.model.with_changes(**changes), text=text, data=data)


def two_steps(optimization: Optimization) -> Optimization:
    return optimization.with_changes(
        steps=2, epochs=None, batch_size=2, accumulation=1, warmup=1, warmup_ratio=0.0
    )


def small_run(run: RunSettings, folder: Path) -> RunSettings:
    output = str(folder / "out")
    return run.with_changes(output=output, log_every=1, save_every=2, eval_every=0, workers=0)


def small_source(source: DataSource) -> DataSource:
    """A few real records with the same schema, label and options."""
    schema = source.set or next(name for name in BY_SET if source.path.startswith(name))
    options = dict(source.options)
    if "count" in options:
        options["count"] = 3
    if schema == "squad":
        options["distractors"] = 2
    return source.with_changes(path=BY_SET[schema], records=None, options=options)

"""Recipes of the repository shrunk to two steps on tiny backbones and small files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sedem import SedemConfig
from sedem.training.recipe import DataSource, Optimization, RunSettings
from sedem.training.stages import Stage1Recipe, Stage2Recipe

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


def small_stage1(recipe: Stage1Recipe) -> Stage1Recipe:
    """Two steps on a few articles."""
    return recipe.with_changes(
        model=small_model(recipe.model),
        text=recipe.text.with_changes(
            path="articles.jsonl",
            held_out=min(recipe.text.held_out, 2),
            evaluation_windows=2,
        ),
        optimization=two_steps(recipe.optimization),
        run=small_run(recipe.run, Path()),
        start_from=None,
    )


def small_stage2(recipe: Stage2Recipe) -> Stage2Recipe:
    """Two steps on a few questions of the same sets."""
    most = recipe.data.max_blocks
    return recipe.with_changes(
        model=small_model(recipe.model),
        data=recipe.data.with_changes(
            training=tuple(map(small_source, recipe.data.training)),
            evaluation=tuple(map(small_source, recipe.data.evaluation)),
            max_blocks=most if most == "all" else min(most, 6),
            answer_limit=200,
        ),
        optimization=two_steps(recipe.optimization),
        run=small_run(recipe.run, Path()),
        start_from=None,
        best=False,
    )


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

"""Recipes of the repository shrunk to two steps on tiny backbones and small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem_lab.baselines.registry import reader_class
from sedem_lab.training.baseline import BaselineRecipe
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.shipped_recipes import shipped_recipe
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe, load_run

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
    "paperwork": "articles.jsonl",
    "two-steps": "articles.jsonl",
}


def train_small(name: str, tiny_folder: Callable[..., str], folder: Path) -> None:
    """Train two steps of a shipped recipe on a few examples of the same sets; it then answers."""
    recipe: Any
    recipe, train = load_run(shipped_recipe(name))
    recipe = recipe.with_changes(
        optimization=recipe.optimization.with_changes(
            steps=2,
            epochs=None,
            batch_size=2,
            accumulation=1,
            warmup=1,
            warmup_ratio=0.0,
            keep_start=0.0,
        ),
        run=recipe.run.with_changes(
            output=str(folder / "out"), log_every=1, save_every=2, eval_every=0, workers=0
        ),
        start_from=None,
        data_root=str(FIXTURES),
        cache=str(folder / "cache"),
        **({"best": False} if isinstance(recipe, Stage2Recipe) else {}),
    )
    reader: Any
    if isinstance(recipe, BaselineRecipe):
        final = train(_small_baseline(recipe, tiny_folder))
        reader = reader_class(recipe.method).from_pretrained(final)
        reader.decoding = SHORT
    else:
        model = _small_model(recipe.model, tiny_folder)
        if isinstance(recipe, Stage1Recipe):
            held_out = min(recipe.text.held_out, 2)
            text = recipe.text.with_changes(
                path="articles.jsonl", held_out=held_out, evaluation_windows=2
            )
            recipe = recipe.with_changes(model=model, text=text)
        else:
            most = recipe.data.max_blocks
            data = _small_data(recipe.data, max_blocks=most if most == "all" else min(most, 6))
            recipe = recipe.with_changes(model=model, data=data)
        reader = SeDeM.from_pretrained(train(recipe))
    summary = json.loads((folder / "out" / "training.json").read_text())
    losses = [line["loss"] for line in summary["log"] if "loss" in line]
    assert summary["steps"] == len(losses) == 2 and all(0 < loss < 1000 for loss in losses)
    if not isinstance(recipe, Stage1Recipe):
        short = {} if isinstance(recipe, BaselineRecipe) else {"decoding": SHORT}
        answer = reader.answer(reader.read([RENT]), "How much?", **short)
        assert answer.finish_reason in ("end", "length")
        assert not isinstance(recipe, Stage2Recipe) or answer.k == 1


def _small_model(config: SedemConfig, tiny_folder: Callable[..., str]) -> SedemConfig:
    """The recipe's shape with as few layers as keep the order of extraction and injection."""
    numbers = {0, *config.extract_layers, config.inject_layer}
    small = {layer: rank for rank, layer in enumerate(sorted(numbers))}
    options = {"depth": max(small.values()) + 1, "max_position_embeddings": 4096}
    other = config.cross_model and tiny_folder(width=48, seed=1, **options)
    return config.with_changes(
        encoder=tiny_folder(**options),
        decoder=other or None,
        extract_layers=tuple(small[layer] for layer in config.extract_layers),
        inject_layer=small[config.inject_layer],
        decompressor_hidden=config.decompressor_hidden and 40,
        lora_rank=config.lora_rank and 2,
    )


def _small_baseline(recipe: BaselineRecipe, tiny_folder: Callable[..., str]) -> BaselineRecipe:
    changes = {
        "backbone": tiny_folder(max_position_embeddings=16384),
        "lora_rank": recipe.model.lora_rank and 2,
        **({"extract_layer": 2} if recipe.method == "rag" else {}),
    }
    # The articles are short: nine of about 3,000 tokens.
    text = recipe.text and recipe.text.with_changes(
        path="articles.jsonl",
        field="text",
        held_out=0,
        tokens=None,
        evaluation_windows=2,
        context=min(recipe.text.context, 1000),
    )
    data = recipe.data and _small_data(recipe.data, context_limit=700)
    return recipe.with_changes(model=recipe.model.with_changes(**changes), text=text, data=data)


def _small_data(data: Any, **changes: Any) -> Any:
    """A few real records with the same schemas, labels and options."""
    sources = {
        name: tuple(map(_small_source, getattr(data, name))) for name in ("training", "evaluation")
    }
    return data.with_changes(**sources, answer_limit=200, **changes)


def _small_source(source: DataSource) -> DataSource:
    schema = source.set or next(name for name in BY_SET if source.path.startswith(name))
    options = dict(source.options)
    if "count" in options:
        options["count"] = 3
    if schema == "squad":
        options["distractors"] = 2
    return source.with_changes(path=BY_SET[schema], records=None, options=options)

"""The recipes at paper scale have the settings that the paper gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sedem_lab.training.baseline import BaselineRecipe, load_baseline_recipe
from sedem_lab.training.recipe import load_recipe
from sedem_lab.training.run_setup import share_of_batches
from sedem_lab.training.shipped_recipes import backbones_of, shipped_recipe, shipped_recipes
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe, load_run

RECIPES = Path(__file__).parents[2] / "recipes" / "paper"
NAMES = [name.removeprefix("paper/") for name in shipped_recipes() if name.startswith("paper/")]
BASELINES = {name for name in NAMES if not name.startswith("stage")}
OURS = {"stage2-guided", "stage2-conditions", "stage2-text"}
"""Recipes of what the paper does not have."""
WITHOUT_SELECTOR = ("stage2-hotpotqa-all", "stage2-qasper-all")
BACKBONES = backbones_of("paper/stage1")
STAGE1 = [RECIPES / backbone / "stage1.yaml" for backbone in BACKBONES]
STAGE2 = [
    RECIPES / backbone / f"{name}.yaml"
    for backbone in BACKBONES
    for name in NAMES
    if name.startswith("stage2") and name not in {*OURS, *WITHOUT_SELECTOR}
]


def test_the_paper_recipes_read_the_papers_text() -> None:
    paper = [load_recipe(Stage1Recipe, path) for path in STAGE1]
    assert len(paper) == 3
    for recipe in paper:
        text, width = recipe.text, recipe.model.segment_length + recipe.text.continuation
        assert text.path == "hub:DKYoon/SlimPajama-6B" and recipe.optimization.epochs == 5
        assert text.windows is not None and text.windows * width == 300_000_000
        assert text.tokens is not None and text.tokens >= 1.5 * 300_000_000


def test_the_paper_recipes_have_the_papers_numbers() -> None:
    for path in STAGE2:
        recipe = load_recipe(Stage2Recipe, path)
        losses, model = recipe.losses, recipe.model
        assert (losses.select, losses.margin_weight, losses.margin) == (1.0, 0.5, 2.0)
        assert (losses.selection_temperature, losses.reconstruct) == (0.07, 0.1)
        rates = recipe.optimization.learning_rates
        assert (rates["compressor"], rates["lora"], rates["selector"]) == (1e-4, 1e-4, 5e-4)
        assert (model.segment_length, model.compression) == (128, 4)
        assert (model.lora_rank, model.lora_alpha) == (64, 128)
        assert recipe.optimization.epochs == 3 and recipe.optimization.bf16
        assert recipe.data.max_blocks == "all" and recipe.optimization.weight_decay == 0
        assert recipe.data.evidence_only and recipe.new_selector == "independent"
        # "Up to three epochs": the best weights on questions that are not trained on.
        assert recipe.best and recipe.run.eval_every
        for source, followed in zip(recipe.data.training, recipe.data.evaluation, strict=True):
            first = "50" if source.path == "qasper" else "500"
            assert followed.path == source.path
            assert (followed.records, source.records) == (f":{first}", f"{first}:")


@pytest.mark.parametrize("name", WITHOUT_SELECTOR)
def test_the_full_bank_is_trained_with_every_block_and_without_evidence(name: str) -> None:
    folder = RECIPES / "llama-3.2-1b"
    recipe = load_recipe(Stage2Recipe, folder / f"{name}.yaml")
    selects = load_recipe(Stage2Recipe, folder / f"{name.removesuffix('-all')}.yaml")
    assert (recipe.data.max_blocks, recipe.data.budgets, recipe.model.k) == ("all", ("all",), "all")
    assert not recipe.data.evidence_only
    assert (recipe.losses.select, recipe.losses.conditioning) == (0, "selected")
    # The same steps, in batches that fit where the decoder sees every block.
    tokens = selects.optimization.batch_tokens and 35_000
    steps = {"batch_size": 4, "accumulation": 4, "batch_tokens": tokens}
    rates = {**selects.optimization.learning_rates, "selector": 0}
    assert recipe == selects.with_changes(
        model=selects.model.with_changes(k="all"),
        data=selects.data.with_changes(evidence_only=False, budgets=("all",)),
        losses=selects.losses.with_changes(select=0.0),
        optimization=selects.optimization.with_changes(learning_rates=rates, **steps),
        run=recipe.run,
    )
    assert recipe.run.eval_every == selects.run.eval_every


def test_further_training_keeps_the_selector() -> None:
    for name in OURS:
        recipe = load_recipe(Stage2Recipe, RECIPES / "llama-3.2-1b" / f"{name}.yaml")
        assert recipe.new_selector is None


def test_the_commands_for_eight_gpus_train_what_the_recipes_say() -> None:
    page = (RECIPES.parents[1] / "docs" / "training.md").read_text("utf-8")
    commands = re.findall(r"^torchrun --nproc-per-node 8 .* sedem train (\S+)(.*)", page, re.M)
    assert commands
    for name, options in commands:
        recipe, _ = load_run(shipped_recipe(name))
        on_eight, _ = load_run(shipped_recipe(name), re.findall(r"--set (\S+)", options))
        whole, shared = recipe.optimization, on_eight.optimization
        assert shared.batch_size * shared.accumulation == whole.batch_size * whole.accumulation
        assert share_of_batches(shared, 8) * 8 == shared.accumulation
        same = {name: getattr(whole, name) for name in ("batch_size", "accumulation")}
        same["shard_backbone"] = whole.shard_backbone
        assert on_eight.with_changes(optimization=shared.with_changes(**same)) == recipe


# Baselines at paper scale: appendix Reproduction Details, and the official code where it is silent.

ICAE = {
    "model": {"memory": 128, "compression": 4, "lora_rank": 128, "lora_dropout": 0.05},
    "optimization": {"schedule": "cosine", "max_grad_norm": 2.0, "bf16": True},
}
HMT = {
    "model": {
        "memory": 10,
        "sensory": 32,
        "segment_length": 564,
        "recall_width": 4096,
        "recall_context": 100 * 10,
        "lora_rank": 8,
        "lora_alpha": 32,
    }
}
BEACON = {
    "model": {"sink": 1, "ratio": 4},
    "optimization": {"batch_size": 1, "accumulation": 8, "epochs": 1, "bf16": True},
}
COMPRESSOR_500X = {
    "model": {"memory": 4, "limit": 500, "lora_rank": 64, "lora_alpha": 32, "lora_dropout": 0.05},
    "optimization": {"schedule": "constant_with_warmup", "batch_size": 8, "bf16": True},
}
COMPREXIT = {
    "model": {"window": 128, "compression": 4, "inner": 256},
    "optimization": {"learning_rates": {"parts": 1e-4}, "epochs": 1, "max_grad_norm": 20.0},
}
LORA = {"lora_rank": 64, "lora_alpha": 128}
Q_AND_V = {"lora_targets": ("q_proj", "v_proj")}
ABSTRACTS = {
    "path": "hub:UniverseTBD/arxiv-abstracts-large",
    "field": "abstract",
    "windows": None,
    "tokens": None,
}

PAPER: dict[str, list[dict[str, Any]]] = {
    "icae-text": [
        ICAE,
        {"model": Q_AND_V, "text": {"context": 512, "continuation": 128}},
        {"optimization": {"learning_rates": {"parts": 1e-4, "lora": 1e-4}, "epochs": 1}},
        {"optimization": {"warmup": 0, "warmup_ratio": 0.05}},
    ],
    "icae-questions": [
        ICAE,
        {"model": Q_AND_V, "data": {"answer_limit": 64}},
        {"optimization": {"learning_rates": {"parts": 5e-5, "lora": 5e-5}}},
        {"optimization": {"warmup": 0, "warmup_ratio": 0.05}},
    ],
    "hmt-text": [
        HMT,
        {"text": {"context": 5 * 512, "continuation": 512}},
        {"optimization": {"learning_rates": {"parts": 1e-4, "lora": 1e-4}}},
    ],
    "hmt-questions": [HMT, {"optimization": {"learning_rates": {"parts": 1e-5, "lora": 1e-5}}}],
    "beacon-text": [BEACON, {"model": {"window": 128, "ratios": (2, 4, 8, 16, 32)}}],
    "beacon-text1024": [BEACON, {"model": {"window": 1024, "ratios": (2, 4, 8, 16, 32)}}],
    **{
        f"beacon-questions{setting}": [
            BEACON,
            {"model": {"window": window, "ratios": (2, 4, 8)}, "data": {"context_limit": 16_384}},
            {"optimization": {"learning_rates": {"parts": 1e-5}, "schedule": "linear"}},
        ]
        for setting, window in (("", 128), ("1024", 1024))
    },
    "500x-text": [
        COMPRESSOR_500X,
        {"model": Q_AND_V, "text": {"context": 500, **ABSTRACTS}},
        {"optimization": {"learning_rates": {"parts": 1e-4, "lora": 1e-4}}},
        {"optimization": {"warmup": 300, "epochs": 3}},
    ],
    "500x-questions": [
        COMPRESSOR_500X,
        {"model": Q_AND_V, "data": {"answer_limit": 64}},
        {"optimization": {"learning_rates": {"parts": 5e-5, "lora": 5e-5}}},
        {"optimization": {"warmup": 200, "epochs": 10}},
    ],
    "500x-questions-qasper": [
        COMPRESSOR_500X | {"optimization": {"batch_size": 1, "accumulation": 8}},
        {"model": {"long_contexts": "windows"}, "data": {"answer_limit": 64}},
        {"optimization": {"learning_rates": {"parts": 5e-5, "lora": 5e-5}}},
        {"optimization": {"warmup": 200, "epochs": 10}},
    ],
    "comprexit-text": [
        COMPREXIT,
        {"model": {"piece": 512}, "text": {"context": 512, "continuation": 128}},
        {"optimization": {"batch_size": 16, "accumulation": 32 * 4, "schedule": "linear"}},
        {"optimization": {"warmup": 0, "warmup_ratio": 0.05}},
    ],
    "comprexit-questions": [COMPREXIT, {"model": {"piece": 512}, "optimization": {"warmup": 0}}],
    "comprexit-questions128": [COMPREXIT, {"model": {"piece": 128}, "optimization": {"warmup": 0}}],
    "full-context-tuned-questions": [{"model": LORA, "data": {"answer_limit": 64}}],
    "rag-questions": [
        {"model": {"heads": 4, "k": 2, "extract_layer": 14, **LORA}},
        {"data": {"answer_limit": 64, "max_paragraphs": "all", "evidence_only": True}},
        {"losses": {"select": 1.0, "margin_weight": 0.5, "margin": 2.0}},
        {"losses": {"selection_temperature": 0.07}},
        {"optimization": {"learning_rates": {"parts": 5e-4, "lora": 1e-4}}},
    ],
}

BUDGETS = {
    ("icae-text", "llama-3.2-1b"): 1_000_000_000,
    ("icae-text", "llama-3.2-3b"): 300_000_000,
    **{
        (name, backbone): tokens
        for backbone in ("llama-3.2-1b", "llama-3.2-3b")
        for name, tokens in (
            ("beacon-text", 200_000_000),
            ("beacon-text1024", 200_000_000),
            ("comprexit-text", 1_000_000_000),
            ("hmt-text", 600 * 2 * 6 * 512),
        )
    },
}
"""Tokens of text that a method is given; 500xCompressor reads all abstracts."""


def _paper_recipe(name: str, backbone: str) -> BaselineRecipe:
    return load_baseline_recipe(RECIPES / backbone / f"{name}.yaml")


def test_every_paper_recipe_of_a_baseline_has_its_numbers_here() -> None:
    assert set(PAPER) == BASELINES
    texts = {name for name in BASELINES if "-text" in name}
    assert {name for name, _ in BUDGETS} == texts - {"500x-text"}


@pytest.mark.parametrize("backbone", ["llama-3.2-1b", "llama-3.2-3b"])
@pytest.mark.parametrize("name", PAPER)
def test_a_baselines_paper_recipe_has_the_papers_numbers(name: str, backbone: str) -> None:
    recipe = _paper_recipe(name, backbone)
    assert recipe.model.backbone == f"meta-llama/Llama-{backbone.removeprefix('llama-').upper()}"
    for numbers in PAPER[name]:
        for section, settings in numbers.items():
            for key, value in settings.items():
                found = getattr(getattr(recipe, section), key)
                assert found == value, f"{section}.{key}"
    if recipe.data is None:
        return
    assert recipe.run.eval_every > 0
    # The checkpoint rule that all methods share: questions that are not trained on.
    path, first = ("qasper", 50) if name.endswith("-qasper") else ("hotpotqa", 500)
    (source,), (followed,) = recipe.data.training, recipe.data.evaluation
    assert source.path == followed.path == path
    assert (followed.records, source.records) == (f":{first}", f"{first}:")


@pytest.mark.parametrize(("name", "backbone"), BUDGETS)
def test_a_paper_recipe_gives_the_papers_budget_of_text(name: str, backbone: str) -> None:
    recipe, tokens = _paper_recipe(name, backbone), BUDGETS[name, backbone]
    text, optimization = recipe.text, recipe.optimization
    assert text is not None and text.path == "hub:DKYoon/SlimPajama-6B"
    assert text.windows is not None and text.tokens is not None
    width = text.context + text.continuation
    assert text.windows * width == pytest.approx(tokens, abs=width)
    # A window lies within one text, so the longer it is, the less of what is read it holds.
    needed = 1.5 if width < 1000 else 5
    assert text.tokens >= needed * tokens
    if optimization.steps:
        batch = optimization.batch_size * optimization.accumulation
        assert text.windows == optimization.steps * batch

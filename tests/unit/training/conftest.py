"""Small sets of questions, a second backbone, and training runs that tests share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.training.runs import Recipe, copied, killed_in_step, one_thread, train

from sedem import Document, SedemConfig
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem_lab.training.stage1 import Stage1Losses
from sedem_lab.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe

FIXTURES = Path(__file__).parents[2] / "fixtures"

RENT = "The flat in Mill Lane is let from May. The rent is 900 euros a month, due on the third."
CAKE = "Take two eggs and flour. Beat the eggs first and bake for 25 minutes."
SHIP = "The ship left on 4 June."


def example(identity: str, texts: list[str], question: str, answer: str, gold: int = 0) -> Example:
    """A question whose evidence is the first occurrence of its answer."""
    start = texts[gold].index(answer)
    return Example(
        identity,
        tuple(Document(f"paragraph {i + 1}", text) for i, text in enumerate(texts)),
        question,
        (answer,),
        (Evidence(gold, start, start + len(answer)),),
    )


@pytest.fixture
def examples() -> ExampleSet:
    """Four questions with contexts of one to three documents of different lengths."""
    return ExampleSet(
        "small",
        [
            example("rent", [RENT, CAKE], "What is the rent?", "900 euros"),
            example("eggs", [SHIP, CAKE, RENT], "What comes first?", "the eggs", 1),
            example("ship", [SHIP], "When did the ship leave?", "4 June"),
            example("lane", [CAKE, RENT], "Where is it?", "Mill Lane", 1),
        ],
    )


@pytest.fixture(scope="session")
def other_decoder(tiny_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone of another width and depth whose tokenizer merges a few pairs of letters."""
    folder = tmp_path_factory.mktemp("other") / "decoder"
    shutil.copytree(tiny_folder("qwen3", width=48, depth=3, vocab_size=261, seed=5), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    for number, pair in enumerate((["t", "h"], ["th", "e"], ["e", "n"])):
        tokenizer["model"]["vocab"]["".join(pair)] = 258 + number
        tokenizer["model"]["merges"].append(pair)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Exact comparisons must not depend on the number of cores."""
    with one_thread():
        yield


def shared(output: Path, config: SedemConfig, **optimization: Any) -> dict[str, Any]:
    """Settings of six steps that both recipes have."""
    return {
        "model": config,
        "optimization": Optimization(
            **optimization, steps=6, weight_decay=0.01, bf16=False, backbone_dtype="float32"
        ),
        "run": RunSettings(output=str(output), log_every=1, save_every=2, eval_every=3),
        "data_root": str(FIXTURES),
        "cache": str(output.parent / "cache"),
    }


def stage1_recipe_in(folder: Path, config: SedemConfig) -> Stage1Recipe:
    """Six steps of stage 1 on nine articles, the last two of them held out."""
    rates = {"compressor": 1e-3, "decompressor": 2e-3}
    return Stage1Recipe(
        text=TextSource(path="articles.jsonl", continuation=8, held_out=2, evaluation_windows=6),
        losses=Stage1Losses(regress=0.5, regress_first=0.5, recall=0.5),
        **shared(folder / "stage1", config, learning_rates=rates, batch_size=4),
    )


def stage2_recipe_in(folder: Path, config: SedemConfig) -> Stage2Recipe:
    """Six steps of stage 2 on the questions of one article, evaluated on those of another."""
    rates = {"compressor": 1e-3, "decompressor": 2e-3, "selector": 3e-3, "lora": 4e-3}
    return Stage2Recipe(
        data=Stage2Data(
            training=(DataSource(path="squad.json", records=":1", options={"distractors": 3}),),
            evaluation=(DataSource(path="squad.json", records="1:2", options={"distractors": 2}),),
            max_blocks=12,
            budgets=(1, 2),
            answer_limit=200,
        ),
        **shared(folder / "stage2", config, learning_rates=rates, batch_size=2, accumulation=2),
    )


@pytest.fixture
def stage1_recipe(config: SedemConfig, tmp_path: Path) -> Stage1Recipe:
    """A recipe of stage 1 that has not run."""
    return stage1_recipe_in(tmp_path, config)


@pytest.fixture
def stage2_recipe(config: SedemConfig, tmp_path: Path) -> Stage2Recipe:
    """A recipe of stage 2 that has not run."""
    return stage2_recipe_in(tmp_path, config)


@pytest.fixture(scope="session")
def finished_stage1(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> Stage1Recipe:
    """A finished run of stage 1, which no test may change."""
    recipe = stage1_recipe_in(tmp_path_factory.mktemp("finished"), config)
    with one_thread():
        train(recipe)
    return recipe


@pytest.fixture(scope="session")
def finished_stage2(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> Stage2Recipe:
    """A finished run of stage 2, which no test may change."""
    recipe = stage2_recipe_in(tmp_path_factory.mktemp("finished"), config)
    with one_thread():
        train(recipe)
    return recipe


@pytest.fixture(params=["stage1", "stage2"])
def finished(request: pytest.FixtureRequest) -> Recipe:
    """A finished run of each stage in turn, which no test may change."""
    recipe: Recipe = request.getfixturevalue(f"finished_{request.param}")
    return recipe


@pytest.fixture(scope="session")
def killed_stage2(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> Stage2Recipe:
    """A stage-2 run killed after its checkpoint of step 4, which no test may change."""
    recipe = stage2_recipe_in(tmp_path_factory.mktemp("killed"), config)
    with one_thread(), killed_in_step(5):
        train(recipe)
    return recipe


@pytest.fixture
def stopped(killed_stage2: Stage2Recipe, tmp_path: Path) -> Stage2Recipe:
    """A copy of the killed stage-2 run."""
    copy: Stage2Recipe = copied(killed_stage2, tmp_path)
    return copy

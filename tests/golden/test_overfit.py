"""Each stage overfits a few examples, which is impossible with a gradient missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.training.conftest import CAKE, RENT, SHIP, example
from unit.training.runs import losses, one_thread, train

from sedem import SeDeM, SedemConfig
from sedem_lab.data.custom_questions import to_entry
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem_lab.training.stage1 import Stage1Losses
from sedem_lab.training.stage2 import Stage2Losses
from sedem_lab.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe

EXAMPLES = [
    example("1", [RENT, CAKE], "What is the rent?", "900 euros"),
    example("2", [CAKE, SHIP, RENT], "What comes first?", "the eggs"),
    example("3", [SHIP, CAKE], "When did the ship leave?", "4 June"),
    example("4", [RENT, CAKE], "Where is the flat?", "Mill Lane"),
]


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Threads only slow tensors this small down."""
    with one_thread():
        yield


def shared(folder: Path, steps: int, rates: dict[str, float], batch_size: int) -> dict[str, Any]:
    return {
        "optimization": Optimization(
            learning_rates=rates,
            steps=steps,
            batch_size=batch_size,
            max_grad_norm=10.0,
            bf16=False,
            backbone_dtype="float32",
        ),
        "run": RunSettings(output=str(folder / "run"), log_every=1, save_every=steps),
        "data_root": str(folder),
        "cache": str(folder),
    }


@pytest.mark.parametrize(
    ("part", "limit", "steps", "inject_layer", "spread"),
    [
        # With large weights, the frozen decoder can give a token a probability near one.
        ("context", 0.05, 170, 1, {"initializer_range": 0.4}),
        ("reconstruct", 0.01, 200, 3, {}),
    ],
)
def test_stage_1_overfits_a_few_windows(
    part: str,
    limit: float,
    steps: int,
    inject_layer: int,
    spread: dict[str, float],
    tiny_folder: Callable[..., str],
    tmp_path: Path,
) -> None:
    letters = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(36))
    # Each text is as long as a window, so its window lies in the same place in every epoch.
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(letters[12 * number : 12 * (number + 1)])
    weights = {"context": 0.0, "distill": 0.0, "reconstruct": 0.0, part: 1.0}
    recipe = Stage1Recipe(
        model=SedemConfig(
            encoder=tiny_folder(width=64, pad_token_id=None, **spread),
            extract_layers=(3,),
            inject_layer=inject_layer,
            segment_length=8,
            compression=2,
            decompressor_hidden=128,
        ),
        text=TextSource(path="texts", continuation=4, windows=3),
        losses=Stage1Losses(**weights),
        **shared(tmp_path, steps, {"compressor": 5e-3, "decompressor": 5e-3}, 3),
    )
    train(recipe)
    assert [line for line in losses(recipe) if "loss" in line][-1][part] < limit


def test_stage_2_overfits_a_few_answers(tiny_folder: Callable[..., str], tmp_path: Path) -> None:
    lines = [json.dumps(to_entry(one)) for one in EXAMPLES]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    rates = dict.fromkeys(("compressor", "decompressor", "selector", "lora"), 6e-3)
    recipe = Stage2Recipe(
        # A padding token would have a zero embedding, and it is also the end token.
        model=SedemConfig(
            encoder=tiny_folder(width=64, pad_token_id=None),
            extract_layers=(2,),
            inject_layer=1,
            segment_length=16,
            decompressor_hidden=128,
            lora_rank=16,
            lora_alpha=32,
            k=1,
        ),
        data=Stage2Data(training=(DataSource(path="questions.jsonl"),), budgets=(1,)),
        losses=Stage2Losses(normalize_scores=True),
        **shared(tmp_path, 100, rates, 4),
    )
    model = SeDeM.from_pretrained(train(recipe))
    last = [line for line in losses(recipe) if "loss" in line][-1]
    assert last["answer"] < 0.1
    assert last["recall"] == 1.0
    for each in EXAMPLES:
        found = model.answer(model.read(each.documents), each.question)
        assert (found.text, found.finish_reason) == (each.answers[0], "end")
        assert found.citations[0].document == "paragraph 1"

"""Each stage overfits a few examples, which is impossible with a gradient missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sedem import Document, SeDeM, SedemConfig
from sedem.data import custom_questions
from sedem.data.examples import Evidence, Example
from sedem.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem.training.stage1 import Stage1Losses
from sedem.training.stage2 import Stage2Losses
from sedem.training.stages import (
    Stage1Recipe,
    Stage2Data,
    Stage2Recipe,
    train_stage1,
    train_stage2,
)

RENT = "The flat in Mill Lane is let from May. The rent is 900 euros a month, due on the third."
CAKE = "Take two eggs and flour. Beat the eggs first and bake for 25 minutes."
SHIP = "The ship left on 4 June."
QUESTIONS = [
    ("What is the rent?", "900 euros", [RENT, CAKE]),
    ("What comes first?", "the eggs", [CAKE, SHIP, RENT]),
    ("When did the ship leave?", "4 June", [SHIP, CAKE]),
    ("Where is the flat?", "Mill Lane", [RENT, CAKE]),
]


def last_losses(folder: Path) -> dict[str, float]:
    """The losses of the last step."""
    log = json.loads((folder / "run" / "training.json").read_text())["log"]
    return [line for line in log if "loss" in line][-1]


def optimization(steps: int, rates: dict[str, float], batch_size: int) -> Optimization:
    return Optimization(
        learning_rates=rates,
        steps=steps,
        batch_size=batch_size,
        max_grad_norm=10.0,
        bf16=False,
        backbone_dtype="float32",
    )


def small_run(folder: Path, steps: int) -> RunSettings:
    return RunSettings(output=str(folder / "run"), log_every=1, save_every=steps)


def stage1(
    folder: Path, backbone: str, losses: Stage1Losses, steps: int, inject_layer: int
) -> dict[str, float]:
    """Train on three windows of letters; the losses of the last step."""
    letters = "".join(chr(97 + (i * i + 3 * i) % 26) for i in range(36))
    # Each text is as long as a window, so its window lies in the same place in every epoch.
    (folder / "texts").mkdir()
    for number in range(3):
        (folder / "texts" / f"{number}.txt").write_text(letters[12 * number : 12 * (number + 1)])
    config = SedemConfig(
        encoder=backbone,
        extract_layers=(3,),
        inject_layer=inject_layer,
        segment_length=8,
        compression=2,
        decompressor_hidden=128,
    )
    recipe = Stage1Recipe(
        model=config,
        text=TextSource(path="texts", continuation=4, windows=3),
        optimization=optimization(steps, {"compressor": 5e-3, "decompressor": 5e-3}, 3),
        run=small_run(folder, steps),
        losses=losses,
        data_root=str(folder),
        cache=str(folder),
    )
    train_stage1(recipe)
    return last_losses(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only slow tensors this small down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_stage_1_overfits_a_few_continuations(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    # With large weights, the frozen decoder can give a token a probability near one.
    backbone = tiny_folder(width=64, initializer_range=0.4, pad_token_id=None)
    losses = Stage1Losses(distill=0.0, reconstruct=0.0)
    last = stage1(tmp_path, backbone, losses, 170, inject_layer=1)
    assert last["context"] < 0.05


def test_stage_1_overfits_a_few_states(tiny_folder: Callable[..., str], tmp_path: Path) -> None:
    backbone = tiny_folder(width=64, pad_token_id=None)
    losses = Stage1Losses(context=0.0, distill=0.0)
    last = stage1(tmp_path, backbone, losses, 200, inject_layer=3)
    assert last["reconstruct"] < 0.01


def test_stage_2_overfits_a_few_answers(tiny_folder: Callable[..., str], tmp_path: Path) -> None:
    examples = [
        Example(
            str(number),
            tuple(Document(f"paragraph {i + 1}", text) for i, text in enumerate(texts)),
            question,
            (answer,),
            (Evidence(0, texts[0].index(answer), texts[0].index(answer) + len(answer)),),
        )
        for number, (question, answer, texts) in enumerate(QUESTIONS)
    ]
    custom_questions.dump(examples, tmp_path / "questions.jsonl")
    # A padding token would have a zero embedding, and it is also the end token.
    config = SedemConfig(
        encoder=tiny_folder(width=64, pad_token_id=None),
        extract_layers=(2,),
        inject_layer=1,
        segment_length=16,
        decompressor_hidden=128,
        lora_rank=16,
        lora_alpha=32,
        k=1,
    )
    rates = dict.fromkeys(("compressor", "decompressor", "selector", "lora"), 6e-3)
    recipe = Stage2Recipe(
        model=config,
        data=Stage2Data(training=(DataSource(path="questions.jsonl"),), budgets=(1,)),
        optimization=optimization(100, rates, 4),
        run=small_run(tmp_path, 100),
        losses=Stage2Losses(normalize_scores=True),
        data_root=str(tmp_path),
        cache=str(tmp_path),
    )
    model = SeDeM.from_pretrained(train_stage2(recipe))
    last = last_losses(tmp_path)
    assert last["answer"] < 0.1
    assert last["recall"] == 1.0
    for question, answer, texts in QUESTIONS:
        documents = [Document(f"paragraph {i + 1}", text) for i, text in enumerate(texts)]
        found = model.answer(model.read(documents), question)
        assert found.text == answer
        assert found.finish_reason == "end"
        assert found.citations[0].document == "paragraph 1"

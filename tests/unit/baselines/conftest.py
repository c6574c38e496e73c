"""Every trained baseline on the tiny Llama, and training recipes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sedem.answering.decoding import Decoding
from sedem.backbone.loading import open_backbone
from sedem_lab.baselines.registry import TRAINED, reader_class
from sedem_lab.baselines.soft_prompt import PrefillResult
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.training.baseline import BaselineRecipe, QuestionData, WindowSource
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings
from sedem_lab.training.targets import targets

SMALL: dict[str, dict[str, Any]] = {
    "full-context-tuned": {"lora_rank": 4, "lora_alpha": 8},
    "rag": {"lora_rank": 4, "lora_alpha": 8, "extract_layer": 2, "k": 1, "paragraph": 64},
    "icae": {"lora_rank": 4, "lora_alpha": 8, "memory": 4, "compression": 4, "unscored": 2},
    "hmt": {
        "lora_rank": 4,
        "lora_alpha": 8,
        "memory": 2,
        "sensory": 4,
        "segment_length": 40,
        "recall_width": 8,
        "recall_context": 6,
    },
    "500x": {"lora_rank": 4, "lora_alpha": 8, "limit": 48},
    "beacon": {"window": 16, "ratios": (2, 4, 8)},
    "comprexit": {"piece": 16, "window": 8, "inner": 6},
}
"""Settings for a tiny backbone; a new method adds its own here."""

SHORT = Decoding(max_new_tokens=5)
FIXTURES = Path(__file__).parents[2] / "fixtures"


def make(name: str, folder: str, seed: int = 1, **changes: Any) -> Any:
    """A baseline with random parts and adapters, so that both affect its short answers."""
    kind = reader_class(name)
    torch.manual_seed(seed)
    reader = kind(kind.Config(backbone=folder, **{**SMALL[name], **changes}), open_backbone(folder))
    reader.decoding = SHORT
    with torch.no_grad():
        for parameter in reader.backbone.lora_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
        for parameter in reader.parts().parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return reader.requires_grad_(False).eval()


def tokens(*lengths: int) -> list[Tensor]:
    """Random tokens of the tiny backbone."""
    return [torch.randint(2, 250, (length,)) for length in lengths]


def naive_loss(reader: TrainedReader, soft: Tensor, text: list[int], target: list[int]) -> Tensor:
    """Cross-entropy of each token of `target` after [start; soft tokens; text], by Hugging Face."""
    embed = reader.backbone.embed
    start = embed(torch.tensor([reader.backbone.bos_token_id]))
    row = torch.cat([start, soft, embed(torch.tensor([*text, *target]))])
    with reader.decoding_mode():
        logits = reader.backbone.model(inputs_embeds=row[None]).logits[0]
    return F.cross_entropy(logits[-1 - len(target) : -1], torch.tensor(target), reduction="none")


PAIRS = [([0, 5, 6, 7], [8, 9, 1]), ([0, 4], [11, 12, 13, 1])]
"""Prompt and answer of two questions."""


def check_question_loss(
    reader: TrainedReader, contexts: list[Tensor], soft: Callable[[Tensor], Tensor]
) -> None:
    """The loss of two questions is Hugging Face's after the soft tokens of each context."""
    loss = reader.question_loss(contexts, **targets(PAIRS))["loss"]
    expected = [
        naive_loss(reader, soft(context), prefix[1:], answer).mean()
        for context, (prefix, answer) in zip(contexts, PAIRS, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(expected).mean(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def fill(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Fill parameters in the order of their names: sin(0.0137 (k + 1) i² + k), scaled.

    Value i of parameter k is 0.2 times that, or 1 plus 0.1 times that if the name contains "norm".
    The official code was run with the same weights.
    """
    for k, (name, parameter) in enumerate(sorted(named, key=lambda entry: entry[0])):
        at = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(0.0137 * (k + 1) * at**2 + k).view_as(parameter)
        parameter.copy_(1 + 0.1 * wave if "norm" in name else 0.2 * wave)


def adapters(reader: TrainedReader) -> list[tuple[str, nn.Parameter]]:
    return [(n, p) for n, p in reader.backbone.model.named_parameters() if "lora_" in n]


def as_official(name: str, folder: str, **settings: Any) -> Any:
    """A reader whose backbone has the weights of the official run; its own are not filled yet."""
    backbone, kind = open_backbone(folder), reader_class(name)
    fill(backbone.model.named_parameters())
    return kind(kind.Config(backbone=folder, lora_rank=4, lora_alpha=8, **settings), backbone)


def check_official_answer(filled: PrefillResult, official: dict[str, Any], atol: float) -> None:
    """The first logits and the greedy answer are those of the official run."""
    expected = torch.tensor(official["logits"])
    torch.testing.assert_close(filled.logits[0], expected, rtol=1e-4, atol=atol)
    logits, generated = filled.logits, []
    for _ in official["generated"]:
        generated.append(int(logits.argmax()))
        logits = filled.advance(torch.tensor(generated[-1:]))
    assert generated == official["generated"]


@pytest.fixture(params=TRAINED)
def any_reader(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> TrainedReader:
    """Each trained baseline in turn, on the tiny Llama."""
    return make(request.param, tiny_folder())


def _recipe(name: str, backbone: str, folder: Path, **changes: Any) -> BaselineRecipe:
    rates = {"parts": 1e-3, "lora": 1e-3}
    return BaselineRecipe(
        method=name,
        model=reader_class(name).Config(backbone=backbone, **SMALL[name]),
        optimization=Optimization(
            learning_rates=rates, steps=4, batch_size=4, bf16=False, backbone_dtype="float32"
        ),
        run=RunSettings(output=str(folder / "out"), log_every=1, save_every=2),
        data_root=str(FIXTURES),
        cache=str(folder / "cache"),
        **changes,
    )


@pytest.fixture
def question_recipe(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> Callable[..., BaselineRecipe]:
    """Four steps on the questions of one article, evaluated on those of another."""
    training, evaluation = (
        (DataSource(path="squad.json", records=records, options={"distractors": 1}),)
        for records in (":1", "1:2")
    )
    data = QuestionData(training=training, evaluation=evaluation, answer_limit=200)

    def recipe(name: str, **changes: Any) -> BaselineRecipe:
        return _recipe(name, tiny_folder(), tmp_path / name, **{"data": data, **changes})

    return recipe


@pytest.fixture
def text_recipe(tiny_folder: Callable[..., str], tmp_path: Path) -> Callable[..., BaselineRecipe]:
    """Four steps on seven of nine articles; the last two are held out."""
    text = WindowSource(
        path="articles.jsonl", continuation=12, held_out=2, evaluation_windows=4, context=32
    )

    def recipe(name: str) -> BaselineRecipe:
        return _recipe(name, tiny_folder(), tmp_path / f"{name}-text", text=text)

    return recipe

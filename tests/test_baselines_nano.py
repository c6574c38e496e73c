"""The baselines that ship with sedem: each answers by its name, and is small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import prints_json, succeeds
from unit.baselines.conftest import make

from experiments.tools.shipping import shrunk
from sedem import Document
from sedem.backbone.loading import open_backbone
from sedem.baselines.registry import TRAINED
from sedem.checkpoint.folder import locate
from sedem.data import custom_questions
from sedem.data.examples import Example
from sedem.errors import ConfigError
from sedem.evaluation.registry import METHODS, default_checkpoint

DOCUMENTS = [Document("lease", "The rent is 900 euros, due on the third. Pets need a word. " * 2)]
OTHERS = (Document("cake", "Beat two eggs."), Document("ship", "The ship left on 4 June."))
RENT = Example("rent", (*DOCUMENTS, *OTHERS), "What is the rent?", ("900 euros",))


@pytest.mark.parametrize("method", METHODS)
def test_every_listed_method_answers_with_its_default_checkpoint(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"\n{method} " in "\n" + succeeds("eval", "--list")
    custom_questions.dump([RENT], Path("questions.jsonl"))
    asked = ("--data", "questions.jsonl", "--max-new-tokens", 3)
    metrics = prints_json("eval", method, *asked, "--json")
    assert metrics["counts"]["not_answered"] == 0
    assert metrics["settings"]["checkpoint"] == default_checkpoint(method)


def test_shipped_checkpoints_are_small_and_contain_no_backbone() -> None:
    for method in TRAINED:
        files = [path for path in locate(default_checkpoint(method)).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 2_000_000
        assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
        assert not any("backbone" in path.parts for path in files)


@pytest.mark.parametrize("method", TRAINED)
def test_an_update_within_the_rank_is_preserved(
    method: str, tiny_folder: Callable[..., str]
) -> None:
    """Adapters of rank 4 survive at ranks 4 and 8, Beacon's projections at full rank."""
    trained = make(method, tiny_folder())
    for rank in (32, 40) if method == "beacon" else (4, 8):
        small = shrunk(trained, open_backbone(tiny_folder()), rank).eval()
        one, other = (r.answer(r.read(DOCUMENTS), "What is the rent?") for r in (trained, small))
        assert (one.text, one.conditioning) == (other.text, other.conditioning)


def test_a_rank_that_would_change_the_scale_is_rejected(tiny_folder: Callable[..., str]) -> None:
    trained = make("icae", tiny_folder(), lora_rank=8, lora_alpha=4)
    with pytest.raises(ConfigError, match="rank is 3, but alpha 4 of rank 8 would not stay"):
        shrunk(trained, open_backbone(tiny_folder()), 3)


def test_the_loss_of_a_lower_rank_is_minimal(tiny_folder: Callable[..., str]) -> None:
    trained = make("icae", tiny_folder())
    small = shrunk(trained, open_backbone(tiny_folder()), 2)
    name = "model.layers.0.self_attn.q_proj.lora_{}.default.weight"
    products = []
    for reader in (trained, small):
        weights = dict(reader.backbone.model.named_parameters())
        factors = [weights[name.format(factor)].detach() for factor in "BA"]
        products.append(factors[0] @ factors[1] * reader.config.lora_alpha / len(factors[1]))
    sizes = torch.linalg.svdvals(products[0])
    lost = torch.linalg.matrix_norm(products[0] - products[1])
    torch.testing.assert_close(lost, sizes[2:].square().sum().sqrt(), rtol=1e-4, atol=1e-5)

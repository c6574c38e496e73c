"""An impossible plan is rejected before anything is opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sedem.bench.plan import TOKENIZER, Plan
from sedem.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("sedemm",)}, "there is no method 'sedemm'; there are sedem, full-context"),
        ({"methods": ("sedem", "sedem")}, r"methods is .*; give each entry once"),
        ({"contexts": (0,)}, r"contexts\[0\] is 0; a context can have 1 to 4,194,304 tokens"),
        ({"contexts": (8, 5_000_000)}, r"contexts\[1\] is 5000000; a context can have"),
        ({"contexts": (8, 8)}, r"contexts is \(8, 8\); give each entry once"),
        ({"k": 0}, "k is 0; it must be a whole number of at least 1, or 'all'"),
        ({"runs": 0}, "runs is 0; input should be greater than 0"),
        ({"runs": True}, "runs is True; input should be a valid int"),
        ({"rns": 2}, "unknown key 'rns'; did you mean 'runs'"),
        ({"batches": (0,)}, r"batches\[0\] is 0; input should be greater than 0"),
        ({"batches": (2, 2)}, r"batches is \(2, 2\); give each entry once"),
        ({"memory": ("int9",)}, "vectors cannot be stored as 'int9'"),
        ({"memory": ("int8", "int8")}, r"memory is \('int8', 'int8'\); give each entry once"),
        ({"memory": ()}, r"memory is \(\); tuple should have"),
        ({"weights": ("int4",)}, r"weights\[0\] is 'int4'; input should be 'full' or 'int8'"),
        ({"weights": ("full", "full")}, r"weights is \('full', 'full'\); give each entry once"),
        ({"weights": ()}, r"weights is \(\); tuple should have"),
        ({"answer_tokens": 1}, "answer_tokens is 1; input should be greater"),
        ({"answer_tokens": 1000}, "answer_tokens is 1000; input should be less"),
        ({"kept": ("cold", "hot")}, r"kept\[1\] is 'hot'"),
        ({"kept": ("warm", "warm")}, r"kept is .*; give each entry once"),
        ({"kept": ()}, r"kept is \(\); tuple should have"),
        ({"block_context": "alone"}, "block_context is 'alone'"),
        ({"online": 1}, "online is 1"),
        ({"backbone": "llama"}, "there is no shape 'llama'; there are llama-3.2-1b"),
        ({"dtype": "int3"}, "dtype is 'int3'; input should be 'float32' or 'bfloat16'"),
        ({"device": "toaster"}, "device is 'toaster'; it can be cpu or cuda"),
    ],
)
def test_an_impossible_plan_is_rejected_with_one_sentence(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**changes)


def test_a_folder_is_a_shape_if_it_has_all_files_and_no_trained_model(
    tmp_path: Path, tiny_folder: Callable[..., str], tiny_checkpoint: str
) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "whole")
    digests = [Plan(backbone=str(tmp_path / "whole")).settings()["shape_sha256"]]
    config = tmp_path / "whole" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    digests.append(Plan(backbone=str(tmp_path / "whole")).settings()["shape_sha256"])
    assert len(set(digests)) == 2
    (tmp_path / "whole" / "tokenizer.json").unlink()
    # A trained model beside a tokenizer.
    shutil.copytree(tiny_checkpoint, tmp_path / "trained")
    for name in TOKENIZER:
        shutil.copy(Path(tiny_folder()) / name, tmp_path / "trained")
    for folder in ("whole", "trained"):
        with pytest.raises(
            ConfigError, match=r"or give the folder of a backbone with config\.json"
        ):
            Plan(backbone=str(tmp_path / folder))


def test_a_missing_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda:1'; this machine has no GPU, leave it"):
        Plan(device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Plan(device="cuda:1").place == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:2'; the last GPU of this machine is cuda:1"):
        Plan(device="cuda:2")


def test_lengths_are_not_settings_but_all_that_affects_figures_is() -> None:
    one, other = Plan(contexts=(8,)).settings(), Plan(contexts=(9,)).settings()
    assert one == other
    assert one != Plan(runs=21).settings()
    assert Plan(k=3).settings()["k"] == 3

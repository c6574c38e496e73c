from __future__ import annotations

import logging
import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sedem import durable_files
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem.method.compressor import encode
from sedem_lab.training import state_cache
from sedem_lab.training.example_dataset import Ragged
from sedem_lab.training.state_cache import StateCache

LAYERS = (3, 1)


def random_texts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(2, 258) for _ in range(rng.randint(1, 12))] for _ in range(count)]


def kept(
    backbone: Backbone, texts: list[list[int]], cache: Path, layers: tuple[int, ...] = LAYERS
) -> StateCache:
    return StateCache.open(backbone, layers, Ragged.of(texts), cache, "texts")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that are encoded; four texts a batch, noted after each."""
    sizes: list[int] = []

    def counted(backbone: Backbone, ids_ST: Tensor, layers: tuple[int, ...]) -> Tensor:
        sizes.append(len(ids_ST))
        return encode(backbone, ids_ST, layers)

    monkeypatch.setattr(state_cache, "encode", counted)
    monkeypatch.setattr(state_cache, "BATCH", 4)
    monkeypatch.setattr(state_cache, "FLUSH", 1)
    return sizes


def test_states_equal_direct_encoding_whatever_they_are_encoded_with(
    backbone: Backbone, tmp_path: Path
) -> None:
    texts = random_texts(40)  # more than one batch
    found = kept(backbone, texts, tmp_path / "before")
    states = found.batch(range(40))
    assert states.shape == (2, 40, 12, 32) and states.dtype == torch.bfloat16
    for row, ids in enumerate(texts):
        alone = encode(backbone, torch.tensor([ids]), LAYERS)[:, 0]
        own = states[:, row, : len(ids)].float()
        torch.testing.assert_close(own, alone, rtol=8e-3, atol=1e-3)
        assert not states[:, row, len(ids) :].any()
    assert torch.equal(found.batch([17, 3])[:, 0], found.batch([3, 17])[:, 1])
    # Adapters have no part in them.
    backbone.add_lora(2, 4)
    for parameter in backbone.lora_parameters():
        torch.nn.init.ones_(parameter)
    assert torch.equal(kept(backbone, texts, tmp_path / "after").batch(range(40)), states)


@pytest.mark.parametrize(("flush", "again"), [(1, [4, 2]), (3, [4, 4, 4, 2])])
def test_a_killed_encoding_goes_on_where_it_was_noted(
    backbone: Backbone,
    tmp_path: Path,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    flush: int,
    again: list[int],
) -> None:
    texts = random_texts(14)
    monkeypatch.setattr(state_cache, "FLUSH", flush)
    counted = state_cache.encode

    def killed(backbone: Backbone, ids_ST: Tensor, layers: tuple[int, ...]) -> Tensor:
        if len(batches) == 2:
            raise KeyboardInterrupt
        return counted(backbone, ids_ST, layers)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(state_cache, "encode", killed)
        kept(backbone, texts, tmp_path / "cache")
    batches.clear()
    resumed = kept(backbone, texts, tmp_path / "cache")
    assert batches == again
    whole = kept(backbone, texts, tmp_path / "whole")
    assert torch.equal(resumed.batch(range(14)), whole.batch(range(14)))
    batches.clear()
    assert torch.equal(
        kept(backbone, texts, tmp_path / "cache").batch(range(14)), whole.batch(range(14))
    )
    assert not batches, "texts are encoded once"


def test_the_size_is_told_and_compared_with_the_disk_before_anything_is_encoded(
    backbone: Backbone,
    tmp_path: Path,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda _: usage(0, 0, 20_000))
    # 200 tokens of 2 layers, 32 numbers wide, in two bytes.
    texts = [[7] * 10] * 20
    needed = r"data\.cache_states \(25\.6 kB for the frozen states of 200 tokens of texts\) needs"
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ConfigError, match=needed + r" 25\.6 kB, but .* has 20 kB free"),
    ):
        kept(backbone, texts, tmp_path)
    assert caplog.messages == [
        f"25.6 kB for the frozen states of 200 tokens of texts, in '{tmp_path}'"
    ]
    assert not batches


def test_a_note_without_its_states_is_not_believed(
    backbone: Backbone, tmp_path: Path, batches: list[int]
) -> None:
    texts = random_texts(6)
    whole = kept(backbone, texts, tmp_path).batch(range(6))
    (folder,) = tmp_path.glob("states-*")
    (folder / "states.bin").unlink()
    batches.clear()
    again = kept(backbone, texts, tmp_path).batch(range(6))
    assert batches == [4, 2]
    assert torch.equal(again, whole)


def test_the_folder_is_named_after_model_type_layers_and_texts(
    backbone: Backbone, tmp_path: Path, tiny_folder: Callable[..., str]
) -> None:
    texts = [[5, 6], [7]]
    kept(backbone, texts, tmp_path, (3,))
    kept(backbone, texts, tmp_path, (2,))
    kept(backbone, [[5], [6, 7]], tmp_path, (3,))
    other = open_backbone(tiny_folder(seed=7))
    kept(other, texts, tmp_path, (3,))
    rounded = open_backbone(backbone.name, dtype=torch.bfloat16)
    kept(rounded, texts, tmp_path, (3,))
    assert len(list(tmp_path.glob("states-*"))) == 5
    # Opened again, it is the same model.
    kept(open_backbone(backbone.name), texts, tmp_path, (3,))
    assert len(list(tmp_path.glob("states-*"))) == 5

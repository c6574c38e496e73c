from __future__ import annotations

import logging
import random
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_two_processes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem import durable_files
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem.method.encoder import encode
from sedem.training import state_cache
from sedem.training.state_cache import StateCache

LAYERS = (3, 1)


def ragged(count: int, longest: int = 12) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(2, 258) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def padded(texts: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(ids) for ids in texts], batch_first=True)


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


def test_states_equal_direct_encoding_bit_for_bit(backbone: Backbone, tmp_path: Path) -> None:
    texts = ragged(20)
    kept = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts")
    order = sorted(range(20), key=lambda i: -len(texts[i]))
    direct = encode(backbone, padded([texts[i] for i in order]), LAYERS).to(torch.bfloat16)
    states = kept.batch(order)
    assert states.shape == direct.shape == (2, 20, 12, 32)
    assert states.dtype == torch.bfloat16
    for row, i in enumerate(order):
        assert torch.equal(states[:, row, : len(texts[i])], direct[:, row, : len(texts[i])])


def test_states_do_not_depend_on_what_was_encoded_with_them(
    backbone: Backbone, tmp_path: Path
) -> None:
    texts = ragged(40)  # more than one batch
    kept = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts")
    for i in (0, 17, 39):
        alone = encode(backbone, torch.tensor([texts[i]]), LAYERS)
        torch.testing.assert_close(kept.batch([i]).float(), alone, rtol=8e-3, atol=1e-3)


def test_a_batch_is_padded_on_the_right_with_zeros(backbone: Backbone, tmp_path: Path) -> None:
    texts = [[5, 6, 7], [8], [9, 10]]
    states = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts").batch([1, 2, 1])
    assert states.shape == (2, 3, 2, 32)
    assert torch.equal(states[:, 0], states[:, 2])
    assert not states[:, 0, 1].any()
    assert states[:, 0, 0].any() and states[:, 1, 1].any()


def test_adapters_have_no_part_in_states(backbone: Backbone, tmp_path: Path) -> None:
    texts = ragged(4)
    before = StateCache.open(backbone, LAYERS, texts, tmp_path / "before", "texts").batch(range(4))
    backbone.add_lora(2, 4)
    for parameter in backbone.lora_parameters():
        torch.nn.init.ones_(parameter)
    after = StateCache.open(backbone, LAYERS, texts, tmp_path / "after", "texts").batch(range(4))
    assert torch.equal(before, after)


def test_texts_are_encoded_once(backbone: Backbone, tmp_path: Path, batches: list[int]) -> None:
    texts = ragged(10)
    first = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts")
    assert sorted(batches) == [2, 4, 4]
    second = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts")
    assert len(batches) == 3
    assert len(first) == len(second) == 10
    assert torch.equal(first.batch(range(10)), second.batch(range(10)))


@pytest.mark.parametrize(("flush", "again"), [(1, [4, 2]), (2, [4, 2]), (3, [4, 4, 4, 2])])
def test_a_killed_encoding_goes_on_where_it_was_noted(
    backbone: Backbone,
    tmp_path: Path,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    flush: int,
    again: list[int],
) -> None:
    texts = ragged(14)
    monkeypatch.setattr(state_cache, "FLUSH", flush)
    counted = state_cache.encode

    def killed(backbone: Backbone, ids_ST: Tensor, layers: tuple[int, ...]) -> Tensor:
        if len(batches) == 2:
            raise KeyboardInterrupt
        return counted(backbone, ids_ST, layers)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(state_cache, "encode", killed)
        StateCache.open(backbone, LAYERS, texts, tmp_path / "cache", "texts")
    batches.clear()
    resumed = StateCache.open(backbone, LAYERS, texts, tmp_path / "cache", "texts")
    assert batches == again
    whole = StateCache.open(backbone, LAYERS, texts, tmp_path / "whole", "texts")
    assert torch.equal(resumed.batch(range(14)), whole.batch(range(14)))


def test_two_processes_encode_each_text_once(
    backbone: Backbone, tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ragged(14)
    whole = StateCache.open(backbone, LAYERS, texts, tmp_path / "whole", "texts")
    counted = state_cache.encode

    def slow(*inputs: Any) -> Tensor:
        time.sleep(0.05)
        return counted(*inputs)

    monkeypatch.setattr(state_cache, "encode", slow)

    def ask() -> tuple[int, list[float]]:
        batches.clear()
        kept = StateCache.open(backbone, LAYERS, texts, tmp_path / "cache", "texts")
        return len(batches), kept.batch(range(14)).float().numpy()

    (first, states), (second, others) = in_two_processes(ask)
    assert {first, second} == {0, 4}
    expected = whole.batch(range(14)).float().numpy()
    assert (states == expected).all() and (others == expected).all()


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
        StateCache.open(backbone, LAYERS, texts, tmp_path, "texts")
    assert caplog.messages == [
        f"25.6 kB for the frozen states of 200 tokens of texts, in '{tmp_path}'"
    ]
    assert not batches


def test_a_note_without_its_states_is_not_believed(
    backbone: Backbone, tmp_path: Path, batches: list[int]
) -> None:
    texts = ragged(6)
    whole = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts").batch(range(6))
    (folder,) = tmp_path.glob("states-*")
    (folder / "states.bin").unlink()
    batches.clear()
    again = StateCache.open(backbone, LAYERS, texts, tmp_path, "texts").batch(range(6))
    assert batches == [4, 2]
    assert torch.equal(again, whole)


def test_the_folder_is_named_after_model_type_layers_and_texts(
    backbone: Backbone, tmp_path: Path, tiny_folder: Callable[..., str]
) -> None:
    texts = [[5, 6], [7]]
    StateCache.open(backbone, (3,), texts, tmp_path, "texts")
    StateCache.open(backbone, (2,), texts, tmp_path, "texts")
    StateCache.open(backbone, (3,), [[5], [6, 7]], tmp_path, "texts")
    other = open_backbone(tiny_folder(seed=7))
    StateCache.open(other, (3,), texts, tmp_path, "texts")
    rounded = open_backbone(backbone.name, dtype=torch.bfloat16)
    StateCache.open(rounded, (3,), texts, tmp_path, "texts")
    assert len(list(tmp_path.glob("states-*"))) == 5
    # Opened again, it is the same model.
    StateCache.open(open_backbone(backbone.name), (3,), texts, tmp_path, "texts")
    assert len(list(tmp_path.glob("states-*"))) == 5

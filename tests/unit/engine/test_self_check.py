"""The trial of a fast engine against the reference, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.engine import layers, open, self_check
from sedem.engine.eager import Eager
from sedem.engine.static import Static
from sedem.errors import ConfigError


@pytest.fixture
def model(config: SedemConfig) -> SeDeM:
    backbone = open_backbone(config.encoder)
    model = SeDeM(config, backbone, backbone)
    backbone.add_lora(config.lora_rank, config.lora_alpha)
    return model.requires_grad_(False).eval()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """The engine that a GPU would run, without its graphs; whether graphs were asked for."""
    asked: list[bool] = []

    def without_graphs(model: SeDeM, *, graphs: bool, **settings: Any) -> Static:
        asked.append(graphs)
        return Static(model, graphs=False, **settings)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open, "Static", without_graphs)
    return asked


def test_an_engine_that_agrees_is_used_and_tried_once(
    model: SeDeM, captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open._tried(model, None), Static)
    assert self_check.is_known(self_check.key_of(model))
    monkeypatch.setattr(self_check, "trial", None)  # a second trial would fail
    assert isinstance(open._tried(model, None), Static)
    assert captured == [True, True]


@pytest.mark.parametrize("fault", ["wrong", "raises", "not finite"])
def test_an_engine_that_differs_is_not_used(
    fault: str,
    model: SeDeM,
    captured: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attend = layers.attend

    def faulty(query: torch.Tensor, key: Any, value: Any, bias: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("CUDA error: no kernel image\nmore")
        mixed = attend(query, key, value, None if bias is None else torch.zeros_like(bias))
        return mixed * torch.nan if fault == "not finite" else mixed

    monkeypatch.setattr(layers, "attend", faulty)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open._tried(model, None), Eager)
    assert not self_check.is_known(self_check.key_of(model))
    assert "engine 'eager' runs this model" in caplog.text
    assert ("no kernel image" in caplog.text) == (fault == "raises")
    assert "more" not in caplog.text


def test_a_model_that_cannot_be_captured_runs_on_the_reference(
    config: SedemConfig, tiny_folder: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    backbone = open_backbone(tiny_folder(rope_parameters=rope))
    dynamic = SeDeM(config, backbone, backbone).requires_grad_(False).eval()
    backbone.add_lora(config.lora_rank, config.lora_alpha)
    with caplog.at_level(logging.WARNING):
        assert isinstance(open._tried(dynamic, None), Eager)
    assert "engine 'eager' runs this model: backbone" in caplog.text
    assert "'dynamic' rotary positions" in caplog.text
    with pytest.raises(ConfigError, match="'dynamic' rotary positions"):
        Static(dynamic, graphs=True)


def test_a_cache_that_cannot_be_written_or_read_costs_a_trial(
    model: SeDeM, captured: list[bool], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert isinstance(open._tried(model, None), Static)
    assert not self_check.is_known(self_check.key_of(model))
    (tmp_path / "cache").unlink()
    (tmp_path / "cache" / "sedem").mkdir(parents=True)
    (tmp_path / "cache" / "sedem" / "engines.json").write_text('{"not": "a list"}')
    assert not self_check.is_known("a")
    self_check.remember("a")
    assert self_check.is_known("a")


def test_a_user_without_a_home_has_no_cache(
    model: SeDeM, captured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert isinstance(open._tried(model, None), Static)
    assert not self_check.is_known(self_check.key_of(model))

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from unit.training.blocks import windows

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem.method.injection import prefill
from sedem_lab.training.stage1 import Stage1, Stage1Losses

LENGTH, AFTER = 16, 5


def hugging_face_states(backbone: Backbone, ids: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Hidden states by layers run and logits `[P, V]`, start token in front."""
    given = torch.tensor([[backbone.bos_token_id, *ids]])
    output = backbone.model(input_ids=given, output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in output.hidden_states), output.logits[0]


def naive_parts(
    model: SeDeM,
    context: list[int],
    target: list[int],
    losses: Stage1Losses,
    encoded: list[int],
    given: int = 0,
) -> dict[str, float]:
    """Section 4's stage-1 losses of one window, term by term.

    Args:
        context: what the teacher reads, in decoder tokens.
        target: the continuation, in decoder tokens.
        encoded: the context in encoder tokens.
        given: tokens at the continuation's start that are no target.
    """
    config = model.config
    # H_s at l_extract, then slots, then H-hat.
    states, _ = hugging_face_states(model.encoder, encoded)
    hidden = [
        sum(states[layer][1 + t] for layer in config.extract_layers) / len(config.extract_layers)
        for t in range(len(encoded))
    ]
    compression = config.compression
    slots = [
        model.compressor.w_in(sum(hidden[j * compression : (j + 1) * compression]) / compression)
        for j in range(config.slots)
    ]
    restored = model.decompressor(torch.stack(slots))
    # Teacher: the frozen decoder on the raw context.
    _, logits = hugging_face_states(model.decoder, [*context, *target[:-1]])
    teacher = logits[len(context) :]
    # Student: the same decoder on restored states.
    ids = torch.tensor([[model.decoder.bos_token_id, *target[:-1]]])
    filled = prefill(
        model.decoder,
        config.inject_layer,
        ids,
        torch.ones_like(ids, dtype=torch.bool),
        restored[None],
        torch.ones(1, len(restored), dtype=torch.bool),
    )
    # Reading order is start, memory, target: the last memory state predicts the first token.
    student = model.decoder.logits(torch.cat([filled.restored[0, -1:], filled.prefix[0, 1:]]))
    counted, divergence = [], 0.0
    for t, token in list(enumerate(target))[given:]:
        counted.append(-math.log(student[t].softmax(0)[token]))
        q = (teacher[t] / losses.distill_temperature).softmax(0)
        p = (student[t] / losses.distill_temperature).softmax(0)
        divergence += float((q * (q / p).log()).sum()) / (len(target) - given)
    if losses.context_tokens != "continuation":
        own = model.decoder.logits(filled.restored[0, :-1])
        after = counted if losses.context_tokens == "both" else []
        pairs = zip(own, context[1:], strict=True)
        counted = [-math.log(row.softmax(0)[token]) for row, token in pairs] + after
    wanted = [model.compressor.w_in(state) for state in hidden]
    direction = 1 - sum(
        float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(restored, wanted, strict=True)
    ) / len(wanted)
    pooled = 1.0
    for j in range(config.slots):
        span = slice(j * compression, (j + 1) * compression)
        pooled -= (
            float(F.cosine_similarity(restored[span].mean(0), sum(wanted[span]), dim=0))
            / config.slots
        )
    return {
        "context": sum(counted) / len(counted),
        "distill": divergence,
        "reconstruct": direction + losses.pool_weight * pooled,
    }


def mean_parts(each: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(parts[name] for parts in each) / len(each) for name in each[0]}


def assert_parts(found: dict[str, Tensor], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=2e-4, abs=2e-5), name


LOSSES = Stage1Losses(distill=0.5, reconstruct=0.7, pool_weight=0.3, distill_temperature=2.0)


@pytest.mark.parametrize(
    ("changes", "scored", "at_once"),
    [
        ({}, "continuation", None),
        ({}, "window", None),
        ({}, "both", 7),
        ({"extract_layers": (1, 3)}, "continuation", None),
        ({"inject_layer": 0, "extract_layers": (2,)}, "window", 7),
        ({"compression": 2, "extract_layers": (3,), "inject_layer": 3}, "both", None),
        ({"decoder": "another of the same tokens"}, "continuation", None),
    ],
)
@torch.no_grad()
def test_losses_equal_those_written_out(
    backbone: Backbone,
    config: SedemConfig,
    tiny_folder: Callable[..., str],
    changes: dict[str, Any],
    scored: Literal["continuation", "window", "both"],
    at_once: int | None,
) -> None:
    torch.manual_seed(1)
    decoder = backbone
    if "decoder" in changes:
        decoder = open_backbone(tiny_folder("mistral", width=48, depth=3, seed=2))
    model = SeDeM(config.with_changes(**changes), backbone, decoder)
    losses, batch = LOSSES.with_changes(context_tokens=scored), windows(3)
    stage = Stage1(model, losses, logits_at_once=at_once)
    stage.calibrate(batch)
    found = stage(**batch)
    pairs = zip(batch["context"].tolist(), batch["continuation"].tolist(), strict=True)
    expected = mean_parts([naive_parts(model, a, b, losses, a) for a, b in pairs])
    assert_parts(found, expected)
    loss = expected["context"] + 0.5 * expected["distill"] + 0.7 * expected["reconstruct"]
    assert float(found["loss"]) == pytest.approx(loss, rel=2e-4)


@torch.no_grad()
def test_another_decoder_of_other_tokens(
    backbone: Backbone, config: SedemConfig, other_decoder: str
) -> None:
    other = open_backbone(other_decoder)
    model = SeDeM(config.with_changes(decoder=other.name), backbone, other)
    with pytest.raises(ConfigError, match=r"losses\.regress is 0\.5; .* different tokenizers"):
        Stage1(model, Stage1Losses(regress=0.5))
    with pytest.raises(ConfigError, match=r"context_tokens is 'both', which needs a restored"):
        Stage1(model, Stage1Losses(context_tokens="both"))
    stage = Stage1(model, LOSSES)
    texts = [("then the dog ran", " then it"), ("a barn of red hay", "thenthen")]
    context = torch.tensor([backbone.token_ids(text)[:LENGTH] for text, _ in texts])
    after = torch.tensor([backbone.token_ids(text) for _, text in texts])
    stage.calibrate({"context": context, "continuation": after})
    found = stage(context, after)
    decode = backbone.tokenizer.decode
    rows = [
        (other.token_ids(decode(a)), other.token_ids(decode(b)))
        for a, b in zip(context, after, strict=True)
    ]
    # Rows differ in length; the shortest decides, and what stands next to the border is kept.
    shortest = min(len(a) for a, _ in rows), min(len(b) for _, b in rows)
    assert shortest[0] < LENGTH and shortest[1] < after.shape[1]
    assert len({len(a) for a, _ in rows}) == len({len(b) for _, b in rows}) == 2
    expected = [
        naive_parts(model, a[-shortest[0] :], b[: shortest[1]], LOSSES, ids)
        for (a, b), ids in zip(rows, context.tolist(), strict=True)
    ]
    assert_parts(found, mean_parts(expected))


# The regression, ours


def naive_regression(model: SeDeM, context: list[int]) -> float:
    states, _ = hugging_face_states(model.encoder, context)
    hidden = states[model.config.extract_layer][1:]
    slots = hidden.unflatten(0, (-1, model.config.compression)).mean(1)
    restored = model.decompressor(model.compressor.w_in(slots))
    own = hugging_face_states(model.decoder, context)[0][model.config.inject_layer][1:]
    total = 0.0
    for a, b in zip(restored, own, strict=True):
        square = (((a - b) / model.decompressor.spread) ** 2).mean()
        total += float(square + 1 - F.cosine_similarity(a, b, dim=0))
    return total / len(own)


@pytest.mark.parametrize("decoder", ["same", "other"])
@torch.no_grad()
def test_the_regression_comes_first_and_alone(
    backbone: Backbone, config: SedemConfig, tiny_folder: Callable[..., str], decoder: str
) -> None:
    answers = backbone
    if decoder == "other":
        answers = open_backbone(tiny_folder("mistral", width=48, depth=3, seed=2))
        config = config.with_changes(decoder=answers.name)
    model = SeDeM(config, backbone, answers)
    stage = Stage1(model, Stage1Losses(regress=0.25, regress_first=0.5)).train()
    batch = windows(3)
    stage.calibrate(batch)
    expected = sum(naive_regression(model, ids) for ids in batch["context"].tolist()) / 3
    stage.progress = 0.49
    first = stage(**batch)
    assert set(first) == {"loss", "regress"}
    assert "context" in stage.eval()(**batch), "an evaluation sees all losses"
    stage.train()
    assert float(first["loss"]) == pytest.approx(expected, rel=2e-4)
    stage.progress = 0.5
    then = stage(**batch)
    assert set(then) == {"loss", "context", "distill", "reconstruct", "regress"}
    assert float(then["regress"]) == pytest.approx(expected, rel=2e-4)
    without = Stage1(model, Stage1Losses())(**batch)
    assert float(then["loss"]) == pytest.approx(float(without["loss"]) + 0.25 * expected, rel=2e-4)


def test_the_regression_runs_no_layer_it_does_not_need(model: SeDeM) -> None:
    stage = Stage1(model, Stage1Losses(regress=1.0, regress_first=1.0)).train()
    ran: list[int] = []
    for index, layer in enumerate(model.decoder.model.get_decoder().layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    stage(**windows(2))
    assert ran == [0, 1, 2]  # extraction after 3 of 4 layers, injection after 2


# Where training starts


@torch.no_grad()
def test_calibration_starts_at_place_and_scale_of_the_decoder(
    backbone: Backbone, config: SedemConfig
) -> None:
    torch.manual_seed(1)
    model = SeDeM(config, backbone, backbone)
    batch = windows(20)
    Stage1(model, Stage1Losses()).calibrate(batch)
    states = torch.cat(
        [hugging_face_states(backbone, ids)[0][2][1:] for ids in batch["context"].tolist()]
    )
    torch.testing.assert_close(model.decompressor.spread, states.std(0), rtol=1e-4, atol=1e-5)
    offset = model.decompressor.w_2.bias.view(4, 32) * model.decompressor.spread
    torch.testing.assert_close(offset, states.mean(0).expand(4, -1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_adapters_have_no_part_in_stage_1(model: SeDeM) -> None:
    batch, losses = windows(2), Stage1Losses(regress=0.5)
    stage = Stage1(model, losses)
    stage.calibrate(batch)
    spread, before = model.decompressor.spread.clone(), stage(**batch)
    model.decoder.add_lora(2, 4)
    for parameter in model.decoder.lora_parameters():
        torch.nn.init.ones_(parameter)
    stage = Stage1(model, losses)
    stage.calibrate(batch)
    after = stage(**batch)
    assert torch.equal(spread, model.decompressor.spread)
    assert all(torch.equal(before[name], after[name]) for name in before)


# Recall windows, ours


def recalled(separator: list[int], context: Tensor, before: Tensor, after: Tensor) -> list[bool]:
    """Which continuations were replaced, each by a separator and a span of its own context."""
    replaced = []
    for window, old, new in zip(context.tolist(), before.tolist(), after.tolist(), strict=True):
        size = len(new) - len(separator)
        spans = [window[at : at + size] for at in range(len(window) - size + 1)]
        recalls = new[: len(separator)] == separator and new[len(separator) :] in spans
        assert new == old or recalls
        replaced.append(new != old)
    return replaced


@pytest.mark.parametrize("after", [AFTER, LENGTH])
def test_a_share_of_the_windows_recalls_its_context(model: SeDeM, after: int) -> None:
    batch = windows(400, after)
    separator = model.encoder.token_ids("\n\n")
    for share in (0.0, 0.25, 1.0):
        new, flags = Stage1(model, Stage1Losses(recall=share))._with_recall(**batch)
        assert flags.tolist() == recalled(separator, batch["context"], batch["continuation"], new)
        assert int(flags.sum()) / 400 == pytest.approx(share, abs=0.07)


def test_window_seed_and_epoch_decide_which_windows_recall(model: SeDeM) -> None:
    batch = windows(100)

    def drawn(seed: int, epoch: int, rows: Tensor | None = None) -> list[list[int]]:
        stage = Stage1(model, Stage1Losses(recall=0.5), seed=seed)
        stage.epoch = epoch
        given = {name: ids if rows is None else ids[rows] for name, ids in batch.items()}
        return list(stage._with_recall(**given)[0].tolist())

    once = drawn(3, 0)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert drawn(3, 0, order) == [once[row] for row in order]
    assert once == drawn(3, 0) != drawn(4, 0)
    assert once != drawn(3, 1) == drawn(3, 1) != drawn(3, 2)


@torch.no_grad()
def test_recalled_spans_are_targets_and_their_separator_is_none(
    backbone: Backbone, config: SedemConfig
) -> None:
    torch.manual_seed(1)
    model = SeDeM(config, backbone, backbone)
    batch = windows(8)
    losses = LOSSES.with_changes(recall=0.5)
    stage = Stage1(model, losses, seed=2)
    targets, flags = stage._with_recall(**batch)
    assert 2 <= int(flags.sum()) <= 6
    found = stage(**batch)
    rows = zip(batch["context"].tolist(), targets.tolist(), flags.tolist(), strict=True)
    each = [naive_parts(model, a, b, losses, a, given=2 * flag) for a, b, flag in rows]
    # Of the divergence every token counts alike, of the next-token loss every window.
    counted = [AFTER - 2 * flag for flag in flags.tolist()]
    expected = mean_parts(each)
    expected["distill"] = sum(
        parts["distill"] * count for parts, count in zip(each, counted, strict=True)
    ) / sum(counted)
    assert_parts(found, expected)


def test_a_continuation_must_be_longer_than_the_separator(model: SeDeM) -> None:
    stage = Stage1(model, Stage1Losses(recall=1.0))
    with pytest.raises(ConfigError, match=r"continuation is 2 .* separator of 2 tokens"):
        stage(**windows(2, after=2))
    assert float(stage(**windows(2, after=3))["loss"].detach()) > 0

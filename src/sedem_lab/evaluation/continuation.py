"""How much of a segment its memory keeps: the loss on the text after it, in several conditions.

Letters: B batch, T context tokens, A continuation tokens, D decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sedem.backbone.prompts import SEPARATOR
from sedem.errors import ConfigError
from sedem.method.compressor import encode, states_at
from sedem.method.injection import prefill
from sedem.method.losses import next_token_loss
from sedem.model import SeDeM
from sedem_lab.evaluation.metrics import summarize

BATCH = 32
CONDITIONS = ("raw_text", "true_states", "memory", "other_memory", "nothing")


@torch.no_grad()
def continuation_losses(
    model: SeDeM,
    windows: Dataset[dict[str, Any]],
    conditions: Sequence[str] = CONDITIONS,
) -> dict[str, dict[str, Any]]:
    """Mean cross-entropy, in nats per token, of continuations and of spans of the context.

    The first token of a continuation is not a target, because without text or memory before it no
    state can predict it. A span of the context follows the prompts' separator, which is not a
    target either. Adapters are off: this measures stage 1.

    Args:
        model: a model with one backbone, or with two that share a tokenizer.
        windows: items with `context` `[T]` and `continuation` `[A]`.

    Returns:
        The losses by target and condition. Targets are "continuation" and "recall", a span of the
        context's second half. Conditions are the raw text as prefix, the decoder's true states
        injected, the restored states, those of another window, and nothing.

    Raises:
        ConfigError: the backbones have different tokenizers.
    """
    if model.encoder.vocabulary != model.decoder.vocabulary:
        raise ConfigError(
            "continuation losses need an encoder and a decoder with the same tokenizer"
        )
    losses: dict[str, dict[str, list[float]]] = {
        target: {condition: [] for condition in conditions} for target in ("continuation", "recall")
    }
    total = len(windows)  # type: ignore[arg-type]
    separator = torch.tensor(model.decoder.token_ids(SEPARATOR), device=model.device)
    with model.decoder.without_lora():
        for start in range(0, total, BATCH):
            items = [windows[i] for i in range(start, min(start + BATCH, total))]
            context_BT, after_BA = (
                torch.stack([torch.as_tensor(item[name]) for item in items]).to(model.device)
                for name in ("context", "continuation")
            )
            # What each condition injects `[B, T, D]`; raw text is a prefix instead.
            layer = model.config.inject_layer
            hidden_BTE = model.mixture(
                encode(model.encoder, context_BT, model.config.extract_layers).float()
            )
            memory_BMD = model.compressor(hidden_BTE, torch.ones_like(context_BT).bool())
            restored_BTD = model.decompressor(memory_BMD.to(torch.bfloat16).float())
            states = {
                "true_states": states_at(model.decoder, context_BT, [layer])[layer][:, 1:],
                "memory": restored_BTD,
                "other_memory": restored_BTD.roll(1, 0),
                "nothing": restored_BTD[:, :0],
            }
            half = context_BT.shape[1] // 2
            span_BA = context_BT[:, half : half + after_BA.shape[1] - len(separator)]
            recall_BA = torch.cat([separator.expand(len(span_BA), -1), span_BA], dim=1)
            for target, target_BA, skipped in (
                ("continuation", after_BA, 1),
                ("recall", recall_BA, len(separator)),
            ):
                for condition in conditions:
                    losses[target][condition] += _losses(
                        model, condition, context_BT, states.get(condition), target_BA, skipped
                    )
    return {
        target: {name: summarize(values, digits=4) for name, values in by_condition.items()}
        for target, by_condition in losses.items()
    }


def _losses(
    model: SeDeM,
    condition: str,
    context_BT: Tensor,
    states: Tensor | None,
    target_BA: Tensor,
    skipped: int,
) -> list[float]:
    """One loss for each window; the first `skipped` tokens are not targets."""
    start_B1 = target_BA.new_full((len(target_BA), 1), model.decoder.bos_token_id)
    if states is None:
        ids_BP = torch.cat([start_B1, context_BT, target_BA], dim=1)
        states, layer = torch.zeros(len(ids_BP), 0, model.decoder.width, device=model.device), 0
    else:
        ids_BP = torch.cat([start_B1, target_BA], dim=1)
        layer = model.config.inject_layer
    filled = prefill(
        model.decoder,
        layer,
        ids_BP,
        torch.ones_like(ids_BP, dtype=torch.bool),
        states,
        torch.ones(states.shape[:2], dtype=torch.bool, device=model.device),
    )
    scored_BA = target_BA[:, skipped:]
    length = scored_BA.shape[1]
    logits_BAV = model.decoder.logits(filled.prefix[:, -length - 1 : -1])
    return [
        float(next_token_loss(logits[None], targets[None]))
        for logits, targets in zip(logits_BAV, scored_BA, strict=True)
    ]

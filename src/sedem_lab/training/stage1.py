"""Stage 1: compressor and decompressor learn to preserve a context (section 4, first paragraph).

Letters: B batch, T context tokens, U restored states, A continuation
tokens, P positions, D decoder width, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from sedem.backbone.prompts import SEPARATOR
from sedem.config import Number, NumberAbove0, Settings, Share
from sedem.errors import ConfigError
from sedem.method.compressor import encode, states_at
from sedem.method.injection import prefill
from sedem.method.losses import IGNORED, reconstruction_loss, state_regression_loss
from sedem.model import SeDeM
from sedem_lab.data.windows import collate_windows, window_tokens
from sedem_lab.training.fit import Trainable
from sedem_lab.training.predictions import Predictions


class Stage1Losses(Settings):
    """Weights and temperatures of stage 1.

    Attributes:
        distill: lambda_distill; 0.5 is in a commented-out line of the paper's source.
        reconstruct: lambda_rec of stage 1; 1.0 in the same line.
        context: weight of L_ctx; the paper's is 1.
        context_tokens: the next tokens that L_ctx scores. "continuation": those after the window.
            "window": the window's own, each predicted after the restored states up to it. "both":
            all of them. The paper's "context-window next-token loss" can mean each.
        regress: weight of the regression of restored states onto the decoder's own states at the
            injection layer. Ours, not the paper's; 0 turns it off.
        regress_first: share of the training, at its start, that uses only this regression. It
            skips the upper layers, so it is several times faster.
        recall: share of windows whose continuation is replaced by a separator and a span of the
            context itself, which trains copying from memory. The separator distinguishes the two
            kinds and is not a target. Ours, not the paper's; 0 turns it off.
    """

    distill: Number = 0.5
    reconstruct: Number = 1.0
    pool_weight: Number = 1.0
    distill_temperature: NumberAbove0 = 1.0
    context: Number = 1.0
    context_tokens: Literal["continuation", "window", "both"] = "continuation"
    regress: Number = 0.0
    regress_first: Share = 0.0
    recall: Share = 0.0

    @model_validator(mode="after")
    def _regression_has_a_weight(self) -> Self:
        if self.regress_first and not self.regress:
            raise ValueError(
                f"regress_first is {self.regress_first} but regress is 0; give the regression a "
                "weight"
            )
        return self


class Stage1(Trainable):
    """Trains compressor and decompressor; encoder, decoder and selector are frozen.

    Args:
        seed: decides which windows become recall windows, differently in every epoch.
        logits_at_once: as in `Optimization`.
    """

    def __init__(
        self,
        model: SeDeM,
        losses: Stage1Losses,
        seed: int = 0,
        logits_at_once: int | None = None,
    ) -> None:
        super().__init__()
        self.logits_at_once = logits_at_once
        self.model = model
        self.losses = losses
        self.seed = seed
        self.same_tokens = model.encoder.vocabulary == model.decoder.vocabulary
        if losses.regress and not self.same_tokens:
            raise ConfigError(
                f"losses.regress is {losses.regress}; encoder and decoder have different "
                "tokenizers, so their states stand for different tokens: set it to 0"
            )
        restores_tokens = self.same_tokens and model.config.decompressor != "none"
        if losses.context_tokens != "continuation" and not restores_tokens:
            raise ConfigError(
                f"losses.context_tokens is '{losses.context_tokens}', which needs a restored state "
                "for each token of the decoder: encoder and decoder with one tokenizer, and a "
                "decompressor; set it to 'continuation'"
            )
        if model.config.decompressor == "none":
            for name in ("distill", "reconstruct", "regress"):
                if value := getattr(losses, name):
                    raise ConfigError(
                        f"losses.{name} is {value}, but a model without a decompressor restores no "
                        f"states and learns only from losses.context; set losses.{name} to 0"
                    )
        self.freeze_others()

    def train(self, mode: bool = True) -> Self:
        """Set training mode; frozen backbones stay in evaluation mode, without dropout."""
        super().train(mode)
        self.model.eval()
        return self

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate."""
        return {
            "compressor": [*self.model.mixture.parameters(), *self.model.compressor.parameters()],
            "decompressor": list(self.model.decompressor.parameters()),
        }

    @torch.no_grad()
    def calibrate(self, batch: dict[str, Tensor]) -> None:
        """Initialize the decompressor to the mean and scale of the decoder's states on a batch."""
        with self.model.decoder.without_lora():
            layer = self.model.config.inject_layer
            context_BP, _ = self._decoder_context(**batch)
            states = states_at(self.model.decoder, context_BP, [layer])[layer]
        self.model.decompressor.calibrate(states[:, 1:].flatten(0, 1))

    collate = staticmethod(collate_windows)
    tokens = staticmethod(window_tokens)

    def forward(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Losses of encoder tokens `[B, T]` and the tokens that follow `[B, A]`.

        Returns:
            `loss` (equation of the stage-1 objective) and its parts.
        """
        model, weights = self.model, self.losses
        mask_BT = torch.ones_like(context, dtype=torch.bool)
        if self.training and self.progress < weights.regress_first:
            states_XBTE, own_BTD, _ = self._teach(context, context, context[:, :0], distills=False)
            hidden_BTE = model.mixture(states_XBTE.float())
            restored_BTD = model.decompressor(model.compressor(hidden_BTE, mask_BT))
            loss = state_regression_loss(restored_BTD, own_BTD, mask_BT, model.decompressor.spread)
            return {"loss": loss, "regress": loss}
        continuation, recalled_B = self._with_recall(context, continuation)
        context_BP, target_BA = self._decoder_context(context, continuation)
        states_XBTE, own_BTD, teacher_BAD = self._teach(
            context, context_BP, target_BA, distills=bool(weights.distill)
        )
        hidden_BTE = model.mixture(states_XBTE.float())
        restored_BUD = model.decompressor(model.compressor(hidden_BTE, mask_BT))
        separator = len(model.decoder.token_ids(SEPARATOR))
        last_BPD, after = self._student(restored_BUD, target_BA), restored_BUD.shape[1] - 1
        predicted = self._predictions(last_BPD[:, after:])
        labels_BA = target_BA.clone()
        labels_BA[:, :separator].masked_fill_(recalled_B[:, None], IGNORED)
        if weights.context_tokens == "continuation":
            parts = {"context": predicted.next_token_loss(labels_BA)}
        else:
            labels_BP = torch.cat([context[:, 1:], labels_BA], dim=1)
            if weights.context_tokens == "window":
                labels_BP[:, after:] = IGNORED
            parts = {"context": self._predictions(last_BPD).next_token_loss(labels_BP)}
        taught_BA = labels_BA != IGNORED
        if weights.distill:
            parts["distill"] = predicted.distillation_loss(
                self._predictions(teacher_BAD), taught_BA, weights.distill_temperature
            )
        if weights.reconstruct:
            # Without detach, the shared W_in could lower the loss by making all targets alike.
            parts["reconstruct"] = reconstruction_loss(
                restored_BUD,
                model.compressor.target(hidden_BTE).detach(),
                mask_BT,
                model.config.compression,
                weights.pool_weight,
            )
        if weights.regress:
            parts["regress"] = state_regression_loss(
                restored_BUD, own_BTD, mask_BT, model.decompressor.spread
            )
        total = [getattr(weights, name) * value for name, value in parts.items()]
        return {"loss": torch.stack(total).sum(), **parts}

    def _with_recall(self, context: Tensor, continuation: Tensor) -> tuple[Tensor, Tensor]:
        """Continuations, some replaced by spans of their context, and a mask of those `[B]`."""
        if not self.losses.recall:
            return continuation, torch.zeros(len(context), dtype=torch.bool, device=context.device)
        length = continuation.shape[1]
        separator = torch.tensor(self.model.encoder.token_ids(SEPARATOR), device=context.device)
        if length <= len(separator):
            raise ConfigError(
                f"text.continuation is {length} tokens, but a separator of {len(separator)} tokens "
                "comes first; make it longer, or set losses.recall to 0"
            )
        # If a text leaves no room to shift its windows, they are the same in every epoch.
        later = [self.epoch] if self.epoch else []
        size, recalled, starts = length - len(separator), [], []
        # One copy to the host and one back; otherwise a GPU would synchronize at every row.
        for beginning in context[:, :8].tolist():
            # Seeded by the window, so that a resumed run makes the same choice.
            rng = np.random.default_rng([self.seed, *beginning, *later])
            recalled.append(bool(rng.random() < self.losses.recall))
            starts.append(int(rng.integers(0, context.shape[1] - size + 1)) if recalled[-1] else 0)
        recalled_B = torch.tensor(recalled, device=context.device)
        if not any(recalled):
            return continuation, recalled_B
        starts_B1 = torch.tensor(starts, device=context.device)[:, None]
        span_BA = context.gather(1, starts_B1 + torch.arange(size, device=context.device))
        asked_BA = torch.cat([separator.expand(len(context), -1), span_BA], dim=1)
        return torch.where(recalled_B[:, None], asked_BA, continuation), recalled_B

    def _decoder_context(self, context: Tensor, continuation: Tensor) -> tuple[Tensor, Tensor]:
        """Context and continuation in decoder tokens, trimmed to the shortest row."""
        if self.same_tokens:
            return context, continuation
        decode = self.model.encoder.tokenizer.decode
        contexts, continuations = (
            [self.model.decoder.token_ids(decode(ids)) for ids in rows.tolist()]
            for rows in (context, continuation)
        )
        before, after = min(map(len, contexts)), min(map(len, continuations))
        # Drop the tokens farthest from the boundary between the two.
        return (
            torch.tensor([ids[-before:] for ids in contexts], device=context.device),
            torch.tensor([ids[:after] for ids in continuations], device=context.device),
        )

    @torch.no_grad()
    def _teach(
        self, context_BT: Tensor, context_BP: Tensor, target_BA: Tensor, *, distills: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States of the encoder, the decoder's injection layer, and the teacher's last layer.

        Without distillation the last layer's are not needed, and the upper layers are not run.
        """
        model = self.model
        extract, inject = model.config.extract_layers, model.config.inject_layer
        before = context_BP.shape[1]
        last = model.decoder.depth if distills else inject
        layers = {inject, last}
        if model.encoder is model.decoder:
            layers |= set(extract)
        with model.decoder.without_lora():
            states = states_at(
                model.decoder, torch.cat([context_BP, target_BA[:, :-1]], dim=1), sorted(layers)
            )
        # Attention is causal: states of the context do not depend on the continuation.
        if model.encoder is model.decoder:
            encoded = torch.stack([states[layer][:, 1 : 1 + before] for layer in extract])
        else:
            encoded = encode(model.encoder, context_BT, extract)
        own_BPD = states[inject][:, 1 : 1 + before]
        return encoded, own_BPD, states[last][:, before:]

    def _predictions(self, states_BPD: Tensor) -> Predictions:
        return Predictions(self.model.decoder.logits, states_BPD, self.logits_at_once)

    def _student(self, restored_BUD: Tensor, target_BA: Tensor) -> Tensor:
        """The decoder's last states `[B, U+A-1, D]` of the restored context and the continuation.

        Only the restored states tell it of the context. Other states are dropped on return.
        """
        model = self.model
        start_B1 = target_BA.new_full((len(target_BA), 1), model.decoder.bos_token_id)
        ids_BP = torch.cat([start_B1, target_BA[:, :-1]], dim=1)
        with model.decoder.without_lora():
            filled = prefill(
                model.decoder,
                model.config.inject_layer,
                ids_BP,
                torch.ones_like(ids_BP, dtype=torch.bool),
                restored_BUD,
                torch.ones(restored_BUD.shape[:2], dtype=torch.bool, device=restored_BUD.device),
                padded=False,
            )
        # The start token comes before the memory, so the last restored state predicts the first
        # token of the continuation.
        return torch.cat([filled.restored, filled.prefix[:, 1:]], dim=1)

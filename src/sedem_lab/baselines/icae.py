"""ICAE: segments of text into memory tokens that a frozen decoder reads (Ge et al., 2024).

The source is version 2 of the official code (multi-span) at the settings of the paper's appendix.
A context is cut into n = ceil(tokens / (memory * compression)) equal segments. The backbone with
adapters on q and v encodes each segment separately as [start; segment; memory tokens]. The slots of
a segment are the last hidden states, after the final norm, at its memory tokens. The same backbone
without adapters reads the slots of all segments as soft tokens. Special tokens have their own
embeddings: AE stands between slots and a text to reproduce, FT between slots and a prompt, and
nothing between slots and a continuation.

Deviations: docs/deviations.md.

Letters: B batch, S segments, T tokens of a segment, M memory tokens, U slots of a context, A tokens
to predict, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.config import Share, WholeAbove0, WholeFrom0, WidthAbove0, WidthFrom0
from sedem.errors import ConfigError
from sedem.method.losses import IGNORED
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import LoraTargets, ReaderConfig
from sedem_lab.baselines.soft_prompt import (
    PrefillResult,
    continuation_loss,
    prefill_soft_prompts,
    run_embeddings,
    run_soft_prompts,
)
from sedem_lab.baselines.trained import CompressedContext, TrainedReader, generator_for

SPECIAL = ("ae", "lm", "ft")
"""Special tokens, after the memory tokens in the embedding table; LM is unused, as officially."""

ENCODED_TOGETHER = 16
"""Segments in one batch of the encoder."""


class ICAEConfig(ReaderConfig):
    """Settings of ICAE; the defaults are the paper's.

    Attributes:
        memory: M, memory tokens of a segment.
        compression: a segment has at most this many times M tokens.
        autoencode: share of text windows to reproduce; the others are continued. The paper names
            both objectives but no mix.
        unscored: number of leading continuation tokens without loss.
    """

    lora_rank: WidthFrom0 = 128
    lora_alpha: WholeAbove0 = 32
    lora_targets: LoraTargets = ("q_proj", "v_proj")
    lora_dropout: Share = 0.05
    memory: WidthAbove0 = 128
    compression: WholeAbove0 = 4
    autoencode: Share = 0.5
    unscored: WholeFrom0 = 8
    seed: WholeFrom0 = 0


@dataclass(frozen=True)
class SegmentSlots:
    """Slots of a context.

    Attributes:
        states: slots of each segment `[S, M, D]`, in bfloat16.
        size: tokens of every segment but the last.
    """

    states: Tensor
    size: int


class ICAE(TrainedReader):
    """The in-context autoencoder."""

    name = "icae"
    Config = ICAEConfig
    frozen_decoder = True

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """Embeddings of memory tokens, AE, LM and FT; standard normal initially, as officially."""
        rows = config.memory + len(SPECIAL)
        return nn.ModuleDict({"tokens": nn.Embedding(rows, shape.hidden_size)})

    @classmethod
    def overhead(cls, config: Any, shape: PretrainedConfig) -> int:
        """The paper's 0.54M and 0.81M: the table twice, and one row of padding.

        The official code extends the encoder's own embeddings by as many rows and one for padding,
        which makes 2 (M + 3) + 1 rows. The encoder never reads its rows.
        """
        rows = config.memory + len(SPECIAL)
        return (2 * rows + 1) * int(shape.hidden_size)

    # Memory

    def segments(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Cut a context into equal segments; the last may be shorter by less than their number."""
        count = -(-len(ids) // (self.config.memory * self.config.compression))
        return ids.split(-(-len(ids) // count))

    def encode(self, segments: Sequence[Tensor]) -> Tensor:
        """Encode each segment separately, with adapters; slots `[S, M, D]`.

        Padding is on the left, so that the memory tokens are last in every row.
        """
        backbone, memory = self.backbone, self.config.memory
        start = segments[0].new_tensor([backbone.bos_token_id])
        rows = []
        for segment in segments:
            embedded_TD = backbone.embed(torch.cat([start, segment]))
            tokens_MD = self._embedding(range(memory)).to(embedded_TD)
            rows.append(torch.cat([embedded_TD, tokens_MD]))
        states_SPD = run_embeddings(backbone, rows)
        return backbone.model.get_decoder().norm(states_SPD[:, -memory:])

    def compress(self, ids: list[int]) -> CompressedContext:
        """Encode every segment into slots."""
        segments = self.segments(torch.tensor(ids, device=self.backbone.device))
        batches = [
            self.encode(segments[at : at + ENCODED_TOGETHER])
            for at in range(0, len(segments), ENCODED_TOGETHER)
        ]
        states_SMD = torch.cat(batches).bfloat16()
        return CompressedContext(SegmentSlots(states_SMD, len(segments[0])), 2 * states_SMD.numel())

    # Answering

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return the tokens of all segments whose slots fit together with FT."""
        memory = self.config.memory
        most = max(0, free_positions(self.backbone, prompt, limit) - 1) // memory
        count = -(-tokens // (memory * self.config.compression))
        return tokens if count <= most else most * -(-tokens // count)

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token, slots, FT and prompt."""
        dtype = self.backbone.dtype
        rows = [
            self._with_special(
                slots.states[: -(-count // slots.size)].flatten(0, 1).to(dtype), "ft"
            )
            for slots, count in zip(contents, used, strict=True)
        ]
        return prefill_soft_prompts(self.backbone, rows, prompts)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after slots, FT and prompt."""
        rows = [self._with_special(slots, "ft") for slots in self._slots(contexts)]
        with self.backbone.without_lora():
            states_BPD = run_soft_prompts(self.backbone, rows, ids, valid).prefix
            return self.answer_loss(states_BPD, labels)

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Autoencoding loss of some windows, continuation loss of the others (section 2.2).

        Raises:
            ConfigError: every token of the continuation would be without loss.
        """
        if continuation.shape[1] <= self.config.unscored:
            raise ConfigError(
                f"text.continuation is {continuation.shape[1]} tokens and model.unscored "
                f"{self.config.unscored}, so no token has a loss; make the continuation longer"
            )
        slots_BUD = torch.stack(self._slots(list(context)))
        reproduced_B = torch.tensor(
            [
                generator_for(self.config.seed, row).random() < self.config.autoencode
                for row in context
            ],
            device=context.device,
        )
        parts: dict[str, Tensor] = {}
        if reproduced_B.any():
            ends_B1 = context.new_full((int(reproduced_B.sum()), 1), self.backbone.eos_token_id)
            target_BA = torch.cat([context[reproduced_B], ends_B1], dim=1)
            rows = [self._with_special(slots, "ae") for slots in slots_BUD[reproduced_B]]
            parts["autoencode"] = self._text_loss(rows, target_BA, target_BA)
        if not reproduced_B.all():
            target_BA = continuation[~reproduced_B]
            labels_BA = target_BA.clone()
            labels_BA[:, : self.config.unscored] = IGNORED
            parts["continue"] = self._text_loss(
                list(slots_BUD[~reproduced_B]), target_BA, labels_BA
            )
        share = reproduced_B.float().mean()
        weights = {"autoencode": share, "continue": 1 - share}
        return {
            "loss": sum((weights[n] * v for n, v in parts.items()), share.new_zeros(())),
            **parts,
        }

    def _text_loss(self, rows: Sequence[Tensor], target_BA: Tensor, labels_BA: Tensor) -> Tensor:
        with self.backbone.without_lora():
            return continuation_loss(self.backbone, rows, target_BA, labels_BA)

    def _slots(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        """Slots of each context `[U, D]`; all segments are one batch."""
        segments = [self.segments(context) for context in contexts]
        states_SMD = self.encode([segment for row in segments for segment in row])
        return [part.flatten(0, 1) for part in states_SMD.split([len(row) for row in segments])]

    def _with_special(self, slots_UD: Tensor, name: str) -> Tensor:
        token = self._embedding([self.config.memory + SPECIAL.index(name)])
        return torch.cat([slots_UD, token.to(slots_UD)])

    def _embedding(self, rows: Sequence[int]) -> Tensor:
        table = self.parts()["tokens"]
        return table(torch.tensor(list(rows), device=self.backbone.device))

"""ICAE: segments of text into memory tokens that a frozen decoder reads (Ge et al., 2024).

Followed: version 2 of the official code (multi-span), at the settings of the paper's appendix.
A context is cut into n = ceil(tokens / (memory * compression)) equal segments. Each is encoded on
its own as [start; segment; memory tokens] by the backbone with adapters on q and v; its slots are
the last hidden states, after the closing norm, at the memory tokens. The same backbone without
adapters reads the slots of all segments as soft tokens. Special tokens have embeddings of their
own: AE stands between slots and text to be reproduced, FT between slots and prompt, nothing between
slots and a continuation.

Where it differs: docs/deviations.md.

Letters: B batch, S segments, T tokens of a segment, M memory tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.baselines.memory import Begun, Remembered, own_generator
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begin_soft, continuation_loss, run_rows, run_soft
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.method.losses import IGNORED, next_token_loss

SPECIAL = ("ae", "lm", "ft")
"""Tokens after the memory tokens in the table; LM is there as in the official code, but unused."""

ENCODED_TOGETHER = 16
"""Segments."""


@dataclass(frozen=True)
class ICAEConfig(ReaderConfig):
    """Settings of ICAE; the defaults are the paper's.

    Attributes:
        memory: M, memory tokens of a segment.
        compression: tokens of a segment are at most this many times M.
        autoencode: share of text windows that are reproduced; the others are continued. The paper
            names both objectives and no mix.
        unscored: first tokens of a continuation that do not count in its loss.
        seed: of the mix.
    """

    lora_rank: int = 128
    lora_alpha: int = 32
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    lora_dropout: float = 0.05
    memory: int = 128
    compression: int = 4
    autoencode: float = 0.5
    unscored: int = 8
    seed: int = 0

    least: ClassVar[Mapping[str, int]] = {"memory": 1, "compression": 1, "unscored": 0, "seed": 0}
    shares: ClassVar[tuple[str, ...]] = ("autoencode",)


@dataclass(frozen=True)
class Slots:
    """The memory of a context.

    Attributes:
        states: slots of each segment `[S, M, D]`, in bfloat16.
        size: tokens of each segment but the last.
    """

    states: Tensor
    size: int


class ICAE(TrainedReader):
    """The in-context autoencoder."""

    name = "icae"
    Config = ICAEConfig

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """One table: memory tokens, AE, LM and FT; standard normal at the start, as official."""
        rows = config.memory + len(SPECIAL)
        return nn.ModuleDict({"tokens": nn.Embedding(rows, shape.hidden_size)})

    @classmethod
    def overhead(cls, config: Any, shape: PretrainedConfig) -> int:
        """What gives the paper's 0.54M and 0.81M: the table, and the rows it stands for.

        The official code also lengthens the encoder's own embeddings by as many rows and one of
        padding: 2 (M + 3) + 1 rows. Those of the encoder are never read.
        """
        rows = config.memory + len(SPECIAL)
        return (2 * rows + 1) * int(shape.hidden_size)

    # Memory

    def segments(self, ids: Tensor) -> tuple[Tensor, ...]:
        """A context in equal segments, the last one shorter by less than their number."""
        count = -(-len(ids) // (self.config.memory * self.config.compression))
        return ids.split(-(-len(ids) // count))

    def encode(self, segments: Sequence[Tensor]) -> Tensor:
        """Slots of segments `[S, M, D]`, each read on its own with the adapters on.

        Padding stands on the left, so that memory tokens come last in every row.
        """
        backbone, memory = self.backbone, self.config.memory
        start = segments[0].new_tensor([backbone.bos_token_id])
        rows = []
        for segment in segments:
            embedded_TD = backbone.embed(torch.cat([start, segment]))
            tokens_MD = self._embedding(range(memory)).to(embedded_TD)
            rows.append(torch.cat([embedded_TD, tokens_MD]))
        states_SPD, _ = run_rows(backbone, rows)
        return backbone.model.get_decoder().norm(states_SPD[:, -memory:])

    def remember(self, ids: list[int]) -> Remembered:
        """Slots of every segment."""
        segments = self.segments(torch.tensor(ids, device=self.backbone.device))
        batches = [
            self.encode(segments[at : at + ENCODED_TOGETHER])
            for at in range(0, len(segments), ENCODED_TOGETHER)
        ]
        states_SMD = torch.cat(batches).bfloat16()
        return Remembered(Slots(states_SMD, len(segments[0])), 2 * states_SMD.numel())

    # Answering

    def answering(self) -> AbstractContextManager[None]:
        """The decoder is frozen: no adapters."""
        return self.backbone.without_lora()

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """Whole segments whose slots, and FT, have positions left."""
        memory = self.config.memory
        most = max(0, self.room(prompt, limit) - 1) // memory
        count = -(-tokens // (memory * self.config.compression))
        return tokens if count <= most else most * -(-tokens // count)

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill start token, slots, FT and prompt."""
        dtype = self.backbone.dtype
        rows = [
            self._marked(kept.states[: -(-count // kept.size)].flatten(0, 1).to(dtype), "ft")
            for kept, count in zip(contents, seen, strict=True)
        ]
        return begin_soft(self.backbone, rows, prompts)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after slots, FT and prompt."""
        rows = [self._marked(slots, "ft") for slots in self._slots(contexts)]
        with self.backbone.without_lora():
            states_BPD = run_soft(self.backbone, rows, ids, valid).prefix
            logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels)}

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Some windows are reproduced from their slots, the others continued (section 2.2)."""
        if continuation.shape[1] <= self.config.unscored:
            raise ConfigError(
                f"text.continuation is {continuation.shape[1]} tokens and model.unscored "
                f"{self.config.unscored}; nothing of it would be learnt from, make it longer"
            )
        slots_BUD = torch.stack(self._slots(list(context)))
        again_B = torch.tensor(
            [
                own_generator(self.config.seed, row).random() < self.config.autoencode
                for row in context
            ],
            device=context.device,
        )
        parts: dict[str, Tensor] = {}
        if again_B.any():
            ends_B1 = context.new_full((int(again_B.sum()), 1), self.backbone.eos_token_id)
            target_BA = torch.cat([context[again_B], ends_B1], dim=1)
            rows = [self._marked(slots, "ae") for slots in slots_BUD[again_B]]
            parts["autoencode"] = self._text_loss(rows, target_BA, target_BA)
        if not again_B.all():
            target_BA = continuation[~again_B]
            labels_BA = target_BA.clone()
            labels_BA[:, : self.config.unscored] = IGNORED
            parts["continue"] = self._text_loss(list(slots_BUD[~again_B]), target_BA, labels_BA)
        share = again_B.float().mean()
        weights = {"autoencode": share, "continue": 1 - share}
        return {
            "loss": sum((weights[n] * v for n, v in parts.items()), share.new_zeros(())),
            **parts,
        }

    def _text_loss(self, rows: Sequence[Tensor], target_BA: Tensor, labels_BA: Tensor) -> Tensor:
        with self.backbone.without_lora():
            return continuation_loss(self.backbone, rows, target_BA, labels_BA)

    def _slots(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        """Slots of each context `[U, D]`, all segments as one batch."""
        segments = [self.segments(context) for context in contexts]
        states_SMD = self.encode([segment for row in segments for segment in row])
        return [part.flatten(0, 1) for part in states_SMD.split([len(row) for row in segments])]

    def _marked(self, slots_UD: Tensor, mark: str) -> Tensor:
        token = self._embedding([self.config.memory + SPECIAL.index(mark)])
        return torch.cat([slots_UD, token.to(slots_UD)])

    def _embedding(self, rows: Sequence[int]) -> Tensor:
        table = self.parts()["tokens"]
        return table(torch.tensor(list(rows), device=self.backbone.device))

"""500xCompressor: a text into the keys and values of a few tokens (Li et al., 2025).

Followed: the official code of both trainings and of prediction, at the settings of the paper's
appendix. The backbone with adapters reads the first `limit` tokens of a context, filled up with end
tokens that count like any other, and M learned tokens after them; what is kept are the keys and
values of these M tokens in every layer. The same backbone without adapters reads prompt and answer
with them as its past. Trained first to reproduce the text, then to answer.

The limit holds for a whole context, as in the paper: what comes later is left out, and the answer
says so. Where else it differs: docs/deviations.md.

Letters: B batch, T context tokens, M memory tokens, P prompt and answer tokens, A answer tokens,
L layers, G key-value heads, H head width, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.baselines.memory import Begun, Remembered
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begun, padded_left
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError, DataError
from sedem.method.injection import Stream
from sedem.method.losses import next_token_loss

Positions = Literal["restart", "continue"]


@dataclass(frozen=True)
class Compressor500xConfig(ReaderConfig):
    """Settings of 500xCompressor; the defaults are the paper's.

    Attributes:
        memory: M, learned tokens whose keys and values are kept.
        limit: tokens of a context that are read; shorter ones are filled up to it.
        positions: where the decoder's first token stands. Keys carry the positions at which they
            were computed, limit to limit + M - 1. "restart" goes on from M, so that memory lies
            ahead of every token that looks at it: what the official code does, as it counts the
            cache alone, and so what the paper ran. "continue" goes on from limit + M, in reading
            order.
    """

    lora_rank: int = 64
    lora_alpha: int = 32
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    lora_dropout: float = 0.05
    memory: int = 4
    limit: int = 500
    positions: Positions = "restart"

    least: ClassVar[Mapping[str, int]] = {"memory": 1, "limit": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions not in get_args(Positions):
            raise ConfigError(
                f"positions is {self.positions!r}; it can be {' or '.join(get_args(Positions))}"
            )


class Compressor500x(TrainedReader):
    """Keys and values of a few tokens as memory."""

    name = "500x"
    Config = Compressor500xConfig

    def __init__(self, config: Compressor500xConfig, backbone: Backbone) -> None:
        if config.limit + config.memory > backbone.max_positions:
            raise ConfigError(
                f"limit is {config.limit} and memory {config.memory}, together more than the "
                f"{backbone.max_positions:,} positions of '{backbone.name}'; make limit smaller"
            )
        super().__init__(config, backbone)

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """The learned tokens; standard normal at the start, as official."""
        return nn.ModuleDict({"tokens": nn.Embedding(config.memory, shape.hidden_size)})

    @property
    def first(self) -> int:
        """Position of the decoder's first token."""
        config = self.config
        return int(config.memory + (config.limit if config.positions == "continue" else 0))

    # Memory

    def encode(self, contexts: Sequence[Tensor]) -> Tensor:
        """Keys and values of the memory tokens `[B, L, 2, G, M, H]`, adapters on.

        Args:
            contexts: tokens of each, at most `limit`.
        """
        backbone, config = self.backbone, self.config
        ids_BT = contexts[0].new_full((len(contexts), config.limit), backbone.eos_token_id)
        for row, context in zip(ids_BT, contexts, strict=True):
            row[: len(context)] = context
        embedded_BTD = backbone.embed(ids_BT)
        numbers_M = torch.arange(config.memory, device=ids_BT.device)
        tokens_MD = self.parts()["tokens"](numbers_M).to(embedded_BTD)
        tokens_BMD = tokens_MD.expand(len(contexts), -1, -1)
        rows_BPD = torch.cat([embedded_BTD, tokens_BMD], dim=1)
        positions_BP = torch.arange(rows_BPD.shape[1], device=ids_BT.device).expand(
            len(contexts), -1
        )
        cache = DynamicCache()
        backbone.run(rows_BPD, 0, backbone.depth, positions_BP, cache=cache)
        pairs = [torch.stack([layer.keys, layer.values], dim=1) for layer in cache.layers]
        return torch.stack([pair[..., -config.memory :, :] for pair in pairs], dim=1)

    def remember(self, ids: list[int]) -> Remembered:
        """Keys and values, in bfloat16."""
        ids_T = torch.tensor(ids[: self.config.limit], device=self.backbone.device)
        kept = self.encode([ids_T])[0].bfloat16()
        return Remembered(kept, 2 * kept.numel())

    def decode(
        self, kept_BLKGMH: Tensor, ids_BP: Tensor, valid_BP: Tensor
    ) -> tuple[Tensor, Stream]:
        """Run every layer on tokens that have memory as their past.

        Args:
            kept_BLKGMH: keys (first of axis K) and values.
            ids_BP: tokens, padded on the left.
            valid_BP: False where a token is padding.

        Returns:
            States before the closing norm `[B, P, D]`, and where decoding goes on.
        """
        backbone, memory, first = self.backbone, self.config.memory, self.first
        cache = DynamicCache()
        for layer, (keys_BGMH, values_BGMH) in enumerate(
            pair.unbind(1) for pair in kept_BLKGMH.unbind(1)
        ):
            cache.update(keys_BGMH, values_BGMH, layer)
        positions_BP = first + (valid_BP.long().cumsum(1) - 1).clamp_min(0)
        # Masks go by position: for them memory always stands just before the first token.
        columns_BM = torch.arange(first - memory, first, device=ids_BP.device)
        columns_BM = columns_BM.expand(len(ids_BP), -1)
        padded = not bool(valid_BP.all())
        axis = KeyAxis(columns_BM, torch.ones_like(columns_BM, dtype=torch.bool), padded, memory)
        axis = axis.extended(positions_BP, valid_BP)
        states_BPD = backbone.run(
            backbone.embed(ids_BP), 0, backbone.depth, positions_BP, valid_BP, axis, cache
        )
        return states_BPD, Stream(cache, axis, axis, first + valid_BP.sum(1))

    # Answering

    def answering(self) -> AbstractContextManager[None]:
        """The decoder is frozen: no adapters."""
        return self.backbone.without_lora()

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """The first tokens, up to the limit of a context."""
        if self.room(prompt, limit) < self.first:
            raise DataError(
                f"the question's {prompt - 1:,} tokens and an answer of up to {limit}, from "
                f"position {self.first} on, exceed the {self.backbone.max_positions:,} positions "
                f"of '{self.backbone.name}'; ask something shorter"
            )
        return min(tokens, int(self.config.limit))

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill start token and prompt after the memory."""
        kept = torch.stack(list(contents)).to(self.backbone.dtype)
        rows = [torch.tensor(prompt, device=kept.device) for prompt in prompts]
        ids_BP, valid_BP = padded_left(rows)
        states_BPD, stream = self.decode(kept, ids_BP, valid_BP)
        conditioning = [self.config.memory + len(prompt) for prompt in prompts]
        return begun(self.backbone, states_BPD[:, -1], stream, conditioning)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after memory and prompt."""
        kept = self.encode(contexts)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(kept, ids, valid)
            logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels)}

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """The context is reproduced, end token included; its continuation is not used.

        Raises:
            ConfigError: the context is longer than the limit.
        """
        if context.shape[1] > self.config.limit:
            raise ConfigError(
                f"text.context is {context.shape[1]} tokens and model.limit {self.config.limit}; "
                "what is beyond it could not be reproduced, make the context shorter"
            )
        kept = self.encode(list(context))
        start_B1 = context.new_full((len(context), 1), self.backbone.bos_token_id)
        end_B1 = context.new_full((len(context), 1), self.backbone.eos_token_id)
        ids_BP = torch.cat([start_B1, context], dim=1)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(kept, ids_BP, torch.ones_like(ids_BP, dtype=torch.bool))
            logits_BPV = self.backbone.logits(states_BPD)
        return {"loss": next_token_loss(logits_BPV, torch.cat([context, end_B1], dim=1))}

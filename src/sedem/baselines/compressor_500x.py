"""500xCompressor: a text into the keys and values of a few tokens (Li et al., 2025).

The source is the official code of both trainings and of prediction, at the settings of the paper's
appendix. The backbone with adapters reads the first `limit` tokens of a context and M learned
tokens after them. A shorter context is padded with end tokens that count like any other token. The
memory is the KV cache of the M tokens in every layer. The same backbone without adapters reads
prompt and answer after that cache. It is trained first to reproduce the text, then to answer.

The limit applies to a whole context, as in the paper: later tokens are dropped, and the answer says
so. Other deviations: docs/deviations.md.

Letters: B batch, T context tokens, M memory tokens, P prompt and answer tokens, A answer tokens,
L layers, G key-value heads, H head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.baselines.full_context import free_positions
from sedem.baselines.settings import LoraTargets, ReaderConfig
from sedem.baselines.soft_prompt import PrefillResult, pad_left, prefill_result
from sedem.baselines.trained import CompressedContext, TrainedReader
from sedem.errors import ConfigError, DataError
from sedem.method.injection import Stream
from sedem.validation import Share, WholeAbove0, WidthAbove0, WidthFrom0


class Compressor500xConfig(ReaderConfig):
    """Settings of 500xCompressor; the defaults are the paper's.

    Attributes:
        memory: M, learned tokens whose keys and values are the memory.
        limit: context tokens that are read; a shorter context is padded to this length.
        positions: position of the decoder's first token. Cached keys carry the positions where
            they were computed, limit to limit + M - 1. "restart" continues at M, so the memory has
            higher positions than the tokens that attend to it. The official code does this, since
            it counts only the cache, so the paper used it. "continue" continues at limit + M, in
            reading order.
    """

    lora_rank: WidthFrom0 = 64
    lora_alpha: WholeAbove0 = 32
    lora_targets: LoraTargets = ("q_proj", "v_proj")
    lora_dropout: Share = 0.05
    memory: WidthAbove0 = 4
    limit: WholeAbove0 = 500
    positions: Literal["restart", "continue"] = "restart"


class Compressor500x(TrainedReader):
    """Compresses a context into the KV cache of a few learned tokens."""

    name = "500x"
    Config = Compressor500xConfig

    def __init__(self, config: Compressor500xConfig, backbone: Backbone) -> None:
        if config.limit + config.memory > backbone.max_positions:
            raise ConfigError(
                f"limit is {config.limit} and memory {config.memory}, together more than the "
                f"{backbone.max_positions:,} positions of '{backbone.name}'; make limit smaller"
            )
        super().__init__(config, backbone)
        # Kept, because a bench takes the end token away from the backbone.
        self.padding = backbone.eos_token_id

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """The learned tokens; initialized standard normal, as officially."""
        return nn.ModuleDict({"tokens": nn.Embedding(config.memory, shape.hidden_size)})

    @property
    def first_position(self) -> int:
        """Position of the decoder's first token."""
        config = self.config
        return int(config.memory + (config.limit if config.positions == "continue" else 0))

    # Memory

    def encode(self, contexts: Sequence[Tensor]) -> Tensor:
        """Keys and values of the memory tokens `[B, L, 2, G, M, H]`, with adapters.

        Args:
            contexts: tokens of each context, at most `limit`.
        """
        backbone, config = self.backbone, self.config
        ids_BT = contexts[0].new_full((len(contexts), config.limit), self.padding)
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

    def compress(self, ids: list[int]) -> CompressedContext:
        """Keys and values of the memory tokens, in bfloat16."""
        ids_T = torch.tensor(ids[: self.config.limit], device=self.backbone.device)
        memory_LKGMH = self.encode([ids_T])[0].bfloat16()
        return CompressedContext(memory_LKGMH, 2 * memory_LKGMH.numel())

    def decode(
        self, memory_BLKGMH: Tensor, ids_BP: Tensor, valid_BP: Tensor
    ) -> tuple[Tensor, Stream]:
        """Run every layer on tokens that follow the memory.

        Args:
            memory_BLKGMH: keys and values; axis K has keys first.
            ids_BP: tokens, padded on the left.
            valid_BP: False where a token is padding.

        Returns:
            States before the final norm `[B, P, D]`, and the state to decode from.
        """
        backbone, memory, first = self.backbone, self.config.memory, self.first_position
        cache = DynamicCache()
        for layer, (keys_BGMH, values_BGMH) in enumerate(
            pair.unbind(1) for pair in memory_BLKGMH.unbind(1)
        ):
            cache.update(keys_BGMH, values_BGMH, layer)
        positions_BP = first + (valid_BP.long().cumsum(1) - 1).clamp_min(0)
        # Masks compare positions: in them the memory always ends right before the first token.
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

    def decoding_mode(self) -> AbstractContextManager[None]:
        """Decode without adapters: the decoder is the frozen backbone."""
        return self.backbone.without_lora()

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return the number of context tokens up to `limit`."""
        if free_positions(self.backbone, prompt, limit) < self.first_position:
            raise DataError(
                f"the question's {prompt - 1:,} tokens and an answer of up to {limit}, from "
                f"position {self.first_position} on, exceed the "
                f"{self.backbone.max_positions:,} positions of '{self.backbone.name}'; "
                "ask something shorter"
            )
        return min(tokens, int(self.config.limit))

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token and prompt after the memory."""
        memory_BLKGMH = torch.stack(list(contents)).to(self.backbone.dtype)
        rows = [torch.tensor(prompt, device=self.backbone.device) for prompt in prompts]
        ids_BP, valid_BP = pad_left(rows)
        states_BPD, stream = self.decode(memory_BLKGMH, ids_BP, valid_BP)
        conditioning = [self.config.memory + len(prompt) for prompt in prompts]
        return prefill_result(self.backbone, states_BPD[:, -1], stream, conditioning)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after memory and prompt."""
        memory_BLKGMH = self.encode(contexts)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(memory_BLKGMH, ids, valid)
            return self.answer_loss(states_BPD, labels)

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of reproducing the context and an end token; the continuation is not used.

        Raises:
            ConfigError: the context is longer than the limit.
        """
        if context.shape[1] > self.config.limit:
            raise ConfigError(
                f"text.context is {context.shape[1]} tokens and model.limit {self.config.limit}; "
                "tokens beyond the limit cannot be reproduced, make the context shorter"
            )
        memory_BLKGMH = self.encode(list(context))
        start_B1 = context.new_full((len(context), 1), self.backbone.bos_token_id)
        end_B1 = context.new_full((len(context), 1), self.backbone.eos_token_id)
        ids_BP = torch.cat([start_B1, context], dim=1)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(memory_BLKGMH, ids_BP, torch.ones_like(ids_BP).bool())
            return self.answer_loss(states_BPD, torch.cat([context, end_B1], dim=1))

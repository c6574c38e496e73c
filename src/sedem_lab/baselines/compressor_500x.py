"""500xCompressor: a text into the keys and values of a few tokens (Li et al., 2025).

The source is the official code of both trainings and of prediction, at the settings of the paper's
appendix. The backbone with adapters reads the first `limit` tokens of a context and M learned
tokens after them. A shorter context is padded with end tokens that count like any other token. The
memory is the KV cache of the M tokens in every layer. The same backbone without adapters reads
prompt and answer after that cache. It is trained first to reproduce the text, then to answer.

The limit applies to a whole context, as in the paper: later tokens are dropped, and the answer says
so. Optionally, every window of that many tokens is compressed on its own. Other deviations:
docs/deviations.md.

Letters: B batch, W windows, T context tokens, M memory tokens, U memory tokens of a context, P
prompt and answer tokens, A answer tokens, L layers, G key-value heads, H head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone, KeyAxis
from sedem.config import Share, WholeAbove0, WidthAbove0, WidthFrom0
from sedem.errors import ConfigError, DataError
from sedem.method.injection import GrowingCache, GrowingColumns
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import LoraTargets, ReaderConfig
from sedem_lab.baselines.soft_prompt import PrefillResult, pad_left, prefill_result
from sedem_lab.baselines.trained import CompressedContext, TrainedReader


class Compressor500xConfig(ReaderConfig):
    """Settings of 500xCompressor; the defaults are the paper's.

    Attributes:
        memory: M, learned tokens whose keys and values are the memory.
        limit: context tokens that are read; a shorter context is padded to this length.
        long_contexts: "cut" drops the tokens after the limit. "windows" compresses every window of
            `limit` tokens in the same way, and the decoder reads the memory of all of them.
    """

    lora_rank: WidthFrom0 = 64
    lora_alpha: WholeAbove0 = 32
    lora_targets: LoraTargets = ("q_proj", "v_proj")
    lora_dropout: Share = 0.05
    memory: WidthAbove0 = 4
    limit: WholeAbove0 = 500
    long_contexts: Literal["cut", "windows"] = "cut"

    free: ClassVar[frozenset[str]] = frozenset({"long_contexts"})


class Compressor500x(TrainedReader):
    """Compresses a context into the KV cache of a few learned tokens."""

    name = "500x"
    Config = Compressor500xConfig
    frozen_decoder = True

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

    # Memory

    def encode(self, contexts: Sequence[Tensor]) -> list[Tensor]:
        """Keys and values of each context's memory tokens `[L, 2, G, U, H]`, with adapters.

        Args:
            contexts: tokens of each context; `long_contexts` says whether they exceed the limit.
        """
        backbone, config = self.backbone, self.config
        windows = [context.split(config.limit) for context in contexts]
        rows = [window for own in windows for window in own]
        ids_WT = rows[0].new_full((len(rows), config.limit), self.padding)
        for row, window in zip(ids_WT, rows, strict=True):
            row[: len(window)] = window
        embedded_WTD = backbone.embed(ids_WT)
        numbers_M = torch.arange(config.memory, device=ids_WT.device)
        tokens_MD = self.parts()["tokens"](numbers_M).to(embedded_WTD)
        rows_WPD = torch.cat([embedded_WTD, tokens_MD.expand(len(rows), -1, -1)], dim=1)
        positions_WP = torch.arange(rows_WPD.shape[1], device=ids_WT.device).expand(len(rows), -1)
        cache = GrowingColumns()
        backbone.run(rows_WPD, 0, backbone.depth, positions_WP, cache=cache)
        pairs = [torch.stack(pair, dim=1) for pair in cache.stored.values()]
        memory_WLKGMH = torch.stack([pair[..., -config.memory :, :] for pair in pairs], dim=1)
        return [
            torch.cat(own.unbind(), dim=-2) for own in memory_WLKGMH.split([*map(len, windows)])
        ]

    def compress(self, ids: list[int]) -> CompressedContext:
        """Keys and values of the memory tokens, in bfloat16."""
        read = ids if self.config.long_contexts == "windows" else ids[: self.config.limit]
        (memory_LKGUH,) = self.encode([torch.tensor(read, device=self.backbone.device)])
        return CompressedContext(memory_LKGUH.bfloat16(), 2 * memory_LKGUH.numel())

    def decode(
        self, memories: Sequence[Tensor], ids_BP: Tensor, valid_BP: Tensor
    ) -> tuple[Tensor, GrowingCache]:
        """Run every layer on tokens that follow the memory.

        Cached keys carry the positions where they were computed, limit to limit + M - 1. The first
        token is at the number of cached tokens, as in the official code, so the memory may have
        higher positions than the tokens that attend to it.

        Args:
            memories: keys and values of each row `[L, 2, G, U, H]`, keys first; rows may differ
                in U.
            ids_BP: tokens, padded on the left.
            valid_BP: False where a token is padding.

        Returns:
            States before the final norm `[B, P, D]`, and the cache to decode from.
        """
        backbone, device = self.backbone, ids_BP.device
        counts = [memory.shape[-2] for memory in memories]
        longest = max(counts)
        # The memory of every row ends at the last column.
        memory_BLKGUH = torch.stack(
            [F.pad(m, (0, 0, longest - n, 0)) for m, n in zip(memories, counts, strict=True)]
        )
        cache = GrowingCache()
        for layer, pair_BKGUH in enumerate(memory_BLKGUH.unbind(1)):
            cache.upper.stored[layer] = pair_BKGUH[:, 0], pair_BKGUH[:, 1]
        first_B1 = torch.tensor([[count] for count in counts], device=device)
        positions_BP = first_B1 + (valid_BP.long().cumsum(1) - 1).clamp_min(0)
        # Masks compare positions: in them the memory always ends right before the first token.
        back_U = torch.arange(longest, 0, -1, device=device)
        held_BU = back_U <= torch.tensor(counts, device=device)[:, None]
        padded = min(counts) < longest or not bool(valid_BP.all())
        axis = KeyAxis(first_B1 - back_U, held_BU, padded, longest)
        axis = axis.extended(positions_BP, valid_BP)
        cache.begin_everywhere(axis, first_B1[:, 0] + valid_BP.sum(1))
        states_BPD = backbone.run(
            backbone.embed(ids_BP), 0, backbone.depth, positions_BP, valid_BP, axis, cache.upper
        )
        return states_BPD, cache

    # Answering

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return the number of context tokens up to `limit`, or those in the windows that fit."""
        config, free = self.config, free_positions(self.backbone, prompt, limit)
        if free < config.memory:
            raise DataError(
                f"the question's {prompt - 1:,} tokens and an answer of up to {limit}, from "
                f"position {config.memory} on, exceed the {self.backbone.max_positions:,} "
                f"positions of '{self.backbone.name}'; ask something shorter"
            )
        windows = free // config.memory if config.long_contexts == "windows" else 1
        return min(tokens, int(windows * config.limit))

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token and prompt after the memory."""
        counts = [self.config.memory * -(-count // self.config.limit) for count in used]
        memories = [
            memory_LKGUH[..., :count, :].to(self.backbone.dtype)
            for memory_LKGUH, count in zip(contents, counts, strict=True)
        ]
        rows = [torch.tensor(prompt, device=self.backbone.device) for prompt in prompts]
        ids_BP, valid_BP = pad_left(rows)
        states_BPD, cache = self.decode(memories, ids_BP, valid_BP)
        conditioning = [n + len(prompt) for n, prompt in zip(counts, prompts, strict=True)]
        return prefill_result(self.backbone, states_BPD[:, -1], cache, conditioning)

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer after memory and prompt."""
        memories = self.encode(contexts)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(memories, ids, valid)
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
        memories = self.encode(list(context))
        start_B1 = context.new_full((len(context), 1), self.backbone.bos_token_id)
        end_B1 = context.new_full((len(context), 1), self.backbone.eos_token_id)
        ids_BP = torch.cat([start_B1, context], dim=1)
        with self.backbone.without_lora():
            states_BPD, _ = self.decode(memories, ids_BP, torch.ones_like(ids_BP).bool())
            return self.answer_loss(states_BPD, torch.cat([context, end_B1], dim=1))

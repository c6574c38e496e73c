"""Full context, fine-tuned: the paper's "Backbone (Fine-Tuned)".

The backbone has the adapters of SeDeM's decoder (r 64, alpha 128 on q, k, v and o). It is trained
on questions that follow all documents as text, and it reads all documents for every question. A
context longer than its positions is truncated at its end, in training and in answering.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.config import WholeAbove0, WidthFrom0
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import ReaderConfig
from sedem_lab.baselines.soft_prompt import PrefillResult, prefill_soft_prompts, run_soft_prompts
from sedem_lab.baselines.trained import CompressedContext, TrainedReader


class FullContextTunedConfig(ReaderConfig):
    """Settings; the defaults are the adapters of SeDeM's decoder."""

    lora_rank: WidthFrom0 = 64
    lora_alpha: WholeAbove0 = 128


class FullContextTuned(TrainedReader):
    """The adapted backbone reads every document."""

    name = "full-context-tuned"
    Config = FullContextTunedConfig

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """Return no parts: only the adapters are trained."""
        return nn.ModuleDict()

    def compress(self, ids: list[int]) -> CompressedContext:
        """Keep the tokens: for raw text there is no memory to build in advance."""
        return CompressedContext(torch.tensor(ids, device=self.backbone.device))

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return as many tokens as prompt and answer leave positions for."""
        return min(tokens, free_positions(self.backbone, prompt, limit))

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill start token, context and prompt."""
        embedded = [
            self.backbone.embed(ids[:count]) for ids, count in zip(contents, used, strict=True)
        ]
        return prefill_soft_prompts(self.backbone, embedded, prompts)

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer."""
        embedded = [self.backbone.embed(context) for context in contexts]
        states_BPD = run_soft_prompts(self.backbone, embedded, ids, valid).prefix
        return self.answer_loss(states_BPD, labels)

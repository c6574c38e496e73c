"""Full context, fine-tuned: the paper's "Backbone (Fine-Tuned)".

The backbone with the adapters that SeDeM's decoder has (r 64, alpha 128 on q, k, v and o) is
trained on questions with every document as text before them, and reads them all for every question.
What does not fit its positions is left out at the end of the context, in training as in answering.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.baselines.memory import Begun, Remembered
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begin_soft, run_soft
from sedem.baselines.trained import TrainedReader
from sedem.method.losses import next_token_loss


@dataclass(frozen=True)
class FullContextTunedConfig(ReaderConfig):
    """The adapters of SeDeM's decoder."""

    lora_rank: int = 64
    lora_alpha: int = 128


class FullContextTuned(TrainedReader):
    """The adapted backbone reads every document."""

    name = "full-context-tuned"
    Config = FullContextTunedConfig

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """Nothing but adapters is trained."""
        return nn.ModuleDict()

    def remember(self, ids: list[int]) -> Remembered:
        """The tokens: raw text has no memory that could be built ahead."""
        return Remembered(torch.tensor(ids, device=self.backbone.device))

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """As many tokens as there are positions left."""
        return min(tokens, self.room(prompt, limit))

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill start token, context and prompt."""
        embedded = [
            self.backbone.embed(ids[:count]) for ids, count in zip(contents, seen, strict=True)
        ]
        return begin_soft(self.backbone, embedded, prompts)

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer."""
        embedded = [self.backbone.embed(context) for context in contexts]
        states_BPD = run_soft(self.backbone, embedded, ids, valid).prefix
        logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels)}

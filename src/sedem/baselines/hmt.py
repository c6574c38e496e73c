"""HMT, the hierarchical memory transformer: segment after segment, with recall (He et al., 2025).

Followed: the official code for causal language models. A sequence is read in segments; each is
[memory; last tokens of the segment before (sensory memory); its own tokens; memory again], and the
last hidden states, after the closing norm, at the last M positions are its new memory. What memory
a segment is given:

- the first one: a learned one;
- without recall: that of the segment before;
- with recall: the first half of the segment is read between a learned summary vector at either end;
  what comes out asks all kept memory vectors by one head of attention without values, and their
  weighted sum is the memory.

Trained on text in two stages, without recall and then with it (`recall_from`), then on questions.
Adapters stand on q and v and are never off: what reads is what answers. The last segment holds what
is left of the context, the prompt and the answer; no other segment's memory knows the question.

Where it differs: docs/deviations.md.

Letters: B batch, T tokens of a row, A continuation or answer tokens, M memory vectors of a segment,
U kept memory vectors, P positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.baselines.memory import Begun, Remembered
from sedem.baselines.settings import ReaderConfig
from sedem.baselines.soft_prompt import begun, run_rows
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError, DataError
from sedem.method.losses import IGNORED, next_token_loss

ID_BYTES = 4
"""Of a token that is kept as it is."""


@dataclass(frozen=True)
class HMTConfig(ReaderConfig):
    """Settings of HMT; the defaults are the official ones, but for M, which is the paper's.

    Attributes:
        memory: M, memory vectors of a segment.
        sensory: last tokens of a segment that stand in front of the next one too.
        segment_length: positions of a segment, memory at both ends and sensory tokens included.
        recall_width: width of the attention that recalls.
        recall_context: newest memory vectors that can be recalled; officially those of 100
            segments.
        recall_from: share of the training on text after which memory is recalled.
    """

    lora_rank: int = 8
    lora_alpha: int = 32
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    lora_dropout: float = 0.1
    memory: int = 10
    sensory: int = 32
    segment_length: int = 1024
    recall_width: int = 4096
    recall_context: int = 1000
    recall_from: float = 0.5

    least: ClassVar[Mapping[str, int]] = {
        "memory": 1,
        "sensory": 0,
        "segment_length": 1,
        "recall_width": 1,
        "recall_context": 1,
    }
    shares: ClassVar[tuple[str, ...]] = ("recall_from",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise ConfigError(
                f"segment_length is {self.segment_length}, but memory at both ends and "
                f"{self.sensory} sensory tokens take {self.segment_length - self.tokens} of it; "
                "make it longer"
            )
        if self.recall_context < self.memory:
            raise ConfigError(
                f"recall_context is {self.recall_context}, but a segment has {self.memory} memory "
                "vectors; it must hold those of one at least"
            )

    @property
    def tokens(self) -> int:
        """Tokens of its own that a segment has."""
        return self.segment_length - 2 * self.memory - self.sensory


@dataclass(frozen=True)
class Trail:
    """How far a sequence has been read.

    Attributes:
        memories: kept memory vectors, the newest last `[U, D]`.
        sensory: last tokens of the segment before.
        rest: tokens that were not read yet, less than a segment in the end.
    """

    memories: Tensor
    sensory: Tensor
    rest: Tensor


class HMT(TrainedReader):
    """The hierarchical memory transformer."""

    name = "hmt"
    Config = HMTConfig

    def __init__(self, config: HMTConfig, backbone: Backbone) -> None:
        if config.segment_length > backbone.max_positions:
            raise ConfigError(
                f"segment_length is {config.segment_length}, more than the "
                f"{backbone.max_positions:,} positions of '{backbone.name}'; make it shorter"
            )
        super().__init__(config, backbone)
        spread = backbone.model.get_input_embeddings().weight.detach().float().std()
        with torch.no_grad():
            for name in ("memory", "summary"):
                self._learned(name).mul_(spread)

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """First memory, summary vectors (both later scaled like token embeddings) and recall."""
        width, inner = shape.hidden_size, config.recall_width
        return nn.ModuleDict(
            {
                "memory": nn.Embedding(config.memory, width),
                "summary": nn.Embedding(config.memory, width),
                "recall_query": nn.Linear(width, inner, bias=False),
                "recall_key": nn.Linear(width, inner, bias=False),
            }
        )

    @classmethod
    def overhead(cls, config: Any, shape: PretrainedConfig) -> int:
        """The memory vectors alone, which at M = 10 are the paper's 0.020M and 0.031M.

        It leaves out summary vectors and the projections of recall, by far the larger part.
        """
        return int(config.memory * shape.hidden_size)

    # Reading

    def remember(self, ids: list[int]) -> Remembered:
        """Memory of every whole segment, and the tokens after the last one."""
        config, start = self.config, self.backbone.bos_token_id
        (trail,) = self._walk([torch.tensor([start, *ids], device=self.backbone.device)])
        segments = (1 + len(ids)) // config.tokens
        notes: tuple[str, ...] = ()
        if segments * config.memory > config.recall_context:
            notes = (
                f"the context has {len(ids):,} tokens, of its {segments * config.memory:,} memory "
                f"vectors {self.name} recalls the newest {config.recall_context:,} only",
            )
        kept = replace(trail, memories=trail.memories.bfloat16())
        tokens = len(kept.sensory) + len(kept.rest)
        return Remembered(kept, 2 * kept.memories.numel() + ID_BYTES * tokens, notes)

    def _walk(self, sequences: Sequence[Tensor]) -> list[Trail]:
        """Read the whole segments of each sequence; the n-th of all rows go together."""
        size = self.config.tokens
        trails = [self._unread(ids) for ids in sequences]
        while pending := [i for i, trail in enumerate(trails) if len(trail.rest) >= size]:
            before = [trails[i] for i in pending]
            _, after = self._read(before, [trail.rest[:size] for trail in before])
            for i, trail in zip(pending, after, strict=True):
                trails[i] = replace(trail, rest=trails[i].rest[size:])
        return trails

    def _unread(self, ids: Tensor) -> Trail:
        nothing_UD = torch.zeros(0, self.backbone.width, device=ids.device)
        return Trail(nothing_UD.to(self.backbone.dtype), ids[:0], ids)

    def _read(
        self, trails: Sequence[Trail], segments: Sequence[Tensor], recall: bool = True
    ) -> tuple[list[Tensor], list[Trail]]:
        """Read one more segment of each row.

        Returns:
            States of the segments' own tokens, before the closing norm, and the trails after them.
        """
        config = self.config
        fronts, ends = self._framed(trails, segments, recall)
        rows = [torch.cat(pair) for pair in zip(fronts, ends, strict=True)]
        states_BPD, _ = run_rows(self.backbone, rows)
        own_BPD, written_BMD = states_BPD.tensor_split([-config.memory], dim=1)
        written_BMD = self.backbone.model.get_decoder().norm(written_BMD)
        after = []
        for trail, segment, written_MD in zip(trails, segments, written_BMD, strict=True):
            memories_UD = torch.cat([trail.memories, written_MD.to(trail.memories)])
            sensory = segment[max(0, len(segment) - config.sensory) :]
            after.append(
                replace(trail, memories=memories_UD[-config.recall_context :], sensory=sensory)
            )
        return [own[-len(s) :] for own, s in zip(own_BPD, segments, strict=True)], after

    def _framed(
        self, trails: Sequence[Trail], segments: Sequence[Tensor], recall: bool = True
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Embeddings of [memory; sensory tokens; segment], and the memory alone, row by row."""
        given = self._given(trails, segments) if recall else self._handed_on(trails)
        fronts, memories = [], []
        for trail, segment, memory_MD in zip(trails, segments, given, strict=True):
            embedded_TD = self.backbone.embed(torch.cat([trail.sensory, segment]))
            memories.append(memory_MD.to(embedded_TD))
            fronts.append(torch.cat([memories[-1], embedded_TD]))
        return fronts, memories

    # What memory a segment is given

    def _learned(self, name: str) -> Tensor:
        table = self.parts()[name]
        assert isinstance(table, nn.Embedding)
        return table.weight

    def _handed_on(self, trails: Sequence[Trail]) -> list[Tensor]:
        """Without recall: the newest memory."""
        first_MD, count = self._learned("memory"), self.config.memory
        return [t.memories[-count:] if len(t.memories) else first_MD for t in trails]

    def _given(self, trails: Sequence[Trail], segments: Sequence[Tensor]) -> list[Tensor]:
        """With recall: what the first half of a segment asks for."""
        given = [self._learned("memory") for _ in trails]
        asking = [i for i, trail in enumerate(trails) if len(trail.memories)]
        if not asking:
            return given
        half = max(1, self.config.tokens // 2)
        rows = []
        for i in asking:
            embedded_TD = self.backbone.embed(segments[i][:half])
            summary_MD = self._learned("summary").to(embedded_TD)
            rows.append(torch.cat([summary_MD, embedded_TD, summary_MD]))
        states_BPD, _ = run_rows(self.backbone, rows)
        asked_BMD = self.backbone.model.get_decoder().norm(states_BPD[:, -self.config.memory :])
        for i, asked_MD in zip(asking, asked_BMD, strict=True):
            given[i] = self.recall(asked_MD, trails[i].memories)
        return given

    def recall(self, asked_MD: Tensor, memories_UD: Tensor) -> Tensor:
        """Weighted sums of kept memory vectors `[M, D]` (equation of memory recall).

        Args:
            asked_MD: what the segment's first half gave.
            memories_UD: kept memory vectors.
        """
        query_MH = self.parts()["recall_query"](asked_MD.float())
        keys_UH = self.parts()["recall_key"](memories_UD.float())
        scores_MU = (query_MH @ keys_UH.T).float() / self.config.recall_width**0.5
        return scores_MU.softmax(-1).to(memories_UD) @ memories_UD

    # Answering

    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """All of them, however many; the last segment and the answer must have positions."""
        config, most = self.config, self.backbone.max_positions
        self.room(prompt, limit)
        needed = config.memory + config.sensory + max(config.tokens, prompt - 1) + limit
        if needed > most:
            raise DataError(
                f"a last segment of {needed - limit:,} positions and an answer of up to {limit} "
                f"tokens exceed the {most:,} positions of '{self.backbone.name}'; ask something "
                "shorter, or make segment_length shorter"
            )
        return tokens

    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill the last segments; the start token already stands in front of the contexts."""
        backbone = self.backbone
        trails = [replace(kept, memories=kept.memories.to(backbone.dtype)) for kept in contents]
        asked = [torch.tensor(prompt[1:], device=backbone.device) for prompt in prompts]
        rows = self._last(trails, asked)
        states_BPD, stream = run_rows(backbone, rows, DynamicCache())
        return begun(backbone, states_BPD[:, -1], stream, [len(row) for row in rows])

    def _last(self, trails: Sequence[Trail], prompts: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings of last segments up to the answer.

        A prompt is never cut in two: where it does not fit beside the rest of the context, that
        rest becomes a segment of its own.
        """
        trails = list(trails)
        full = [
            i
            for i, (trail, prompt) in enumerate(zip(trails, prompts, strict=True))
            if len(trail.rest) and len(trail.rest) + len(prompt) > self.config.tokens
        ]
        if full:
            _, after = self._read([trails[i] for i in full], [trails[i].rest for i in full])
            for i, trail in zip(full, after, strict=True):
                trails[i] = replace(trail, rest=trail.rest[:0])
        segments = [torch.cat([t.rest, p]) for t, p in zip(trails, prompts, strict=True)]
        return self._framed(trails, segments)[0]

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer in the last segment, gradients through all segments."""
        start = ids.new_tensor([self.backbone.bos_token_id])
        trails = self._walk([torch.cat([start, context]) for context in contexts])
        prompts, answers = [], []
        for row, mask, target in zip(ids, valid, labels, strict=True):
            # The last answer token is predicted and not read.
            kept, read = row[mask][1:], int((target != IGNORED).sum()) - 1
            prompts.append(kept[: len(kept) - read])
            answers.append(self.backbone.embed(kept[len(kept) - read :]))
        pairs = zip(self._last(trails, prompts), answers, strict=True)
        states_BPD, _ = run_rows(self.backbone, [torch.cat(pair) for pair in pairs])
        logits_BAV = self.backbone.logits(states_BPD[:, -labels.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels)}

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of the continuation, the whole window being read in segments.

        Memory is handed on until `recall_from` of the training is done, and recalled from then on.

        Raises:
            ConfigError: the window is no longer than one segment.
        """
        window_BT, size = torch.cat([context, continuation], dim=1), self.config.tokens
        if window_BT.shape[1] <= size:
            raise ConfigError(
                f"text.context and text.continuation are {window_BT.shape[1]} tokens, a segment "
                f"has {size}; nothing would be remembered, make the window longer"
            )
        recall = self.progress >= self.config.recall_from
        trails, states = [self._unread(row[:0]) for row in window_BT], []
        for segment_BT in window_BT.split(size, dim=1):
            own, trails = self._read(trails, list(segment_BT), recall)
            states.append(torch.stack(own))
        states_BAD = torch.cat(states, dim=1)[:, context.shape[1] - 1 : -1]
        return {"loss": next_token_loss(self.backbone.logits(states_BAD), continuation)}

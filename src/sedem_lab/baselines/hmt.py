"""HMT, the hierarchical memory transformer: reads segments in turn and recalls (He et al., 2025).

The source is the official code for causal language models. A sequence is read in segments, each as
[memory; sensory memory (last tokens of the previous segment); its tokens; memory]. The last hidden
states at the last M positions, after the final norm, are the segment's new memory. The memory that
a segment starts with is

- for the first segment: a learned one;
- without recall: that of the previous segment;
- with recall: the first half of the segment is read between learned summary vectors at both ends.
  The states at the last ones query all stored memory vectors, by one attention head without values.
  Their weighted sum is the memory.

Training on text has two stages, first without recall and then with it (`recall_from`). Training on
questions follows. The adapters on q and v are always on, for reading and answering. The last
segment contains the rest of the context, the prompt and the answer; no other segment's memory
depends on the question.

Deviations: docs/deviations.md.

Letters: B batch, T tokens of a row, A continuation or answer tokens, M memory vectors of a segment,
U stored memory vectors, P positions, D width, H recall width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.config import Share, WholeAbove0, WholeFrom0, WidthAbove0, WidthFrom0
from sedem.errors import ConfigError, DataError
from sedem.method.injection import GrowingCache
from sedem.method.losses import IGNORED, next_token_loss
from sedem_lab.baselines.full_context import free_positions
from sedem_lab.baselines.settings import LoraTargets, ReaderConfig
from sedem_lab.baselines.soft_prompt import PrefillResult, prefill_result, run_embeddings
from sedem_lab.baselines.trained import CompressedContext, TrainedReader

ID_BYTES = 4
"""Bytes of a stored token id."""


class HMTConfig(ReaderConfig):
    """Settings of HMT; the defaults are the official ones.

    M and the length of a segment are those that the paper's tables imply.

    Attributes:
        memory: M, memory vectors of a segment.
        sensory: last tokens of a segment that the next segment reads again.
        segment_length: positions of a segment, including memory at both ends and sensory tokens.
        recall_width: width of the attention for recall.
        recall_context: number of newest memory vectors that can be recalled; officially those of
            100 segments.
        recall_from: share of the training on text after which recall starts.
    """

    lora_rank: WidthFrom0 = 8
    lora_alpha: WholeAbove0 = 32
    lora_targets: LoraTargets = ("q_proj", "v_proj")
    lora_dropout: Share = 0.1
    memory: WidthAbove0 = 10
    sensory: WholeFrom0 = 32
    segment_length: WholeAbove0 = 564
    recall_width: WidthAbove0 = 4096
    recall_context: WholeAbove0 = 1000
    recall_from: Share = 0.5

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.tokens < 1:
            raise ValueError(
                f"segment_length is {self.segment_length}, but memory at both ends and "
                f"{self.sensory} sensory tokens take {self.segment_length - self.tokens} of it; "
                "make it longer"
            )
        if self.recall_context < self.memory:
            raise ValueError(
                f"recall_context is {self.recall_context}, but a segment has {self.memory} memory "
                "vectors; it must be at least as many"
            )
        return self

    @property
    def tokens(self) -> int:
        """New tokens of a segment: all positions except memory and sensory tokens."""
        return self.segment_length - 2 * self.memory - self.sensory


@dataclass(frozen=True)
class ReadingState:
    """State of a sequence that has been read in part.

    Attributes:
        memories: stored memory vectors, the newest last `[U, D]`.
        sensory: last tokens of the previous segment.
        rest: tokens that are not read yet; at the end fewer than a segment.
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
        deviation = backbone.model.get_input_embeddings().weight.detach().float().std()
        with torch.no_grad():
            for name in ("memory", "summary"):
                self._learned(name).mul_(deviation)

    @staticmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """First memory and summary vectors (both scaled later, as token embeddings), and recall."""
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
        """The memory vectors only: at M = 10 the paper's 0.020M and 0.031M.

        That leaves out the summary vectors and the far larger projections of recall.
        """
        return int(config.memory * shape.hidden_size)

    # Reading

    def compress(self, ids: list[int]) -> CompressedContext:
        """Memory of every whole segment, and the tokens after the last one."""
        config, start = self.config, self.backbone.bos_token_id
        (reading,) = self._read_whole([torch.tensor([start, *ids], device=self.backbone.device)])
        segments = (1 + len(ids)) // config.tokens
        notes: tuple[str, ...] = ()
        if segments * config.memory > config.recall_context:
            notes = (
                f"the context has {len(ids):,} tokens, {self.name} recalls only the newest "
                f"{config.recall_context:,} of its {segments * config.memory:,} memory vectors",
            )
        stored = replace(reading, memories=reading.memories.bfloat16())
        tokens = len(stored.sensory) + len(stored.rest)
        return CompressedContext(stored, 2 * stored.memories.numel() + ID_BYTES * tokens, notes)

    def _read_whole(self, sequences: Sequence[Tensor]) -> list[ReadingState]:
        """Read the whole segments of each sequence; the n-th segments of all rows are one batch."""
        size = self.config.tokens
        readings = [self._unread(ids) for ids in sequences]
        while pending := [i for i, reading in enumerate(readings) if len(reading.rest) >= size]:
            before = [readings[i] for i in pending]
            _, after = self._read(before, [reading.rest[:size] for reading in before])
            for i, reading in zip(pending, after, strict=True):
                readings[i] = replace(reading, rest=readings[i].rest[size:])
        return readings

    def _unread(self, ids: Tensor) -> ReadingState:
        no_memory_UD = torch.zeros(0, self.backbone.width, device=ids.device)
        return ReadingState(no_memory_UD.to(self.backbone.dtype), ids[:0], ids)

    def _read(
        self, readings: Sequence[ReadingState], segments: Sequence[Tensor], recall: bool = True
    ) -> tuple[list[Tensor], list[ReadingState]]:
        """Read one more segment of each row.

        Returns:
            Hidden states of each segment's new tokens, before the final norm, and the reading
            states after the segments.
        """
        config = self.config
        fronts, ends = self._embed(readings, segments, recall)
        rows = [torch.cat(pair) for pair in zip(fronts, ends, strict=True)]
        states_BPD = run_embeddings(self.backbone, rows)
        new_BPD, memory_BMD = states_BPD.tensor_split([-config.memory], dim=1)
        memory_BMD = self.backbone.model.get_decoder().norm(memory_BMD)
        after = []
        for reading, segment, memory_MD in zip(readings, segments, memory_BMD, strict=True):
            memories_UD = torch.cat([reading.memories, memory_MD.to(reading.memories)])
            sensory = segment[max(0, len(segment) - config.sensory) :]
            after.append(
                replace(reading, memories=memories_UD[-config.recall_context :], sensory=sensory)
            )
        return [new[-len(s) :] for new, s in zip(new_BPD, segments, strict=True)], after

    def _embed(
        self, readings: Sequence[ReadingState], segments: Sequence[Tensor], recall: bool = True
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Embeddings of [memory; sensory tokens; segment], and of the memory alone, row by row."""
        first_MD, count = self._learned("memory"), self.config.memory
        if recall:
            initial = self._recalled(readings, segments)
        else:  # the memory of the previous segment
            initial = [r.memories[-count:] if len(r.memories) else first_MD for r in readings]
        fronts, memories = [], []
        for reading, segment, memory_MD in zip(readings, segments, initial, strict=True):
            embedded_TD = self.backbone.embed(torch.cat([reading.sensory, segment]))
            memories.append(memory_MD.to(embedded_TD))
            fronts.append(torch.cat([memories[-1], embedded_TD]))
        return fronts, memories

    # The memory that a segment starts with

    def _learned(self, name: str) -> Tensor:
        table = self.parts()[name]
        assert isinstance(table, nn.Embedding)
        return table.weight

    def _recalled(
        self, readings: Sequence[ReadingState], segments: Sequence[Tensor]
    ) -> list[Tensor]:
        """With recall: what the first half of a segment recalls."""
        memory = [self._learned("memory") for _ in readings]
        recalling = [i for i, reading in enumerate(readings) if len(reading.memories)]
        if not recalling:
            return memory
        half = max(1, self.config.tokens // 2)
        rows = []
        for i in recalling:
            embedded_TD = self.backbone.embed(segments[i][:half])
            summary_MD = self._learned("summary").to(embedded_TD)
            rows.append(torch.cat([summary_MD, embedded_TD, summary_MD]))
        states_BPD = run_embeddings(self.backbone, rows)
        queries_BMD = self.backbone.model.get_decoder().norm(states_BPD[:, -self.config.memory :])
        for i, queries_MD in zip(recalling, queries_BMD, strict=True):
            memory[i] = self.recall(queries_MD, readings[i].memories)
        return memory

    def recall(self, queries_MD: Tensor, memories_UD: Tensor) -> Tensor:
        """Weighted sums of stored memory vectors `[M, D]` (equation of memory recall).

        Args:
            queries_MD: summary states of the segment's first half.
        """
        query_MH = self.parts()["recall_query"](queries_MD.float())
        keys_UH = self.parts()["recall_key"](memories_UD.float())
        scores_MU = (query_MH @ keys_UH.T).float() / self.config.recall_width**0.5
        return scores_MU.softmax(-1).to(memories_UD) @ memories_UD

    # Answering

    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return all tokens, with no limit on their number.

        Raises:
            DataError: the last segment and the answer exceed the backbone's positions.
        """
        config, most = self.config, self.backbone.max_positions
        free_positions(self.backbone, prompt, limit)
        needed = config.memory + config.sensory + max(config.tokens, prompt - 1) + limit
        if needed > most:
            raise DataError(
                f"a last segment of {needed - limit:,} positions and an answer of up to {limit} "
                f"tokens exceed the {most:,} positions of '{self.backbone.name}'; ask something "
                "shorter, or make segment_length shorter"
            )
        return tokens

    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill the last segments; the contexts already begin with the start token."""
        backbone = self.backbone
        readings = [replace(r, memories=r.memories.to(backbone.dtype)) for r in contents]
        prompt_ids = [torch.tensor(prompt[1:], device=backbone.device) for prompt in prompts]
        rows = self._last(readings, prompt_ids)
        cache = GrowingCache()
        states_BPD = run_embeddings(backbone, rows, cache)
        return prefill_result(backbone, states_BPD[:, -1], cache, [len(row) for row in rows])

    def _last(self, readings: Sequence[ReadingState], prompts: Sequence[Tensor]) -> list[Tensor]:
        """Embeddings of the last segments up to the answer.

        A prompt is never split: if it does not fit after the rest of the context, that rest becomes
        a separate segment.
        """
        readings = list(readings)
        full = [
            i
            for i, (reading, prompt) in enumerate(zip(readings, prompts, strict=True))
            if len(reading.rest) and len(reading.rest) + len(prompt) > self.config.tokens
        ]
        if full:
            _, after = self._read([readings[i] for i in full], [readings[i].rest for i in full])
            for i, reading in zip(full, after, strict=True):
                readings[i] = replace(reading, rest=reading.rest[:0])
        segments = [torch.cat([r.rest, p]) for r, p in zip(readings, prompts, strict=True)]
        return self._embed(readings, segments)[0]

    # Training

    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Cross-entropy of the answer in the last segment, with gradients through all segments."""
        start = ids.new_tensor([self.backbone.bos_token_id])
        readings = self._read_whole([torch.cat([start, context]) for context in contexts])
        prompts, answers = [], []
        for row, mask, target in zip(ids, valid, labels, strict=True):
            # The last answer token is predicted but not read.
            tokens, read = row[mask][1:], int((target != IGNORED).sum()) - 1
            prompts.append(tokens[: len(tokens) - read])
            answers.append(self.backbone.embed(tokens[len(tokens) - read :]))
        pairs = zip(self._last(readings, prompts), answers, strict=True)
        states_BPD = run_embeddings(self.backbone, [torch.cat(pair) for pair in pairs])
        return self.answer_loss(states_BPD, labels)

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of the continuation; context and continuation are read in segments.

        A segment starts with the previous memory until `recall_from` of the training is done, and
        with recalled memory from then on.

        Raises:
            ConfigError: context and continuation are at most one segment.
        """
        window_BT, size = torch.cat([context, continuation], dim=1), self.config.tokens
        if window_BT.shape[1] <= size:
            raise ConfigError(
                f"text.context and text.continuation are {window_BT.shape[1]} tokens, a segment "
                f"has {size}; no memory would be used, make the text longer"
            )
        recall = self.progress >= self.config.recall_from
        readings, states = [self._unread(row[:0]) for row in window_BT], []
        for segment_BT in window_BT.split(size, dim=1):
            new, readings = self._read(readings, list(segment_BT), recall)
            states.append(torch.stack(new))
        states_BAD = torch.cat(states, dim=1)[:, context.shape[1] - 1 : -1]
        return {"loss": next_token_loss(self.backbone.logits(states_BAD), continuation)}

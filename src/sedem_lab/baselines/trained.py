"""Base class of the trained baselines: a frozen backbone with adapters and trained parts.

A method is one subclass in one file. It implements `build_parts`, `compress`,
`context_tokens_used`, `prefill` and its training losses. Reading, answering, timings, citations and
checkpoints are shared and live here.

Letters: B batch, T context tokens, A continuation or answer tokens, P prompt and answer tokens,
D width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import FAMILIES, Backbone
from sedem.backbone.prompts import context_prompt, question_ids
from sedem.checkpoint import folder as checkpoint
from sedem.checkpoint.folder import portable_name
from sedem.engine.device import Clock, chosen_device
from sedem.errors import CheckpointError, ConfigError
from sedem.method.losses import next_token_loss
from sedem.types import Answer, Document, check_documents, check_tokens
from sedem_lab.baselines.full_context import cite, generate_timed, text_bytes
from sedem_lab.baselines.settings import ReaderConfig, method_of
from sedem_lab.baselines.soft_prompt import PrefillResult

GREEDY = Decoding()


@dataclass(frozen=True)
class CompressedContext:
    """What a method stores for a context."""

    content: Any
    """What the method answers from; its type is the method's own."""
    stored_bytes: int | None = None
    """Size of the content; None means that the content is the text itself in UTF-8."""
    notes: tuple[str, ...] = ()
    """One sentence for each part of the context that was dropped or left uncompressed."""


@dataclass(frozen=True)
class ContextMemory:
    """Documents and the compressed context of their joined text."""

    documents: list[Document]
    token_ends: list[int]
    """For each token, the index of the character after it in the joined text."""
    compressed: CompressedContext

    @property
    def stored_bytes(self) -> int:
        """Bytes stored to answer from."""
        if self.compressed.stored_bytes is not None:
            return self.compressed.stored_bytes
        return text_bytes(self.documents)


class TrainedReader(nn.Module, ABC):
    """A trained baseline on one frozen backbone.

    The trained parts are in float32, whatever the data type of the backbone.

    Args:
        backbone: a backbone without adapters; the constructor attaches those of the settings.

    Raises:
        ConfigError: the baselines have not been tested on the layout of this backbone.
    """

    name: str
    Config: ClassVar[type[ReaderConfig]]
    has_selection_budget: ClassVar[bool] = False
    """Whether the method is trained to select K paragraphs, with the setting `k`."""
    frozen_decoder: ClassVar[bool] = False
    """Whether the decoder is the frozen backbone, so that the adapters only compress."""

    def __init__(self, config: ReaderConfig, backbone: Backbone) -> None:
        super().__init__()
        if (layout := backbone.model.config.model_type) not in FAMILIES:
            raise ConfigError(
                f"{self.name} runs on backbones of the layouts {', '.join(FAMILIES)}, "
                f"'{backbone.name}' has '{layout}'; choose another backbone"
            )
        self.config: Any = config
        self.backbone = backbone
        self.decoding = GREEDY
        self.progress = 0.0
        self._parts = self.build_parts(config, backbone.model.config).to(backbone.device)
        if config.lora_rank:
            backbone.add_lora(
                config.lora_rank, config.lora_alpha, config.lora_targets, config.lora_dropout
            )

    # What a method implements

    @staticmethod
    @abstractmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """Build the trained modules other than the adapters; `shape` configures the backbone."""

    @abstractmethod
    def compress(self, ids: list[int]) -> CompressedContext:
        """Compress the tokens of all documents, without a start token or a question."""

    @abstractmethod
    def context_tokens_used(self, tokens: int, prompt: int, limit: int) -> int:
        """Return how many leading tokens of a context condition an answer of up to `limit` tokens.

        Args:
            prompt: number of tokens of start token, prompt and question.

        Raises:
            DataError: prompt and answer alone do not fit.
        """

    @abstractmethod
    def prefill(
        self, contents: Sequence[Any], used: Sequence[int], prompts: Sequence[list[int]]
    ) -> PrefillResult:
        """Prefill compressed contexts (their `content`) and prompts.

        Args:
            used: number of leading tokens of each context that condition its answer.
            prompts: start token, prompt and question of each row.
        """

    @abstractmethod
    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Losses on questions: `loss` and its components.

        Args:
            contexts: tokens of each context, cut to what `context_tokens_used` returns.
            ids: start token, prompt and answer, padded on the left `[B, P]`.
            valid: False where `ids` is padding `[B, P]`.
            labels: tokens to predict at the last positions `[B, A]`.
        """

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Losses on context tokens `[B, T]` and continuations `[B, A]`: `loss` and its components.

        Raises:
            ConfigError: the method is not trained on text.
        """
        raise ConfigError(f"'{self.name}' is not trained on text; give its recipe questions (data)")

    def decoding_mode(self) -> AbstractContextManager[None]:
        """A context manager for decoding, without adapters if the decoder is frozen."""
        return self.backbone.without_lora() if self.frozen_decoder else nullcontext()

    @classmethod
    def overhead(cls, config: Any, shape: PretrainedConfig) -> int:
        """Parameter overhead as the paper's table counts it: by default all trained parts."""
        with torch.device("meta"):
            return sum(p.numel() for p in cls.build_parts(config, shape).parameters())

    # Trained parameters

    def parts(self) -> nn.ModuleDict:
        """The trained modules other than the adapters; sedem.safetensors stores them."""
        return self._parts

    def answer_loss(self, states_BPD: Tensor, labels_BA: Tensor) -> dict[str, Tensor]:
        """Cross-entropy of an answer at the last A positions of states before the final norm."""
        logits_BAV = self.backbone.logits(states_BPD[:, -labels_BA.shape[1] :])
        return {"loss": next_token_loss(logits_BAV, labels_BA)}

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate; a method may lack either group."""
        return {"parts": list(self._parts.parameters()), "lora": self.backbone.lora_parameters()}

    def train(self, mode: bool = True) -> Self:
        """Set training mode for parts and adapters; the frozen weights never use dropout."""
        super().train(mode)
        self.backbone.eval()
        for name, module in self.backbone.named_modules():
            if name.endswith("lora_dropout"):
                module.train(mode)
        return self

    # Reading and answering

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> ContextMemory:
        """Read documents once; this needs no question.

        Raises:
            DataError: there are no documents, two share a name, or they have no tokens.
        """
        check_documents(documents)
        text = context_prompt([document.text for document in documents])
        encoded = self.backbone.tokenize([text], offsets=True)
        check_tokens(encoded["input_ids"][0])
        ends = [end for _, end in encoded["offset_mapping"][0]]
        return ContextMemory(list(documents), ends, self.compress(list(encoded["input_ids"][0])))

    def answer(self, memory: ContextMemory, question: str) -> Answer:
        """Answer one question; see `answer_all`."""
        return self.answer_all([memory], [question])[0]

    def answer_together(self, memory: ContextMemory, questions: Sequence[str]) -> list[Answer]:
        """Answer several questions over one memory; see `answer_all`."""
        return self.answer_all([memory] * len(questions), questions)

    @torch.no_grad()
    def answer_all(
        self, memories: Sequence[ContextMemory], questions: Sequence[str]
    ) -> list[Answer]:
        """Answer one question about each memory, in one batch, with the reader's `decoding`.

        Raises:
            DataError: a question is empty, or it alone exceeds the backbone's positions.
        """
        clock, decoding = Clock(self.backbone.device), self.decoding
        prompts = [question_ids(self.backbone, question) for question in questions]
        used = [
            self.context_tokens_used(len(memory.token_ends), len(prompt), decoding.max_new_tokens)
            for memory, prompt in zip(memories, prompts, strict=True)
        ]
        clock.lap("select_ms")
        with self.decoding_mode():
            filled = self.prefill([memory.compressed.content for memory in memories], used, prompts)
            clock.lap("prefill_ms")
            rows = generate_timed(self.backbone, filled.logits, filled.advance, decoding, clock)
        answers = []
        for memory, count, row, conditioning in zip(
            memories, used, rows, filled.conditioning, strict=True
        ):
            assert row.finish_reason is not None
            tokens, cut = len(memory.token_ends), memory.compressed.notes
            if count < tokens:
                took = f"{self.name} took its first {count:,}"
                cut = (*cut, f"the context has {tokens:,} tokens, {took}")
            citations = cite(memory.documents, memory.token_ends[count - 1] if count else 0)
            answer = Answer(
                text=row.text,
                citations=citations,
                k=len(citations),
                blocks=len(memory.documents),
                timings=dict(clock.timings),
                finish_reason=row.finish_reason,
                model=self.name,
                cut=(*cut, *row.cut()),
                conditioning=conditioning,
                stored_bytes=memory.stored_bytes,
                context_tokens=tokens,
            )
            answers.append(answer)
        return answers

    # Checkpoints

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Open a checkpoint, a folder or a hub id.

        Args:
            dtype: data type of the backbone; None means bfloat16 on a GPU, float32 elsewhere.
            device: None means a GPU if there is one.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or it belongs to another
                method or another shape.
            ConfigError: a setting or the backbone is not usable.
        """
        device = chosen_device(device)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        folder = checkpoint.locate(str(name))
        with checkpoint.opening(folder):
            if (method := method_of(folder)) != cls.name:
                raise CheckpointError(
                    f"'{name}' is a checkpoint of '{method}', not of '{cls.name}'; "
                    f"give one that training '{cls.name}' wrote"
                )
            config = cls.Config.load(folder)
            backbone = checkpoint.open_named(
                config.backbone,
                config.backbone_revision,
                folder,
                dtype=dtype,
                device=device,
            )
            reader = cls(config, backbone)
            checkpoint.read_weights(folder, reader.parts())
            if config.lora_rank:
                backbone.load_lora(folder / checkpoint.ADAPTER)
        return reader.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint atomically."""
        backbone = portable_name(self.config.backbone)
        with checkpoint.unfinished(Path(folder)) as partial:
            self.config.with_changes(backbone=backbone).save(partial, self.name)
            checkpoint.write_weights(partial, self.parts())
            if self.config.lora_rank:
                self.backbone.save_lora(partial / checkpoint.ADAPTER, backbone)


def generator_for(seed: int, ids: Tensor) -> np.random.Generator:
    """A random generator seeded by a text, so that a resumed run draws the same numbers."""
    return np.random.default_rng([seed, *ids[:8].tolist()])

"""What every trained baseline is: a backbone with adapters and parts, a memory, an answer, losses.

A method is one class in one file: `build_parts`, `remember`, `seen`, `begin` and the losses that it
is trained with. Reading, answering, times, citations and checkpoints are here, the same for all.

Letters: B batch, T context tokens, A continuation or answer tokens, P prompt and answer tokens,
V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from sedem.backbone.decoder import Backbone
from sedem.baselines.full_context import cite, context_room
from sedem.baselines.memory import Begun, ContextMemory, Remembered
from sedem.baselines.settings import ReaderConfig, method_of
from sedem.engine.device import Clock
from sedem.errors import CheckpointError, ConfigError
from sedem.inference import checkpoint
from sedem.inference.generation import Decoding, Transcript, generate
from sedem.inference.prompts import context_prompt, question_ids
from sedem.types import Answer, Document, check_documents, check_tokens

GREEDY = Decoding()


class TrainedReader(nn.Module, ABC):
    """A trained baseline on one frozen backbone.

    The trained parts are kept in float32 whatever the backbone's type.

    Args:
        config: its settings.
        backbone: it has no adapters yet; those of the settings are attached.
    """

    name: ClassVar[str]
    Config: ClassVar[type[ReaderConfig]]
    batched: ClassVar[bool] = True
    """Whether `begin` takes several rows; else questions are answered one by one."""
    picks: ClassVar[bool] = False
    """Whether it picks K of the documents, which its settings then say, and is trained to."""

    def __init__(self, config: ReaderConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config: Any = config
        self.backbone = backbone
        self.progress = 0.0
        self._parts = self.build_parts(config, backbone.model.config).to(backbone.device)
        if config.lora_rank:
            backbone.add_lora(
                config.lora_rank, config.lora_alpha, config.lora_targets, config.lora_dropout
            )

    # What a method is

    @staticmethod
    @abstractmethod
    def build_parts(config: Any, shape: PretrainedConfig) -> nn.ModuleDict:
        """What is trained beside the adapters, with its start values; nothing else is needed.

        Args:
            config: the method's settings.
            shape: the backbone's; parameters are counted from it on the meta device.
        """

    @abstractmethod
    def remember(self, ids: list[int]) -> Remembered:
        """The memory of a context; no question is needed.

        Args:
            ids: tokens of all documents, without a start token.
        """

    @abstractmethod
    def seen(self, tokens: int, prompt: int, limit: int) -> int:
        """How many tokens of a context, from its first on, condition an answer.

        Args:
            tokens: of the context.
            prompt: tokens of start, prompt and question.
            limit: of answer tokens.

        Raises:
            DataError: not even these fit.
        """

    @abstractmethod
    def begin(
        self, contents: Sequence[Any], seen: Sequence[int], prompts: Sequence[list[int]]
    ) -> Begun:
        """Prefill memories and prompts.

        Args:
            contents: what `remember` kept.
            seen: tokens of each context that count.
            prompts: start token, prompt and question.
        """

    @abstractmethod
    def question_loss(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Training on questions: `loss` and its parts.

        Args:
            contexts: tokens of each context, cut to what `seen` says.
            ids: start token, prompt and answer, padded on the left `[B, P]`.
            valid: False where `ids` is padding `[B, P]`.
            labels: tokens to predict at the last positions `[B, A]`.
        """

    def text_loss(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """Training on text: `loss` and its parts.

        Args:
            context: tokens `[B, T]`.
            continuation: the tokens after them `[B, A]`.

        Raises:
            ConfigError: the method has no such training.
        """
        raise ConfigError(f"'{self.name}' is not trained on text; give its recipe questions (data)")

    def answering(self) -> AbstractContextManager[None]:
        """How the backbone stands while an answer is generated; a method may switch adapters."""
        return nullcontext()

    @classmethod
    def overhead(cls, config: Any, shape: PretrainedConfig) -> int:
        """Parameters that the paper's table of overheads counts: by default all trained parts."""
        with torch.device("meta"):
            return sum(p.numel() for p in cls.build_parts(config, shape).parameters())

    # What is trained

    def parts(self) -> nn.ModuleDict:
        """What is trained beside the adapters, and what sedem.safetensors holds."""
        return self._parts

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate: `parts` and `lora`."""
        groups = {"parts": list(self._parts.parameters()), "lora": self.backbone.lora_parameters()}
        return {name: parameters for name, parameters in groups.items() if parameters}

    def train(self, mode: bool = True) -> Self:
        """Training mode of parts and adapters; the frozen weights never drop anything out."""
        super().train(mode)
        self.backbone.eval()
        for name, module in self.backbone.named_modules():
            if name.endswith("lora_dropout"):
                module.train(mode)
        return self

    # Reading and answering

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> ContextMemory:
        """Read documents once; no question is needed.

        Raises:
            DataError: there are none, two have one name, or they have no tokens.
        """
        check_documents(documents)
        text = context_prompt([document.text for document in documents])
        encoded = self.backbone.tokenize([text], offsets=True)
        check_tokens(encoded["input_ids"][0])
        ends = [end for _, end in encoded["offset_mapping"][0]]
        return ContextMemory(list(documents), ends, self.remember(list(encoded["input_ids"][0])))

    def answer(
        self, memory: ContextMemory, question: str, *, decoding: Decoding = GREEDY
    ) -> Answer:
        """Answer one question.

        Raises:
            DataError: the question is empty or alone exceeds the backbone's positions.
        """
        return self.answer_all([memory], [question], decoding)[0]

    @torch.no_grad()
    def answer_all(
        self,
        memories: Sequence[ContextMemory],
        questions: Sequence[str],
        decoding: Decoding = GREEDY,
    ) -> list[Answer]:
        """Answer a question about each memory, as one batch."""
        clock = Clock(self.backbone.device)
        prompts = [question_ids(self.backbone, question) for question in questions]
        seen = [
            self.seen(len(memory.ends), len(prompt), decoding.max_new_tokens)
            for memory, prompt in zip(memories, prompts, strict=True)
        ]
        clock.lap("select_ms")
        rows: list[Transcript] = []
        with self.answering():
            begun = self.begin([memory.remembered.content for memory in memories], seen, prompts)
            clock.lap("prefill_ms")
            backbone = self.backbone
            for transcripts in generate(
                begun.logits, begun.advance, backbone.tokenizer, backbone.eos_token_id, decoding
            ):
                rows = transcripts
                if "ttft_ms" not in clock.timings:
                    clock.mark("ttft_ms")
        clock.mark("total_ms")
        return [
            self._to_answer(*parts, clock.timings)
            for parts in zip(memories, seen, rows, begun.conditioning, strict=True)
        ]

    def _to_answer(
        self,
        memory: ContextMemory,
        seen: int,
        row: Transcript,
        conditioning: int,
        timings: dict[str, float],
    ) -> Answer:
        assert row.finish_reason is not None
        documents, tokens = memory.documents, len(memory.ends)
        cut = memory.remembered.notes
        if seen < tokens:
            cut = (*cut, f"the context has {tokens:,} tokens, {self.name} took its first {seen:,}")
        citations = cite(documents, memory.ends[seen - 1] if seen else 0)
        return Answer(
            text=row.text,
            citations=citations,
            k=len(citations),
            blocks=len(documents),
            timings=dict(timings),
            finish_reason=row.finish_reason,
            model=self.name,
            cut=(*cut, *row.cut()),
            conditioning=conditioning,
            stored_bytes=memory.stored_bytes,
            context_tokens=tokens,
        )

    def room(self, prompt: int, limit: int) -> int:
        """Positions left for what stands for the context.

        Raises:
            DataError: prompt and answer alone exceed the backbone's positions.
        """
        return context_room(self.backbone, prompt, limit)

    # Checkpoints

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention: str = "sdpa",
    ) -> Self:
        """Open a checkpoint.

        Args:
            name: a folder or a hub id.
            dtype: type of the backbone; None means bfloat16 on a GPU and float32 elsewhere.
            device: None means a GPU if there is one.
            attention: "sdpa" or "eager".

        Raises:
            CheckpointError: it is missing, incomplete, of another shape or of another method.
            ConfigError: its settings or its backbone cannot be used.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        folder = checkpoint.locate(str(name))
        if (method := method_of(folder)) != cls.name:
            raise CheckpointError(
                f"'{name}' is a checkpoint of '{method}', not of '{cls.name}'; "
                f"give one that 'sedem train {cls.name}' wrote"
            )
        config = cls.Config.load(folder)
        backbone = checkpoint.open_named(
            config.backbone,
            config.backbone_revision,
            folder,
            dtype=dtype,
            device=device,
            attention=attention,
        )
        reader = cls(config, backbone)
        checkpoint.read_weights(folder, reader.parts())
        if config.lora_rank:
            backbone.load_lora(folder / checkpoint.ADAPTER)
        return reader.requires_grad_(False).eval()

    def save_pretrained(self, folder: str | Path, *, int8: bool = False) -> None:
        """Write a checkpoint; a new one appears whole or not at all.

        Args:
            folder: where to.
            int8: matrices as int8 rows with a scale a row, and adapters as bfloat16.
        """
        with checkpoint.unfinished(Path(folder)) as place:
            self.config.save(place, self.name)
            checkpoint.write_weights(place, self.parts(), int8=int8)
            if self.config.lora_rank:
                dtype = torch.bfloat16 if int8 else torch.float32
                self.backbone.save_lora(place / checkpoint.ADAPTER, self.config.backbone, dtype)

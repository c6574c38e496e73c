"""Trained baselines in the harness: opened from their own checkpoints, asked in batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.baselines.registry import reader_class
from sedem.baselines.trained import ContextMemory, TrainedReader
from sedem.data.examples import Example
from sedem.data.labels import only_gold
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.registry import Method, decoding_of, refuse
from sedem.types import Answer, Document, Reader

SUPPORTED_CONTROLS = ("selected", "gold")
CACHED_CONTEXTS = 32
"""Number of contexts whose memory is cached for later questions about them."""


class BoundTrained:
    """A trained baseline as a plain reader with fixed decoding."""

    def __init__(self, reader: TrainedReader, decoding: Decoding) -> None:
        self.trained = reader
        self.name = reader.name
        self.decoding = decoding

    def read(self, documents: Sequence[Document]) -> ContextMemory:
        """Read documents into the memory of this method."""
        return self.trained.read(documents)

    def answer(self, memory: ContextMemory, question: str) -> Answer:
        """Answer one question."""
        return self.trained.answer(memory, question, decoding=self.decoding)

    def answer_together(self, memory: ContextMemory, questions: Sequence[str]) -> list[Answer]:
        """Answer several questions over one memory."""
        return self.trained.answer_all([memory] * len(questions), questions, self.decoding)


class Trained:
    """A trained baseline over examples; it reads a context shared by several of them once."""

    def __init__(self, reader: TrainedReader, settings: MethodSettings) -> None:
        if settings.control not in SUPPORTED_CONTROLS:
            raise ConfigError(
                f"control is '{settings.control}'; {reader.name} can be given every document "
                "(selected) or those with evidence (gold)"
            )
        no_budget = () if reader.has_selection_budget else ("k",)
        refuse(reader.name, settings, "shift", "memory", "kept_dtype", "weights", *no_budget)
        if settings.k is not None:
            reader.config = reader.config.with_changes(k=settings.k)
        self.trained = reader
        self.gold = settings.control == "gold"
        self.batch = settings.batch
        self.backbone: Backbone | None = reader.backbone
        self.decoding = decoding_of(settings)
        self.reader: Reader = BoundTrained(reader, self.decoding)
        self._read = lru_cache(CACHED_CONTEXTS)(reader.read)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents.

        Raises:
            DataError: the control is "gold", and an example has no evidence.
        """
        memories = []
        for example in examples:
            documents = only_gold(example) if self.gold else example.documents
            memories.append(self._read(tuple(documents)))
        questions = [example.question for example in examples]
        return self.trained.answer_all(memories, questions, self.decoding)


def open_trained(name: str, settings: MethodSettings) -> Method:
    """Open a trained baseline from its checkpoint."""
    reader = reader_class(name).from_pretrained(
        settings.checkpoint, dtype=getattr(torch, settings.dtype), device=settings.device
    )
    return Trained(reader, settings)

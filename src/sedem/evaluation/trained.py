"""Trained baselines in the harness: their own checkpoints, examples in batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from sedem.backbone.decoder import Backbone
from sedem.baselines.memory import ContextMemory
from sedem.baselines.registry import reader_class
from sedem.baselines.trained import TrainedReader
from sedem.data.examples import Example
from sedem.data.labels import only_gold
from sedem.errors import ConfigError
from sedem.evaluation.method import Method, Setting, refuse
from sedem.inference.generation import Decoding
from sedem.types import Answer, Document, Reader

GIVEN = ("selected", "gold")
KEPT = 32
"""Contexts whose memory is kept for the next question about them."""


class BoundTrained:
    """A trained baseline as a plain reader: how it answers is settled.

    Args:
        reader: reads and answers.
        decoding: how answers are generated.
    """

    def __init__(self, reader: TrainedReader, decoding: Decoding) -> None:
        self.trained = reader
        self.name = reader.name
        self.decoding = decoding

    def read(self, documents: Sequence[Document]) -> ContextMemory:
        """The documents as this method's memory."""
        return self.trained.read(documents)

    def answer(self, memory: ContextMemory, question: str) -> Answer:
        """Answer one question."""
        return self.trained.answer(memory, question, decoding=self.decoding)

    def answer_together(self, memory: ContextMemory, questions: Sequence[str]) -> list[Answer]:
        """Answer several questions over one memory."""
        return self.trained.answer_all([memory] * len(questions), questions, self.decoding)


class Trained:
    """A trained baseline over examples; a context that several of them share is read once.

    Args:
        reader: reads and answers.
        setting: limit, batch, and which documents are given.

    Raises:
        ConfigError: the setting asks for what only SeDeM has.
    """

    def __init__(self, reader: TrainedReader, setting: Setting) -> None:
        if setting.control not in GIVEN:
            raise ConfigError(
                f"control is '{setting.control}'; {reader.name} can be given every document "
                "(selected) or those with evidence (gold)"
            )
        no_budget = () if reader.has_selection_budget else ("k",)
        refuse(reader.name, setting, "shift", "memory", *no_budget)
        if setting.k is not None:
            reader.config = reader.config.with_changes(k=setting.k)
        self.trained = reader
        self.gold = setting.control == "gold"
        self.batch = setting.batch if reader.batched else 1
        self.backbone: Backbone | None = reader.backbone
        self.decoding = Decoding(max_new_tokens=setting.max_new_tokens)
        self.reader: Reader = BoundTrained(reader, self.decoding)
        self._read = lru_cache(KEPT)(reader.read)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents.

        Raises:
            DataError: only documents with evidence are to be given, and an example has none.
        """
        memories = []
        for example in examples:
            documents = only_gold(example) if self.gold else example.documents
            memories.append(self._read(tuple(documents)))
        questions = [example.question for example in examples]
        return self.trained.answer_all(memories, questions, self.decoding)


def open_trained(name: str, setting: Setting) -> Method:
    """A trained baseline from its checkpoint."""
    reader = reader_class(name).from_pretrained(
        setting.checkpoint, dtype=getattr(torch, setting.dtype), device=setting.device
    )
    return Trained(reader, setting)

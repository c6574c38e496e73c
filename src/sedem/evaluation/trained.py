"""Trained baselines in the harness: their own checkpoints, examples in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sedem.backbone import Backbone
from sedem.baselines.catalog import reader_class
from sedem.baselines.rag import RAG
from sedem.baselines.trained import TrainedReader
from sedem.contracts import Answer
from sedem.data.examples import Example
from sedem.data.labels import only_gold
from sedem.errors import ConfigError
from sedem.evaluation.methods import Method, Setting
from sedem.generation import Decoding

GIVEN = ("selected", "gold")


class Trained:
    """A trained baseline over examples, each with its own documents.

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
        picks = isinstance(reader, RAG)
        if (setting.k is not None and not picks) or setting.shift:
            raise ConfigError(
                f"k is {setting.k} and shift {setting.shift}, but {reader.name} selects no blocks; "
                "leave both out"
            )
        if setting.k is not None:
            reader.config = replace(reader.config, k=setting.k)
        self.reader = reader
        self.gold = setting.control == "gold"
        self.batch = setting.batch if reader.batched else 1
        self.backbone: Backbone | None = reader.backbone
        self.decoding = Decoding(max_new_tokens=setting.max_new_tokens)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents.

        Raises:
            DataError: only documents with evidence are to be given, and an example has none.
        """
        memories = []
        for example in examples:
            documents = only_gold(example) if self.gold else example.documents
            memories.append(self.reader.read(documents))
        questions = [example.question for example in examples]
        return self.reader.answer_all(memories, questions, self.decoding)


def open_trained(name: str, setting: Setting) -> Method:
    """A trained baseline from its checkpoint."""
    dtype = getattr(torch, setting.dtype)
    return Trained(reader_class(name).from_pretrained(setting.checkpoint, dtype=dtype), setting)

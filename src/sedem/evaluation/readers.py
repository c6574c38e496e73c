"""Methods of the harness: SeDeM in batches over shared documents, any other reader one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow, InMemory
from sedem.bank.memory_bank import MemoryBank
from sedem.baselines.bm25 import BM25
from sedem.baselines.full_context import FullContext
from sedem.baselines.longllmlingua import LongLLMLingua
from sedem.config import SedemConfig
from sedem.data import labels
from sedem.data.examples import Example
from sedem.errors import ConfigError
from sedem.evaluation.method import CONTROLS, Method, Setting, refuse
from sedem.evaluation.run import Progress, evaluate
from sedem.inference.checkpoint import EXTRA_ENTRIES, locate, open_backbones
from sedem.inference.generation import Decoding
from sedem.inference.prompts import question_ids
from sedem.inference.requests import Request, restored_sizes
from sedem.method.selector import ALL, Budget, resolve_budget, select
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, check_dtype
from sedem.types import Answer, Document, Reader

OF_SEDEM = ("control", "shift", "memory")
"""Settings that mean nothing to methods of raw text."""


class OneByOne:
    """Any reader as a method: each example is read and answered alone, nothing is kept."""

    batch = 1

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.backbone: Backbone | None = getattr(reader, "backbone", None)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        return [self.reader.answer(self.reader.read(e.documents), e.question) for e in examples]


class BoundSedem:
    """SeDeM as a plain reader: what it is asked with is settled.

    Args:
        model: reads and answers.
        k: selection budget; None means the model's own.
        decoding: how answers are generated.
        memory: what slots are stored as.
    """

    name = "sedem"

    def __init__(
        self, model: SeDeM, k: Budget | None, decoding: Decoding, memory: str = BFLOAT16
    ) -> None:
        self.model = model
        self.k = k
        self.decoding = decoding
        self.memory = memory

    def read(self, documents: Sequence[Document]) -> MemoryBank:
        """The documents as a bank."""
        bank = self.model.read(documents)
        return bank if self.memory == bank.dtype else bank.cast(self.memory)

    def answer(self, memory: MemoryBank, question: str) -> Answer:
        """Answer one question."""
        return self.model.answer(memory, question, k=self.k, decoding=self.decoding)

    def answer_together(self, memory: MemoryBank, questions: Sequence[str]) -> list[Answer]:
        """Answer several questions over one bank, in batches."""
        return self.model.answer(memory, questions, k=self.k, decoding=self.decoding)


class Sedem:
    """SeDeM over contexts that share documents: each text is read once, examples go in batches.

    Args:
        model: reads and answers.
        setting: budget, control and limit.
    """

    def __init__(self, model: SeDeM, setting: Setting) -> None:
        if setting.control not in CONTROLS:
            raise ConfigError(f"control is '{setting.control}'; it can be {', '.join(CONTROLS)}")
        self.model = model
        self.setting = setting
        self.batch = setting.batch
        self.backbone: Backbone | None = model.decoder
        self.decoding = Decoding(max_new_tokens=setting.max_new_tokens)
        self.reader: Reader = BoundSedem(model, setting.k, self.decoding, setting.memory)
        self._read: dict[str, tuple[list[BlockRow], InMemory]] = {}

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents, or from those with evidence.

        Raises:
            DataError: only documents with evidence are to be given, and an example has none.
        """
        self._read_new(examples)
        requests = []
        for example in examples:
            bank = self._bank(self._given(example))
            requests.append(
                Request(
                    bank,
                    example.question,
                    self.setting.k,
                    self._forced(bank, example),
                    ranking=True,
                )
            )
        return self.model.answer_requests(requests, self.decoding)

    def _given(self, example: Example) -> Sequence[Document]:
        if self.setting.control != "gold-documents":
            return example.documents
        return labels.only_gold(example)

    def _read_new(self, examples: Sequence[Example]) -> None:
        texts = {d.text for e in examples for d in e.documents} - self._read.keys()
        if not texts:
            return
        ordered = sorted(texts)
        bank = self.model.read([Document(str(i), text) for i, text in enumerate(ordered)])
        bank = bank.cast(self.setting.memory)
        indices: dict[int, list[int]] = {}
        for index, block in enumerate(bank.blocks):
            indices.setdefault(block.document, []).append(index)
        for number, text in enumerate(ordered):
            own = indices[number]
            self._read[text] = ([bank.blocks[i] for i in own], InMemory(bank.stored(own)))

    def _bank(self, documents: Sequence[Document]) -> MemoryBank:
        parts = [self._read[document.text] for document in documents]
        blocks = [
            BlockRow(number, row.start, row.end, row.slot_tokens)
            for number, (rows, _) in enumerate(parts)
            for row in rows
        ]
        memories = [memory for _, memory in parts]
        return MemoryBank(
            self.model.fingerprint(),
            self.model.made_by(),
            list(documents),
            blocks,
            [*memories],
            dtype=self.setting.memory,
        )

    def _forced(self, bank: MemoryBank, example: Example) -> list[int] | None:
        control = self.setting.control
        if control in ("selected", "gold-documents"):
            return self._best_that_fit(bank, example) if self.setting.k == ALL else None
        if control == "none":
            return []
        evidence = torch.tensor(labels.from_evidence(bank.blocks, example.evidence))
        scores = self.model.scores(bank, example.question)
        shift = 1e6 if control == "gold" else -1e6
        k = self.model.config.k if self.setting.k is None else self.setting.k
        return select(scores + shift * evidence, resolve_budget(k, len(bank))).tolist()

    def _best_that_fit(self, bank: MemoryBank, example: Example) -> list[int]:
        """The full bank, or as many of its best blocks as the decoder has positions for."""
        model = self.model
        prefix = len(question_ids(model.decoder, example.question))
        room = model.decoder.max_positions - prefix - self.decoding.max_new_tokens
        chosen: list[int] = []
        for index in select(model.scores(bank, example.question), len(bank)).tolist():
            room -= restored_sizes(model, bank, [index])[0]
            if room < 0:
                break
            chosen.append(index)
        return chosen


def evaluate_reader(
    reader: Reader,
    examples: Sequence[Example],
    out: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate any reader on examples, each read and answered alone.

    Args:
        reader: has `name`, `read(documents)` and `answer(memory, question)`.
        examples: what is asked, such as `open_examples(file).examples`.
        out: folder for settings, predictions and metrics; a run that was killed goes on there.
        settings: whatever decides the reader's answers, as JSON-ready values; results of other
            settings or of other examples in the folder are refused.
        progress: called with examples done and examples in all.

    Returns:
        The metrics, as metrics.json holds them.

    Raises:
        ConfigError: the folder holds other results.
        DataError: there are no examples, or two have one id.
    """
    digest = hashlib.sha256(repr(list(examples)).encode("utf-8", "backslashreplace"))
    every = {"method": reader.name, "examples_sha256": digest.hexdigest(), **(settings or {})}
    return evaluate(OneByOne(reader), examples, every, Path(out), progress)


def open_sedem(setting: Setting) -> Method:
    """SeDeM from a checkpoint."""
    _check_budget(setting.k)
    check_dtype(setting.memory)
    model = SeDeM.from_pretrained(
        setting.checkpoint,
        dtype=getattr(torch, setting.dtype),
        device=setting.device,
        engine=setting.engine,
    )
    if setting.shift:
        model.config = model.config.with_changes(segment_shift=setting.shift)
    return Sedem(model, setting)


def open_full_context(setting: Setting) -> Method:
    """The checkpoint's frozen decoder on the whole raw context.

    Raises:
        ConfigError: a budget or another setting of SeDeM's is given.
    """
    refuse("full-context", setting, "k", *OF_SEDEM)
    return OneByOne(FullContext(frozen_decoder(setting), decoding_of(setting)))


def open_bm25(setting: Setting) -> Method:
    """The checkpoint's frozen decoder on the k paragraphs that BM25 finds.

    Raises:
        ConfigError: the budget is none, or a setting of SeDeM's is given.
    """
    refuse("bm25", setting, *OF_SEDEM)
    _check_budget(setting.k)
    k = 2 if setting.k is None else setting.k
    return OneByOne(BM25(frozen_decoder(setting), decoding_of(setting), k))


def open_longllmlingua(setting: Setting) -> Method:
    """The checkpoint's frozen decoder on what it leaves of the context for each question.

    Raises:
        ConfigError: a budget or another setting of SeDeM's is given.
    """
    refuse("longllmlingua", setting, "k", *OF_SEDEM)
    return OneByOne(LongLLMLingua(frozen_decoder(setting), decoding_of(setting)))


def _check_budget(k: Budget | None) -> None:
    """Refuse what is no budget before any example is, which would count as not answered."""
    if k is not None:
        resolve_budget(k, 1)


def decoding_of(setting: Setting) -> Decoding:
    """How a setting's answers are generated."""
    return Decoding(max_new_tokens=setting.max_new_tokens)


def frozen_decoder(setting: Setting) -> Backbone:
    """The checkpoint's decoder without adapters, for methods of raw text."""
    return _frozen_backbones(setting)[1]


def frozen_encoder(setting: Setting) -> Backbone:
    """The checkpoint's encoder without adapters."""
    return _frozen_backbones(setting)[0]


def _frozen_backbones(setting: Setting) -> tuple[Backbone, Backbone]:
    folder = locate(setting.checkpoint)
    config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
    device = setting.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return open_backbones(config, folder, dtype=getattr(torch, setting.dtype), device=device)

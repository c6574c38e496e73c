"""Methods in the harness: SeDeM and trained baselines answer in batches, others one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import question_ids
from sedem.bank.blocks import Blocks
from sedem.bank.memory_bank import BankReader, MemoryBank
from sedem.checkpoint.folder import EXTRA_ENTRIES, check, locate, open_backbones
from sedem.config import CONFIG_FILE, WAYS, SedemConfig
from sedem.engine.device import chosen_device
from sedem.errors import ConfigError
from sedem.guidance import Budget
from sedem.method.selector import ALL, top_k
from sedem.model import SeDeM
from sedem.selecting.plan import Request, budget_of
from sedem.selecting.select import count_blocks
from sedem.tensors import BFLOAT16, Quantized, check_dtype, join
from sedem.types import Answer, Document, DocumentReader
from sedem_lab.baselines.full_context import FullContext
from sedem_lab.baselines.registry import find
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.data import labels
from sedem_lab.data.examples import Example
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.run import Method, Progress, evaluate

ONLY_SEDEM = ("control", *WAYS, "shift", "memory", "engine")
"""Settings that raw-text methods ignore."""
CONTROLS_OF_TRAINED = ("selected", "gold")
CACHED_CONTEXTS = 32
"""Number of contexts whose memory is cached for later questions about them."""


def open_method(name: str, settings: MethodSettings) -> Method:
    """Open a method by name.

    Raises:
        ConfigError: there is no method of that name, or a setting does not fit it.
    """
    method = find(name)
    opener = method.load()
    if method.frozen:
        return OneByOne(open_frozen(opener, settings))
    if method.trained:
        options = {"dtype": getattr(torch, settings.dtype), "device": settings.device}
        return TrainedMethod(opener.from_pretrained(settings.checkpoint, **options), settings)
    opened = opener(settings)
    # A reader answers one question, a method a batch of examples.
    return opened if hasattr(opened, "batch") else OneByOne(opened)


def decoding_of(settings: MethodSettings) -> Decoding:
    """Greedy decoding up to the answer limit."""
    if settings.max_new_tokens is None:
        return Decoding()
    return Decoding(max_new_tokens=settings.max_new_tokens)


class OneByOne:
    """Any reader as a method: it reads and answers each example alone and caches nothing."""

    batch = 1

    def __init__(self, reader: DocumentReader) -> None:
        self.reader = reader
        self.backbone: Backbone | None = getattr(reader, "backbone", None)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents."""
        return [self.reader.answer(self.reader.read(e.documents), e.question) for e in examples]


class BoundSedem:
    """SeDeM as a plain reader with a fixed budget (None: its own), decoding and memory type."""

    name = "sedem"

    def __init__(
        self, model: SeDeM, k: Budget | None, decoding: Decoding, memory: str = BFLOAT16
    ) -> None:
        self.model = model
        self.k = k
        self.decoding = decoding
        self.memory = memory

    def read(self, documents: Sequence[Document]) -> MemoryBank:
        """Read documents into a bank."""
        bank = self.model.read(documents)
        return bank if self.memory == bank.dtype else bank.cast(self.memory)

    def answer(self, memory: BankReader, question: str) -> Answer:
        """Answer one question."""
        return self.model.answer(memory, question, k=self.k, decoding=self.decoding)

    def answer_together(self, memory: BankReader, questions: Sequence[str]) -> list[Answer]:
        """Answer several questions over one bank, in batches."""
        return self.model.answer(memory, questions, k=self.k, decoding=self.decoding)


class SedemMethod:
    """SeDeM in batches, over contexts that share documents: each text is read once."""

    def __init__(self, model: SeDeM, settings: MethodSettings) -> None:
        self.model = model
        self.settings = settings
        self.batch = settings.batch
        self.backbone: Backbone | None = model.decoder
        self.decoding = decoding_of(settings)
        self.reader: DocumentReader = BoundSedem(model, settings.k, self.decoding, settings.memory)
        # The blocks of each text, and their memory.
        self._texts: dict[str, tuple[Blocks, Quantized]] = {}

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents, or only from those with evidence."""
        return self.model.answer_requests(self.requests(examples), self.decoding)

    def requests(self, examples: Sequence[Example]) -> list[Request]:
        """One request for each example; reads their documents.

        Raises:
            DataError: the control is "gold-documents", and an example has no evidence.
        """
        # Each new text is read once.
        new = sorted({d.text for e in examples for d in e.documents} - self._texts.keys())
        if new:
            bank = self.model.read([Document(str(i), text) for i, text in enumerate(new)])
            bank = bank.cast(self.settings.memory)
            bounds = np.searchsorted(bank.blocks.documents, np.arange(len(new) + 1)).tolist()
            for text, (first, last) in zip(new, pairwise(bounds), strict=True):
                blocks = bank.blocks.take(slice(first, last))
                self._texts[text] = blocks, bank.stored(range(first, last))
        requests = []
        for example in examples:
            gold = self.settings.control == "gold-documents"
            documents = labels.only_gold(example) if gold else example.documents
            # The bank of a context is put together from its texts.
            parts = [self._texts[document.text] for document in documents]
            own = [b.of_documents(np.full(len(b), n)) for n, (b, _) in enumerate(parts)]
            bank = MemoryBank(
                self.model.fingerprint(),
                self.model.made_by(),
                list(documents),
                Blocks.join(own),
                join([memory for _, memory in parts]),
                dtype=self.settings.memory,
            )
            request = Request(
                bank,
                example.question,
                self.settings.k,
                self._forced_blocks(bank, example),
                ranking=True,
                min_confidence=0.0,  # every question is answered, as the other methods do
                **{name: getattr(self.settings, name) for name in WAYS},
            )
            requests.append(request)
        return requests

    def _forced_blocks(self, bank: BankReader, example: Example) -> list[int] | None:
        """Indices of the blocks to answer from; None leaves the choice to the selector."""
        control = self.settings.control
        if control in ("selected", "gold-documents"):
            return self.best_that_fit(bank, example) if self.settings.k == ALL else None
        if control == "none":
            return []
        evidence = torch.tensor(labels.from_evidence(bank.blocks, example.evidence))
        scores = self.model.scores(bank, example.question)
        bonus = 1e6 if control == "gold" else -1e6
        count = count_blocks(self.model, budget_of(self.model, self.settings.k), scores)
        return top_k(scores + bonus * evidence, count).tolist()

    def best_that_fit(self, bank: BankReader, example: Example) -> list[int]:
        """All blocks, or the best ones that the decoder has positions for."""
        model = self.model
        if model.config.block_context == "independent":
            return list(range(len(bank)))  # independent blocks share their positions
        chat = model.config.chat_template
        prefix = len(question_ids(model.decoder, example.question, chat=chat))
        room = model.decoder.max_positions - prefix - self.decoding.max_new_tokens
        chosen: list[int] = []
        for index in top_k(model.scores(bank, example.question), len(bank)).tolist():
            [size] = bank.restored_sizes([index], model.decompressor.states_per_slot)
            room -= size
            if room < 0:
                break
            chosen.append(index)
        return chosen


def evaluate_reader(
    reader: DocumentReader,
    examples: Sequence[Example],
    out: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate any reader; it reads and answers each example alone.

    Args:
        reader: has `name`, `read(documents)` and `answer(memory, question)`.
        out: folder for settings, predictions and metrics. A killed run is resumed from it.
        settings: everything that decides the reader's answers, with JSON types. A folder with
            results of other settings or other examples is refused.
        progress: called with the number of finished examples and the number of examples.

    Returns:
        The metrics, as in metrics.json.

    Raises:
        ConfigError: the folder has results of other settings or examples.
        DataError: there are no examples, or two have the same id.
    """
    digest = hashlib.sha256(repr(list(examples)).encode("utf-8", "backslashreplace"))
    entries = {"method": reader.name, "examples_sha256": digest.hexdigest(), **(settings or {})}
    return evaluate(OneByOne(reader), examples, entries, Path(out), progress)


class TrainedMethod:
    """A trained baseline over examples; it reads a context shared by several of them once."""

    def __init__(self, reader: TrainedReader, settings: MethodSettings) -> None:
        if settings.control not in CONTROLS_OF_TRAINED:
            raise ConfigError(
                f"control is '{settings.control}'; {reader.name} can be given every document "
                "(selected) or those with evidence (gold)"
            )
        no_budget = () if reader.has_selection_budget else ("k",)
        settings.refuse(reader.name, "shift", "memory", "engine", *no_budget)
        if settings.k is not None:
            reader.config = reader.config.with_changes(k=settings.k)
        reader.decoding = decoding_of(settings)
        self.trained = reader
        self.gold = settings.control == "gold"
        self.batch = settings.batch
        self.backbone: Backbone | None = reader.backbone
        self.reader: DocumentReader = reader
        self._read = lru_cache(CACHED_CONTEXTS)(reader.read)

    def answer(self, examples: Sequence[Example]) -> list[Answer]:
        """Answer each example from its own documents.

        Raises:
            DataError: the control is "gold", and an example has no evidence.
        """
        given = [labels.only_gold(e) if self.gold else e.documents for e in examples]
        memories = [self._read(tuple(documents)) for documents in given]
        return self.trained.answer_all(memories, [example.question for example in examples])


def open_sedem(settings: MethodSettings) -> Method:
    """Open SeDeM from a checkpoint; see `open_model`."""
    # Before the weights are loaded, because loading takes long.
    check_dtype(settings.memory)
    model = open_model(settings)
    if settings.shift:
        model.config = model.config.with_changes(segment_shift=settings.shift)
    return SedemMethod(model, settings)


def open_model(settings: MethodSettings) -> SeDeM:
    """Open the model that the settings describe, and check that it supports them.

    Raises:
        ConfigError: k is "auto", and the model has no guidance.
    """
    model = SeDeM.from_pretrained(
        settings.checkpoint,
        dtype=getattr(torch, settings.dtype),
        device=settings.device,
        engine=settings.engine,
    )
    budget_of(model, settings.k)
    return model


def open_frozen(kind: type[FullContext], settings: MethodSettings) -> FullContext:
    """Open a method of raw text on the checkpoint's frozen decoder."""
    no_budget = () if kind.has_selection_budget else ("k",)
    settings.refuse(kind.name, *no_budget, *ONLY_SEDEM)
    budget = {} if settings.k is None else {"k": settings.k}
    return kind(frozen_decoder(settings), decoding_of(settings), **budget)


def frozen_decoder(settings: MethodSettings) -> Backbone:
    """The checkpoint's decoder without adapters, for methods of raw text."""
    folder = locate(settings.checkpoint)
    check(folder, CONFIG_FILE)
    config = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
    device = chosen_device(settings.device)
    dtype = getattr(torch, settings.dtype)
    return open_backbones(config, folder, dtype=dtype, device=device)[1]

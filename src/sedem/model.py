"""SeDeM: read documents once into a bank, then answer questions from K of its blocks."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch
from torch import Tensor

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.running import Estimate, ThreadReply, answer_events
from sedem.backbone.decoder import Backbone
from sedem.bank.memory_bank import BankReader, MemoryBank
from sedem.checkpoint import folder as checkpoint
from sedem.checkpoint.folder import BACKBONE, portable_name
from sedem.config import PASSAGES, PER_DOCUMENT, SedemConfig, is_gguf
from sedem.engine.device import chosen_device
from sedem.engine.interface import Engine
from sedem.engine.kept import KeptBudget
from sedem.engine.static import keeping_engine, open_engine
from sedem.errors import ConfigError
from sedem.guidance import Budget
from sedem.modules import SedemModules
from sedem.selecting.plan import Options, Request, plan_of
from sedem.selecting.select import select
from sedem.types import Answer, Citation

if TYPE_CHECKING:
    from sedem.answering.scheduler import Scheduler
    from sedem.reading.building import Progress
    from sedem.reading.documents import Given
    from sedem.reading.followed import ReadInto

_ANSWERING = threading.Lock()
"""Held by the thread that answers for `aanswer`."""


class SeDeM(SedemModules):
    """Selective Decompression of Hidden-State Memories: a model that reads, selects and answers.

    Args:
        decoder: the backbone that answers; the same object in the same-backbone setting.
        source: where it was opened from, to be recorded in banks.

    Raises:
        ConfigError: a backbone lacks a layer that the configuration names.
    """

    def __init__(
        self,
        config: SedemConfig,
        encoder: Backbone,
        decoder: Backbone,
        name: str = "sedem",
        source: str | None = None,
    ) -> None:
        super().__init__(config, encoder, decoder)
        self.name, self.source = name, source

    def __repr__(self) -> str:
        """The name, what answers, and where; not the modules, which are hundreds of lines."""
        return f"SeDeM('{self.name}', decoder '{self.decoder.name}', on {self.device})"

    @cached_property
    def engine(self) -> Engine:
        """The engine that runs the model: the reference, until another one is set."""
        return open_engine("eager", self)

    # Reading

    def read(
        self, documents: Given | Iterable[Given], *, progress: Progress | None = None
    ) -> MemoryBank:
        """Read documents once; no question is needed.

        Args:
            documents: documents, or paths of files and folders; one or several.
            progress: called after every batch with characters read and of all.

        Raises:
            DataError: there are no documents, two have the same name, one has no tokens, or a file
                cannot be read.
        """
        from sedem.reading.building import read
        from sedem.reading.documents import documents_of

        every = documents_of(documents)
        return read(self, self.engine, every, source=self.source, progress=progress)

    def reads_into(self) -> ReadInto:
        """Return what reads documents into a bank at a place, with this model."""
        from sedem.reading.building import build_bank

        return partial(build_bank, self, self.engine, source=self.source)

    # Answering

    @overload
    def answer(  # type: ignore[overload-overlap]  # a str is not a list of questions
        self,
        memory: BankReader | None,
        question: str,
        *,
        decoding: Decoding = GREEDY,
        **options: Unpack[Options],
    ) -> Answer: ...

    @overload
    def answer(
        self,
        memory: BankReader | None,
        question: Sequence[str],
        *,
        decoding: Decoding = GREEDY,
        **options: Unpack[Options],
    ) -> list[Answer]: ...

    def answer(
        self,
        memory: BankReader | None,
        question: str | Sequence[str],
        *,
        decoding: Decoding = GREEDY,
        **options: Unpack[Options],
    ) -> Answer | list[Answer]:
        """Answer one question, or several over the same bank together.

        Args:
            memory: the bank; None answers without documents, as a user's turn in the decoder's chat
                template.
            question: one question, or a list of questions for a list of answers.
            decoding: limit, sampling and stop strings; the default is greedy.
            options: fields of `Request`: `k`, the number of blocks to use, "all", or "auto" for as
                many as a question needs; `blocks`, `documents`, `condition`, `selection`, `hops`,
                `answer`, `min_confidence`, `ranking`, and `reader`, a model that
                writes the answer.

        Raises:
            BankMismatchError: another model made the bank.
            DataError: a question is empty or too long.
            ConfigError: an option cannot be used, states exceed the decoder's positions, or there
                is no bank and no usable chat template.
            UnknownDocumentError: the bank has no document of the given name.
            ReaderError: a reader failed within its reply; if it gives none, this model answers.
            TypeError: there is no such option.
        """
        questions = [question] if isinstance(question, str) else question
        requests = [self._request(memory, one, decoding, options) for one in questions]
        answers = self.answer_requests(requests, decoding)
        return answers[0] if isinstance(question, str) else answers

    async def aanswer(
        self,
        memory: BankReader | None,
        question: str,
        *,
        decoding: Decoding = GREEDY,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer one question without blocking the event loop; arguments as in `answer`.

        Questions are answered one after the other; `scheduler` answers many together.
        """

        def one() -> Answer:
            # A reader waits for another server, and nobody has to wait for it.
            with nullcontext() if options.get("reader") else _ANSWERING:
                return self.answer(memory, question, decoding=decoding, **options)

        return await asyncio.to_thread(one)

    def answer_requests(
        self, requests: Sequence[Request], decoding: Decoding = GREEDY
    ) -> list[Answer]:
        """Answer requests together; they may differ in bank, K and length.

        Those with a reader are answered one after the other.
        """
        own = [place for place, one in enumerate(requests) if one.reader is None]
        together = [requests[place] for place in own]
        events = answer_events(self, self.engine, self.name, together, decoding)
        answers = {own[number]: one for number, one in events if isinstance(one, Answer)}
        for place in {*range(len(requests))}.difference(own):
            *_, answers[place] = self._read(requests[place], decoding)
        return [answers[number] for number in range(len(requests))]

    def stream(
        self,
        memory: BankReader | None,
        question: str,
        *,
        decoding: Decoding = GREEDY,
        estimated: Callable[[Estimate], None] | None = None,
        **options: Unpack[Options],
    ) -> ThreadReply:
        """Answer one question in pieces of text; arguments as in `answer`.

        Args:
            estimated: called before work that takes long.

        Returns:
            An iterator of text. When it is exhausted, its `answer` is what `answer()` returns.
        """
        request = self._request(memory, question, decoding, options)
        if request.reader is not None:
            written = self._read(request, decoding, estimated)
            return ThreadReply(written.close, written)
        events = answer_events(self, self.engine, self.name, [request], decoding, estimated)
        return ThreadReply(events.close, map(itemgetter(1), events))

    def _read(
        self,
        request: Request,
        decoding: Decoding,
        estimated: Callable[[Estimate], None] | None = None,
    ) -> Generator[Any, None, None]:
        """Yield the events of an answer that the request's reader writes."""
        from sedem.answering.reader import reader_events

        alone = partial(self.answer_requests, [replace(request, reader=None)], decoding)
        for event in reader_events(self, self.engine, request, decoding, alone):
            if isinstance(event, Estimate) and estimated is not None:
                estimated(event)
            yield event

    def _request(
        self, memory: BankReader | None, question: str, decoding: Decoding, options: Options
    ) -> Request:
        if memory is not None:
            return Request(memory, question, **options)
        if options:
            raise ConfigError(f"{', '.join(options)} need a bank; give one, or leave them out")
        from sedem.answering.conversation import conversation_request

        return conversation_request(self, [("user", question)], decoding.max_new_tokens)[0]

    def scheduler(self, *, rows: int | None = None, waiting: int | None = None) -> Scheduler:
        """Open a scheduler, so that many readers share this model; arguments as in `Scheduler`."""
        from sedem.answering.scheduler import Scheduler

        return Scheduler(self, self.engine, self.name, rows=rows, waiting=waiting)

    def scores(self, memory: BankReader, question: str) -> Tensor:
        """Return what the model selects by: a score of every block `[N]`, in float32."""
        # A ranking needs the score of every block, also in a large bank.
        plan = plan_of(self, Request(memory, question, ranking=True, hops=1))
        return select(self, self.engine, [plan])[0].scores.total

    def search(
        self,
        memory: BankReader,
        question: str,
        *,
        k: int = PASSAGES,
        per_document: int = PER_DOCUMENT,
        documents: Sequence[int | str] | None = None,
    ) -> list[Citation]:
        """Find the best passages for a question; nothing is generated.

        A passage is exact, `document[start:end]`, and made of whole sentences: about 500 characters
        around a block, more where blocks are neighbours.

        Args:
            k: the most passages.
            per_document: the most blocks that one document gives.
            documents: search only these documents, given by name or index; None means all.

        Raises:
            BankMismatchError, DataError, ConfigError, UnknownDocumentError: as `answer`.
        """
        from sedem.answering.passages import find_passages

        request = Request(memory, question, documents=documents)
        return find_passages(self, self.engine, request, k, per_document)[0]

    def warm(
        self,
        memory: BankReader,
        blocks: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Compute keys and values of independent blocks before the first question.

        They are kept in memory, up to the budget given to `from_pretrained`, and freed with the
        bank.

        Args:
            blocks: indices of blocks, the most important first; None means all.
            progress: called with the number of blocks done and of all.

        Returns:
            How many of the blocks are ready.

        Raises:
            BankMismatchError: another model made the bank.
            ConfigError: the model's blocks are not independent, its engine keeps nothing, or there
                is no such block.
        """
        return keeping_engine(self.engine).warm(memory, blocks, progress)

    def rehearse(
        self, memory: BankReader, *, k: Budget | None = None, decoding: Decoding = GREEDY
    ) -> None:
        """Prepare buffers and graphs for questions of usual length; arguments as in `answer`."""
        from sedem.answering.scheduler import rehearse

        rehearse(self, self.engine, self.name, memory, k, decoding.max_new_tokens)

    # Checkpoints

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        attention: str = "sdpa",
        engine: str = "auto",
        kept: KeptBudget | None = None,
    ) -> SeDeM:
        """Open a checkpoint.

        Args:
            name: a folder, the name of a shipped checkpoint such as "sedem-smol", or a hub id. A
                GGUF file is a backbone, so its model is untrained, as `sedem init` makes it.
            dtype: type of the backbones; None means bfloat16 on a GPU and float32 elsewhere.
            device: where to put the model; None means a GPU if there is one.
            engine: a name of `engine.static`. All but "eager" merge weights, which ends training,
                and on a CPU do not import transformers for a backbone of the plain Llama layout,
                which takes seconds.
            kept: limits on keys and values of independent blocks kept in memory between answers;
                None means 1 GiB of a GPU and 2 GiB of RAM.

        Raises:
            CheckpointError: it is missing or incomplete, or weights have another shape; no weight
                is ever left random.
            ConfigError: its settings or its backbone cannot be used.
        """
        device = chosen_device(device)
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention}
        # On a GPU, the reference engine may have to run, which needs transformers' layers.
        options["light"] = "eager" not in (engine, attention) and device.type == "cpu"
        if is_gguf(str(name)):
            from sedem.checkpoint.untrained import untrained

            source = portable_name(str(name))
            backbone = checkpoint.open_named(source, revision, None, **options)
            # Nothing taught it to answer from states, so it reads the blocks as text.
            model = untrained(cls, backbone, condition="text")
            model.name, model.source = Path(name).name, source
        else:
            folder = checkpoint.locate(str(name), revision)
            with checkpoint.opening(folder):
                config = SedemConfig.load(folder, extra=checkpoint.EXTRA_ENTRIES)
                encoder, decoder = checkpoint.open_backbones(config, folder, **options)
                # Absolute, since banks record it and may be used from another folder.
                source = str(Path(name).resolve()) if Path(name).is_dir() else str(name)
                model = cls(config, encoder, decoder, Path(name).resolve().name, source)
                checkpoint.read_weights(folder, model.parts())
                if config.lora_rank:
                    decoder.add_lora(config.lora_rank, config.lora_alpha)
                    decoder.load_lora(folder / checkpoint.ADAPTER)
        model.parts().to(device)
        model.requires_grad_(False).eval()
        model.engine = open_engine(engine, model, attention, kept)
        return model

    def save_pretrained(
        self, folder: str | Path, *, with_backbone: bool = False, int8: bool = False
    ) -> None:
        """Write a checkpoint.

        It opens from any working folder: a backbone in a folder is stored with its absolute path.
        To take the checkpoint to another machine, copy the backbone into it.

        Args:
            with_backbone: copy the backbone's folder or GGUF file into it. A backbone that came
                inside a checkpoint is always copied.
            int8: store trained matrices as int8 rows with one scale each: a quarter of the size.
                Rounding changes the weights, so the rounded model
                cannot use banks of this one.

        Raises:
            ConfigError: the backbone is not on this machine, or there are two, so it cannot be
                copied.
        """
        inside = self.config.encoder == BACKBONE and not self.config.cross_model
        copied = with_backbone or inside
        backbone = checkpoint.local_backbone(self.encoder.name) if copied else None
        if copied and (self.config.cross_model or backbone is None):
            raise ConfigError(
                f"backbone '{self.encoder.name}' cannot be copied into the checkpoint; that needs "
                "one backbone in a local folder or GGUF file"
            )
        checkpoint.write(
            Path(folder), self.config, self.parts(), self.decoder, backbone=backbone, int8=int8
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        with_backbone: bool = False,
        int8: bool = False,
    ) -> str:
        """Upload the checkpoint to the hub, with a model card unless the repository has one.

        Args:
            repo_id: the repository, as "owner/name"; it is created if it does not exist.
            private: whether a new repository is private.
            token: access token; None means that of the logged-in user.
            with_backbone: as in `save_pretrained`.
            int8: as in `save_pretrained`.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: a backbone is in a folder that only this machine has.
            CheckpointError: the hub refuses the upload.
        """
        from sedem.checkpoint.hub import upload  # imports the hub's HTTP client

        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            self.save_pretrained(folder, with_backbone=with_backbone, int8=int8)
            return upload(folder, repo_id, private=private, token=token, trained_in=self.source)

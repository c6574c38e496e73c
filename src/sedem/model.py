"""SeDeM: the parts joined. Read documents once into a bank, then answer from K of its blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from huggingface_hub import HfApi
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.search import score_questions
from sedem.config import SedemConfig
from sedem.engine.eager import Eager
from sedem.engine.interface import Engine
from sedem.engine.open import open_engine
from sedem.errors import ConfigError
from sedem.inference import checkpoint
from sedem.inference.answer import AnswerStream, respond
from sedem.inference.generation import Decoding
from sedem.inference.read import Progress, read
from sedem.inference.requests import Request, encode_questions
from sedem.method.modules import SedemModules
from sedem.method.selector import Budget
from sedem.types import Answer, Document

GREEDY = Decoding()


class SeDeM(SedemModules):
    """Selective decompression of hidden-state memories.

    Args:
        config: the shape.
        encoder: the backbone that reads.
        decoder: the backbone that answers; the same object in the same-backbone setting.
        name: what answers are signed with.
        source: where it was opened from, for banks to remember.

    Raises:
        ConfigError: a layer of the configuration is not in a backbone.
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
        self.name = name
        self.source = source
        self.engine: Engine = Eager(self)

    # Reading

    def read(
        self, documents: Sequence[Document], *, progress: Progress | None = None
    ) -> MemoryBank:
        """Read documents once; no question is needed.

        Args:
            documents: texts with names that differ.
            progress: called with segments done and segments in all, after every batch.

        Raises:
            DataError: there are none, two have one name, or one has no tokens.
        """
        return read(self, self.engine, documents, source=self.source, progress=progress)

    # Answering

    @overload
    def answer(  # type: ignore[overload-overlap]  # a str is no list of questions
        self,
        memory: MemoryBank,
        question: str,
        *,
        k: Budget | None = None,
        decoding: Decoding = GREEDY,
        blocks: Sequence[int] | None = None,
    ) -> Answer: ...

    @overload
    def answer(
        self,
        memory: MemoryBank,
        question: Sequence[str],
        *,
        k: Budget | None = None,
        decoding: Decoding = GREEDY,
        blocks: Sequence[int] | None = None,
    ) -> list[Answer]: ...

    def answer(
        self,
        memory: MemoryBank,
        question: str | Sequence[str],
        *,
        k: Budget | None = None,
        decoding: Decoding = GREEDY,
        blocks: Sequence[int] | None = None,
    ) -> Answer | list[Answer]:
        """Answer one question, or several over the same bank in batches.

        Args:
            memory: the bank.
            question: one question, or a list for a list of answers.
            k: how many blocks to use, "all" for the full bank; None means the model's own.
            decoding: limit, sampling and stop strings; greedy as it stands.
            blocks: use exactly these blocks instead of selecting.

        Raises:
            BankMismatchError: another model made the bank.
            DataError: a question is empty or too long.
            ConfigError: k is not a budget, or its states exceed the decoder's positions.
        """
        if isinstance(question, str):
            return self.answer_requests([Request(memory, question, k, blocks)], decoding)[0]
        requests = [Request(memory, one, k, blocks) for one in question]
        return [
            answer
            for start in range(0, len(requests), self.engine.batch_size)
            for answer in self.answer_requests(
                requests[start : start + self.engine.batch_size], decoding
            )
        ]

    def answer_requests(
        self, requests: Sequence[Request], decoding: Decoding = GREEDY
    ) -> list[Answer]:
        """Answer questions as one batch; banks, K and prompt lengths may differ."""
        answering = respond(self, self.engine, requests, decoding, self.name)
        while True:
            try:
                next(answering)
            except StopIteration as finished:
                return list(finished.value)

    def stream(
        self,
        memory: MemoryBank,
        question: str,
        *,
        k: Budget | None = None,
        decoding: Decoding = GREEDY,
    ) -> AnswerStream:
        """Answer one question piece by piece.

        Returns:
            An iterator of text; when it is exhausted its `answer` is what `answer()` returns.
        """
        requests = [Request(memory, question, k)]
        return AnswerStream(respond(self, self.engine, requests, decoding, self.name))

    def scores(self, memory: MemoryBank, question: str) -> Tensor:
        """The selector's score of every block `[N]` for one question, in fp32."""
        memory.check_made_by(self.fingerprint())
        states = encode_questions(self, self.engine, [question])
        return score_questions(self.selector, memory, *states)[0].cpu()

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
    ) -> SeDeM:
        """Open a checkpoint.

        Args:
            name: a folder or a hub id.
            revision: hub revision.
            dtype: type of the backbones; None means bfloat16 on a GPU and float32 elsewhere.
            device: None means a GPU if there is one.
            attention: "sdpa" or "eager".
            engine: "auto", or one of `engine.open_engine`. All but "eager" fuse and merge weights
                once, for a model that is not trained further.

        Raises:
            CheckpointError: it is missing, incomplete or of another shape; nothing is left random.
            ConfigError: its settings or its backbone cannot be used.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        folder = checkpoint.locate(str(name), revision)
        config = SedemConfig.load(folder, extra=checkpoint.EXTRA_ENTRIES)
        encoder, decoder = checkpoint.open_backbones(
            config, folder, dtype=dtype, device=device, attention=attention
        )
        # A bank remembers its model's folder; it may be asked from elsewhere.
        source = str(Path(name).resolve()) if Path(name).is_dir() else str(name)
        model = cls(config, encoder, decoder, Path(name).resolve().name, source)
        checkpoint.read_weights(folder, model.parts())
        if config.lora_rank:
            decoder.add_lora(config.lora_rank, config.lora_alpha)
            decoder.load_lora(folder / checkpoint.ADAPTER)
        model.parts().to(device)
        model.requires_grad_(False).eval()
        model.engine = open_engine(engine, model, attention)
        return model

    def save_pretrained(
        self, folder: str | Path, *, with_backbone: bool = False, int8: bool = False
    ) -> None:
        """Write a checkpoint.

        Args:
            folder: where to.
            with_backbone: copy the encoder's folder into it, for a small backbone that is to travel
                with its checkpoint; one that came inside a checkpoint always does.
            int8: a quarter of the size: trained matrices as int8 rows with a scale a row, adapters
                as bfloat16. Rounding changes the weights, so their banks are another model's.

        Raises:
            ConfigError: the backbone cannot travel, because it is no folder or there are two.
        """
        inside = self.config.encoder == checkpoint.BACKBONE
        backbone = Path(self.encoder.name) if with_backbone or inside else None
        if backbone is not None and (self.config.cross_model or not backbone.is_dir()):
            raise ConfigError(
                f"backbone '{self.encoder.name}' cannot travel with the checkpoint; that needs one "
                "backbone in a folder here"
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
        """Upload the checkpoint to the hub.

        Args:
            repo_id: where to, as "owner/name"; it is made if it is not there.
            private: who may see a repository that is made.
            token: of the hub; None means the one that is logged in.
            with_backbone: as in `save_pretrained`.
            int8: as in `save_pretrained`.

        Returns:
            The address of the commit.
        """
        api = HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            self.save_pretrained(folder, with_backbone=with_backbone, int8=int8)
            commit = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message="Upload SeDeM"
            )
        return str(commit.commit_url)

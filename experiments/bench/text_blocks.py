"""Keys and values of raw-text blocks, computed independently and kept: SeDeM without memory.

Block-Attention (2409.15355) and TurboRAG (2410.07590) keep them this way. Each block is run through
all layers of the frozen decoder, with the start token before it and positions from 1 on. Those of
the K selected blocks are placed before the question. This is `guidance.independent` with injection
at layer 0 and token embeddings as the states, so it runs on SeDeM's engine.

SeDeM's selector chooses the blocks, in the same time as for SeDeM, and the same text is read.

Letters: K blocks, J tokens of the longest block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.answering.decoding import Decoding, question_ids
from sedem.answering.requests import (
    Request,
    check_fits,
    choose,
    encode_questions,
    score_requests,
)
from sedem.backbone.decoder import Backbone
from sedem.bank.keys import prepare
from sedem.bank.memory_bank import MemoryBank
from sedem.baselines.full_context import generate_timed
from sedem.bench.keeping import every_block_bytes
from sedem.config import SedemConfig
from sedem.engine.device import Clock
from sedem.engine.interface import AnswerInputs
from sedem.engine.static import Static, open_engine
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import frozen_decoder, open_model
from sedem.evaluation.registry import decoding_of
from sedem.guidance.scores import Budget
from sedem.model import SeDeM
from sedem.modules import SedemModules
from sedem.types import Answer, Document


class TextSource:
    """Blocks of token embeddings, as engines see a bank.

    Args:
        ids: tokens of each block.
        embedding: embeddings of all tokens `[V, D]`.
    """

    def __init__(self, ids: Sequence[Tensor], embedding: Tensor) -> None:
        self.ids = ids
        self.embedding = embedding

    def __len__(self) -> int:
        return len(self.ids)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Embeddings of some blocks `[K, J, D]`, padded on the right."""
        ids_KJ = pad_sequence([self.ids[index] for index in indices], batch_first=True)
        return self.embedding[ids_KJ.to(self.embedding.device)]

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """1 for each token of some blocks, 0 for padding `[K, J]`."""
        ones = [torch.ones_like(self.ids[index]) for index in indices]
        return pad_sequence(ones, batch_first=True) if ones else torch.zeros(0, 1).long()


@dataclass(frozen=True)
class TextMemory:
    """A bank to select from, and the same blocks as text.

    Attributes:
        bank: SeDeM's bank.
        source: its blocks as text.
    """

    bank: MemoryBank
    source: TextSource


class TextBlocks:
    """Answers from kept keys and values of blocks of raw text.

    Args:
        model: reads the bank and selects its blocks.
        backbone: a separate frozen decoder, which answers.
        k: selection budget; None means the model's own.
        decoding: how answers are generated.
        engine: name of the engine.

    Raises:
        ConfigError: the engine cannot keep keys and values.
    """

    name = "text-blocks"

    def __init__(
        self, model: SeDeM, backbone: Backbone, k: Budget | None, decoding: Decoding, engine: str
    ) -> None:
        self.model = model
        self.backbone = backbone
        self.k = k
        self.decoding = decoding
        config = text_config(model.config)
        self.modules = SedemModules(config, backbone, backbone)
        self.modules.parts().to(backbone.device)
        self.modules.requires_grad_(False).eval()
        opened = open_engine(engine, self.modules)
        if not isinstance(opened, Static):
            raise ConfigError(f"engine '{opened.name}' keeps no keys and values of text")
        self.engine = opened

    @classmethod
    def open(cls, settings: MethodSettings) -> Self:
        """Open the selecting model and the frozen decoder of a checkpoint.

        Raises:
            ConfigError: a setting cannot be used.
        """
        model, decoder = open_model(settings), frozen_decoder(settings)
        return cls(model, decoder, settings.k, decoding_of(settings), settings.engine)

    def read(self, documents: Sequence[Document]) -> TextMemory:
        """Read documents into a bank, and tokenize its blocks; nothing is kept yet."""
        bank = self.model.read(documents)
        texts = [bank.block_text(index) for index in range(len(bank))]
        ids = [torch.tensor(self.backbone.token_ids(text)) for text in texts]
        return TextMemory(bank, TextSource(ids, self.engine.decoder.embedding))

    @torch.no_grad()
    def warm(self, memory: TextMemory) -> int:
        """Compute those of all blocks that fit; return how many blocks are ready."""
        kept = self.engine.kept
        room = sum(level.limit for level in kept.levels)
        for index, tokens in enumerate(kept.walk.sizes(memory.source, range(len(memory.source)))):
            room -= kept.entry_bytes(tokens)
            if room < 0:
                return index
            with self.engine.device_lock():
                kept.fetch(memory.source, [index])
        return len(memory.source)

    def anew(self, memory: TextMemory) -> TextMemory:
        """The same memory, with nothing kept."""
        prepare(memory.bank, self.model.selector)
        source = TextSource(memory.source.ids, memory.source.embedding)
        return replace(memory, source=source)

    def kept_bytes(self, memory: TextMemory) -> int:
        """Bytes of the keys and values of all blocks, in all layers."""
        return every_block_bytes(self.engine.kept, memory.source)

    @torch.no_grad()
    def answer(self, memory: TextMemory, question: str) -> Answer:
        """Answer one question.

        Raises:
            DataError: the question is empty or too long.
            ConfigError: the blocks, the prompt and an answer exceed the decoder's positions.
        """
        model, bank, source = self.model, memory.bank, memory.source
        clock = Clock(self.backbone.device)
        request = Request(bank, question, self.k, condition="memory")
        hidden_1QE, mask_1Q = encode_questions(model, model.engine, [question])
        clock.lap("encode_ms")
        (scores_N,) = score_requests(model, [request], hidden_1QE, mask_1Q)
        selection = choose(model, request, scores_N)
        clock.lap("score_ms")
        clock.timings["select_ms"] = clock.timings["encode_ms"] + clock.timings["score_ms"]
        blocks, limit = selection.memory, self.decoding.max_new_tokens
        prefix = torch.tensor(question_ids(self.backbone, question))
        sizes = self.engine.kept.walk.sizes(source, blocks)
        check_fits(self.modules, sizes, len(prefix), limit)
        inputs = AnswerInputs(source, blocks, selection.scores[blocks], prefix)
        clock.lap("gather_ms")
        with self.engine.open_rows(1) as rows:
            logits_1V = rows.join([0], [inputs], [limit])
            clock.lap("prefill_ms")
            (transcript,) = generate_timed(
                self.backbone, logits_1V, rows.step, self.decoding, clock
            )
        assert transcript.finish_reason is not None
        return Answer(
            text=transcript.text,
            citations=tuple(
                bank.citation(block, rank, float(selection.scores[block]))
                for rank, block in enumerate(selection.ranked, start=1)
            ),
            k=len(blocks),
            blocks=len(bank),
            timings=clock.timings,
            finish_reason=transcript.finish_reason,
            model=self.name,
            cut=transcript.cut(),
            conditioning=sum(sizes) + len(prefix),
            stored_bytes=bank.memory_bytes,
            context_tokens=bank.tokens,
        )


def text_config(config: SedemConfig) -> SedemConfig:
    """The configuration that injects token embeddings of independent blocks at the first layer.

    Args:
        config: configuration of the model whose blocks are read.
    """
    return SedemConfig(
        encoder=config.decoder or config.encoder,
        extract_layers=(1,),
        inject_layer=0,
        segment_length=config.segment_length,
        compression=1,
        decompressor="identity",
        selector_heads=1,
        block_context="independent",
        lora_rank=0,
    )

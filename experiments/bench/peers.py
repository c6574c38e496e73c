"""Hugging Face's forward over the whole context, as its users run it: the speed to beat.

The prompt equals that of `full-context`, token for token. Documents are tokenized when they are
read, so the time of a question is the model's alone.

- `hf`: plain forward with `DynamicCache`.
- `hf-compiled`: `StaticCache`, with a plain prefill and a compiled decoding step, as in `generate`.
- `hf-prefix`: caches the context's keys and values when it is read, as servers with a prefix cache
  do; a question runs only its own tokens. This is full context with a prebuilt memory.

`text-blocks` has a module of its own: keys and values of blocks of text, kept one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from experiments.bench.text_blocks import TextBlocks
from sedem.answering.decoding import Decoding, context_prompt, question_ids
from sedem.backbone.decoder import Backbone, check_compiler
from sedem.baselines.full_context import generate_timed
from sedem.baselines.memory import text_bytes
from sedem.bench.command import Opener
from sedem.bench.measure import Subject
from sedem.engine.device import Clock
from sedem.errors import ConfigError, DataError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.readers import frozen_decoder
from sedem.evaluation.registry import decoding_of
from sedem.types import Answer, Document, check_documents

QUESTION_ROOM = 64
"""Number of positions reserved for a question when a context is read."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a context, truncated to the model's positions.

    Attributes:
        ids: start token and context `[1, P]`.
        tokens: number of tokens of the whole context.
        stored_bytes: bytes stored to answer from.
        cache: keys and values of `ids`; None if they are not cached.
    """

    ids: Tensor
    tokens: int
    stored_bytes: int
    cache: DynamicCache | None = None


class HuggingFace:
    """A plain forward over context and question.

    Args:
        backbone: the model and its tokenizer.
        decoding: how answers are generated.
    """

    name = "hf"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        self.backbone = backbone
        self.decoding = decoding

    @classmethod
    def open(cls, settings: MethodSettings) -> Self:
        """Open the frozen decoder of a checkpoint."""
        return cls(frozen_decoder(settings), decoding_of(settings))

    def read(self, documents: Sequence[Document]) -> Tokens:
        """Tokenize the documents, and truncate the end that does not fit.

        Raises:
            ConfigError: the backbone has too few positions for a question and an answer.
        """
        check_documents(documents)
        backbone = self.backbone
        room = backbone.max_positions - 1 - QUESTION_ROOM - self.decoding.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"'{backbone.name}' has {backbone.max_positions:,} positions, too few for a "
                f"question and {self.decoding.max_new_tokens} answer tokens; ask for fewer"
            )
        ids = backbone.token_ids(context_prompt([document.text for document in documents]))
        kept = torch.tensor([[backbone.bos_token_id, *ids[:room]]], device=backbone.device)
        return Tokens(kept, len(ids), text_bytes(documents))

    @torch.no_grad()
    def answer(self, memory: Tokens, question: str) -> Answer:
        """Answer from the context.

        Raises:
            DataError: the question is longer than `QUESTION_ROOM` tokens.
        """
        backbone = self.backbone
        clock = Clock(backbone.device)
        prompt = question_ids(backbone, question)[1:]
        if len(prompt) > QUESTION_ROOM:
            raise DataError(f"the question has {len(prompt)} tokens, at most {QUESTION_ROOM} fit")
        prompt_1P = torch.tensor([prompt], device=backbone.device)
        clock.lap("select_ms")
        logits_1V, step = self.prefill(memory, prompt_1P)
        (transcript,) = generate_timed(backbone, logits_1V, step, self.decoding, clock)
        assert transcript.finish_reason is not None
        return Answer(
            text=transcript.text,
            citations=(),
            k=0,
            blocks=0,
            timings=clock.timings,
            finish_reason=transcript.finish_reason,
            model=self.name,
            cut=transcript.cut(),
            conditioning=memory.ids.shape[1] + len(prompt),
            stored_bytes=memory.stored_bytes,
            context_tokens=memory.tokens,
        )

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Logits after context and question `[1, V]`, and a function that runs one more token."""
        cache = DynamicCache(config=self.backbone.model.config)
        ids_1P = torch.cat([memory.ids, prompt_1P], dim=1)
        logits_1V = self.forward(ids_1P, cache)
        return logits_1V, lambda ids_B: self.forward(ids_B[:, None], cache)

    def forward(self, ids_1P: Tensor, cache: Any) -> Tensor:
        """Run more tokens and return the logits after them `[1, V]`."""
        output = self.backbone.model(
            input_ids=ids_1P, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]


class PrefixCached(HuggingFace):
    """Caches the context's keys and values once; a question runs only its own tokens."""

    name = "hf-prefix"

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> Tokens:
        """Run the context and cache its keys and values."""
        tokens = super().read(documents)
        cache = DynamicCache(config=self.backbone.model.config)
        self.forward(tokens.ids, cache)
        return replace(tokens, cache=cache, stored_bytes=_bytes(cache))

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Logits after the question `[1, V]`; drops the tokens of an earlier question first."""
        cache = memory.cache
        assert cache is not None
        if extra := cache.get_seq_length() - memory.ids.shape[1]:
            cache.crop(-extra)
        return self.forward(prompt_1P, cache), lambda ids_B: self.forward(ids_B[:, None], cache)


class Compiled(HuggingFace):
    """Uses a static cache with a compiled decoding step.

    Args:
        backbone: the model and its tokenizer.
        decoding: how answers are generated.

    Raises:
        ConfigError: torch.compile does not work on this machine.
    """

    name = "hf-compiled"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        super().__init__(backbone, decoding)
        mode = "reduce-overhead" if backbone.device.type == "cuda" else "default"
        check_compiler(backbone.device, self.name)
        self._step = torch.compile(self.forward, mode=mode, fullgraph=True)
        self._caches: dict[int, StaticCache] = {}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the static cache, which stays allocated between answers."""
        return sum(_bytes(cache) for cache in self._caches.values())

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Logits after context and question `[1, V]`; the step is compiled once for each length."""
        ids_1P = torch.cat([memory.ids, prompt_1P], dim=1)
        size = memory.ids.shape[1] + QUESTION_ROOM + self.decoding.max_new_tokens
        if size not in self._caches:
            # Compiled code refers to its cache by address, so only one cache exists at a time.
            self._caches = {size: StaticCache(self.backbone.model.config, max_cache_len=size)}
            torch.compiler.reset()
        cache = self._caches[size]
        cache.reset()

        def step(ids_B: Tensor) -> Tensor:
            # The next replay of the graph overwrites its output.
            return self._step(ids_B[:, None].contiguous(), cache).clone()

        return self.forward(ids_1P, cache), step


def _bytes(cache: Cache) -> int:
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _opener(kind: type[HuggingFace] | type[TextBlocks]) -> Opener:
    def open_peer(settings: MethodSettings) -> Subject:
        peer = kind.open(settings)
        return Subject(kind.name, peer, peer.backbone, isinstance(peer, HuggingFace))

    return open_peer


PEERS: dict[str, Opener] = {
    kind.name: _opener(kind) for kind in (HuggingFace, Compiled, PrefixCached, TextBlocks)
}
"""Methods of the studies in addition to those of `sedem eval --list`."""

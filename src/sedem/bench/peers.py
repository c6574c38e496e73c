"""The line to beat: Hugging Face's own forward over the whole context, as its users run it.

The prompt is that of `full-context`, token for token. Documents are tokenized when they are read,
so a question pays for the model alone.

- `hf`: plain forward with `DynamicCache`.
- `hf-compiled`: `StaticCache`; the prefill as it is and the decoding step compiled, as `generate`
  does.
- `hf-prefix`: the context's keys and values are computed when it is read and kept, as servers with
  a prefix cache do; a question runs alone behind them. This is full context with a prebuilt memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from sedem.backbone.decoder import Backbone
from sedem.engine.device import Clock
from sedem.errors import ConfigError, DataError
from sedem.inference.generation import Decoding, generate
from sedem.inference.prompts import context_prompt, question_ids
from sedem.types import Answer, Document, check_documents

QUESTION_ROOM = 64
"""Positions that a context leaves to a question that is not known yet."""


@dataclass(frozen=True)
class Tokens:
    """A context as tokens, as far as it fits the model.

    Attributes:
        ids: start token and context `[1, P]`.
        tokens: of the whole context.
        stored_bytes: what is kept to answer from.
        cache: keys and values of `ids`, where they are kept.
    """

    ids: Tensor
    tokens: int
    stored_bytes: int
    cache: DynamicCache | None = None


class HuggingFace:
    """A plain forward over context and question.

    Args:
        backbone: whose model and tokenizer.
        decoding: how answers are generated.
    """

    name = "hf"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        self.backbone = backbone
        self.decoding = decoding

    def read(self, documents: Sequence[Document]) -> Tokens:
        """Tokenize the documents; what would not fit is left out, and the answer says so."""
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
        return Tokens(kept, len(ids), sum(len(d.text.encode()) for d in documents))

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
        transcript = None
        for rows in generate(
            logits_1V, step, backbone.tokenizer, backbone.eos_token_id, self.decoding
        ):
            transcript = rows[0]
            if "ttft_ms" not in clock.timings:
                clock.mark("ttft_ms")
        clock.mark("total_ms")
        assert transcript is not None and transcript.finish_reason is not None
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
        """Logits after context and question `[1, V]`, and what runs one token more."""
        cache = DynamicCache(config=self.backbone.model.config)
        ids_1P = torch.cat([memory.ids, prompt_1P], dim=1)
        logits_1V = self.forward(ids_1P, cache)
        return logits_1V, lambda ids_B, live: self.forward(ids_B[:, None], cache)

    def forward(self, ids_1P: Tensor, cache: Any) -> Tensor:
        """Logits after some more tokens `[1, V]`."""
        found = self.backbone.model(
            input_ids=ids_1P, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return found.logits[:, -1]


class PrefixCached(HuggingFace):
    """Keys and values of the context, computed once; a question runs alone behind them."""

    name = "hf-prefix"

    @torch.no_grad()
    def read(self, documents: Sequence[Document]) -> Tokens:
        """Run the context and keep its keys and values."""
        tokens = super().read(documents)
        cache = DynamicCache(config=self.backbone.model.config)
        self.forward(tokens.ids, cache)
        return replace(tokens, cache=cache, stored_bytes=_bytes(cache))

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Logits after the question `[1, V]`; what an earlier question left is cut off."""
        cache = memory.cache
        assert cache is not None
        if left := cache.get_seq_length() - memory.ids.shape[1]:
            cache.crop(-left)
        return self.forward(prompt_1P, cache), lambda ids_B, live: self.forward(
            ids_B[:, None], cache
        )


class Compiled(HuggingFace):
    """A static cache with a compiled decoding step.

    Args:
        backbone: whose model and tokenizer.
        decoding: how answers are generated.

    Raises:
        ConfigError: nothing can be compiled on this machine.
    """

    name = "hf-compiled"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        super().__init__(backbone, decoding)
        mode = "reduce-overhead" if backbone.device.type == "cuda" else "default"
        _check_compiler(backbone.device)
        self._step = torch.compile(self.forward, mode=mode, fullgraph=True)
        self._caches: dict[int, StaticCache] = {}

    @property
    def cache_bytes(self) -> int:
        """Bytes of the static cache that stays from answer to answer."""
        return sum(_bytes(cache) for cache in self._caches.values())

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Logits after context and question `[1, V]`; the step is compiled once a length."""
        ids_1P = torch.cat([memory.ids, prompt_1P], dim=1)
        size = memory.ids.shape[1] + QUESTION_ROOM + self.decoding.max_new_tokens
        if size not in self._caches:
            # One length at a time: what is compiled knows its cache by address.
            self._caches = {size: StaticCache(self.backbone.model.config, max_cache_len=size)}
            torch.compiler.reset()
        cache = self._caches[size]
        cache.reset()

        def step(ids_B: Tensor, live: Sequence[int]) -> Tensor:
            # A graph's output is overwritten by its next replay.
            return self._step(ids_B[:, None].contiguous(), cache).clone()

        return self.forward(ids_1P, cache), step


def _bytes(cache: Cache) -> int:
    kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in kept)


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(torch.neg)(torch.ones(1, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"nothing can be compiled on this machine ({reason})") from None


PEERS: dict[str, tuple[type[HuggingFace], str]] = {
    "hf": (HuggingFace, "Hugging Face's forward over the whole context, dynamic cache"),
    "hf-compiled": (Compiled, "the same with a static cache and a compiled decoding step"),
    "hf-prefix": (PrefixCached, "the same with the context's keys and values kept"),
}
"""What stands beside the methods of `sedem eval --list`."""

"""Peers of the methods: prefix caches, and other settings of our methods.

Prefix caches have the prompt of `full-context`, token for token. They keep the context's keys and
values when it is read, as servers do; a question runs only its own tokens.

- `hf-prefix`: by Hugging Face's forward.
- `llama-cpp`: by llama.cpp from the backbone's own GGUF file, with its defaults.

Other settings of a method, on the random weights of a shape:

- `sedem`: blocks are independent of each other, as in `sedem-warm`.
- `sedem-warm`: keys and values of independent blocks are kept, with int8 weights in
  `sedem-warm-int8-weights`.
- `sedem-all-blocks`: every block is decompressed.
- `sedem-all-layers`: the encoder runs all layers, and the states of the deeper ones are dropped.
- `comprexit-128`: ComprExIT with pieces of 128 tokens.

Letters: B batch, T tokens, X extraction layers, E encoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.backbone.gguf import found_file
from sedem.backbone.prompts import context_prompt, question_ids
from sedem.bank.memory_bank import BankReader, MemoryBank
from sedem.config import BlockContext, is_gguf
from sedem.engine.device import Clock
from sedem.engine.fused import FusedEncoder
from sedem.engine.static import Static, keeping_engine
from sedem.errors import ConfigError, DataError
from sedem.method.compressor import encode
from sedem.method.selector import ALL
from sedem.model import SeDeM
from sedem.types import Answer, Document, check_documents
from sedem_lab.baselines.full_context import generate_timed
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.bench.subjects import (
    NOTHING,
    BenchPlan,
    Opener,
    Subject,
    open_sedem,
    with_random_baseline,
)
from sedem_lab.evaluation import readers
from sedem_lab.evaluation.readers import BoundSedem, decoding_of, frozen_decoder

QUESTION_ROOM = 64
"""Number of positions reserved for a question when a context is read."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a context, truncated to the model's positions.

    Attributes:
        ids: start token and context `[1, P]`.
        tokens: number of tokens of the whole context.
        stored_bytes: bytes of the keys and values of `ids`.
        cache: these keys and values; llama.cpp has its own.
    """

    ids: Tensor
    tokens: int
    stored_bytes: int = 0
    cache: DynamicCache | None = None


class PrefixCached:
    """Hugging Face's forward: the context's keys and values are cached when it is read."""

    name = "hf-prefix"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        self.backbone, self.decoding = backbone, decoding

    def read(self, documents: Sequence[Document]) -> Tokens:
        """Tokenize the documents, truncate the end that does not fit, and run the rest."""
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
        return self.run_context(Tokens(kept, len(ids)))

    @torch.no_grad()
    def answer(self, memory: Tokens, question: str) -> Answer:
        """Answer from the context."""
        backbone, clock = self.backbone, Clock(self.backbone.device)
        prompt = question_ids(backbone, question)[1:]
        if len(prompt) > QUESTION_ROOM:
            raise DataError(f"the question has {len(prompt)} tokens, at most {QUESTION_ROOM} fit")
        prompt_1P = torch.tensor([prompt], device=backbone.device)
        clock.lap("select_ms")
        logits_1V, step = self.prefill(memory, prompt_1P)
        (transcript,) = generate_timed(backbone, logits_1V, step, self.decoding, clock)
        ended = transcript.finish_reason
        assert ended is not None
        return Answer(
            *(transcript.text, (), 0, 0, clock.timings, ended, self.name),
            cut=transcript.cut(),
            conditioning=memory.ids.shape[1] + len(prompt),
            stored_bytes=memory.stored_bytes,
            context_tokens=memory.tokens,
        )

    @torch.no_grad()
    def run_context(self, tokens: Tokens) -> Tokens:
        """Cache the keys and values of a context."""
        cache = DynamicCache(config=self.backbone.model.config)
        self._forward(tokens.ids, cache)
        stored = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        return replace(tokens, cache=cache, stored_bytes=stored)

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Drop the tokens of an earlier question, and run the question.

        Returns:
            The logits after it `[1, V]`, and a function that runs one more token.
        """
        cache = memory.cache
        assert cache is not None
        if extra := cache.get_seq_length() - memory.ids.shape[1]:
            cache.crop(-extra)
        return self._forward(prompt_1P, cache), lambda ids_B: self._forward(ids_B[:, None], cache)

    def _forward(self, ids_1P: Tensor, cache: DynamicCache) -> Tensor:
        output = self.backbone.model(
            input_ids=ids_1P, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]


class LlamaCpp(PrefixCached):
    """Runs llama.cpp on the backbone's GGUF file; the backbone itself only tokenizes.

    The keys and values of one context are kept, in llama.cpp's own type.
    """

    name = "llama-cpp"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        super().__init__(backbone, decoding)
        if find_spec("llama_cpp") is None:
            raise ConfigError("llama.cpp is not installed; it needs pip install llama-cpp-python")
        if not is_gguf(backbone.name):
            raise ConfigError(f"llama.cpp reads GGUF files, and '{backbone.name}' is not one")
        import llama_cpp

        threads = torch.get_num_threads()
        options = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
        with found_file(backbone.name) as file:
            self._model = llama_cpp.Llama(str(file), n_ctx=backbone.max_positions, **options)
        self._library = llama_cpp
        self._kept: Tensor | None = None

    def run_context(self, tokens: Tokens) -> Tokens:
        """Keep the keys and values of a context."""
        self._model.reset()
        self._run(tokens.ids[0])
        self._kept = tokens.ids
        return replace(
            tokens, stored_bytes=self._library.llama_state_seq_get_size(self._model.ctx, 0)
        )

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> tuple[Tensor, Callable[..., Tensor]]:
        """Run the question; a context that was replaced is run again first."""
        if memory.ids is not self._kept:
            self.run_context(memory)
        # The next run drops the keys and values of tokens after these.
        self._model.n_tokens = memory.ids.shape[1]
        return self._run(prompt_1P[0]), self._run

    def _run(self, ids_P: Tensor) -> Tensor:
        """Run more tokens and return the logits after them `[1, V]`."""
        self._model.eval(ids_P.tolist())
        logits = self._library.llama_get_logits(self._model.ctx)
        logits_1V = np.ctypeslib.as_array(logits, (1, self._model.n_vocab()))
        return torch.from_numpy(logits_1V.copy())


class AllLayers(FusedEncoder):
    """An encoder without early exit: it runs its deeper layers too, and drops their states."""

    def states(self, ids_BT: Tensor) -> Tensor:
        """Return states `[X, B, T, E]` at the extraction layers, without the start token's."""
        return encode(self, ids_BT, (*self.extract_layers, len(self.layers)))[:-1]


def without_early_exit(model: SeDeM) -> SeDeM:
    """Make the encoder of a model run all layers of its backbone, for documents and questions.

    The deeper layers are the decoder's, with merged adapters, and as fast as frozen ones.
    """
    engine = model.engine
    if not isinstance(engine, Static) or model.config.cross_model:
        raise ConfigError(
            "running all layers of the encoder needs a fused engine and one backbone that reads "
            f"and answers; the engine is '{engine.name}'"
        )
    encoder, decoder = engine.encoder, engine.decoder
    layers = [*encoder.layers, *decoder.layers[len(encoder.layers) :]]
    engine.encoder = AllLayers(**{**vars(encoder), "layers": layers})
    return model


class WarmSedem(BoundSedem):
    """SeDeM that computes keys and values of all blocks ahead; arguments as in `BoundSedem`."""

    def read(self, documents: Sequence[Document]) -> MemoryBank:
        """Read documents into a bank, and keep the keys and values of its blocks."""
        bank = super().read(documents)
        self.model.warm(bank)
        return bank

    def kept_bytes(self, memory: BankReader) -> int:
        """Bytes of the keys and values of all blocks above injection."""
        kept = keeping_engine(self.model.engine).kept
        per_slot = self.model.decompressor.states_per_slot
        sizes = memory.restored_sizes(range(len(memory)), per_slot)
        return sum(kept.entry_bytes(size) for size in sizes)


def _sedem(
    name: str,
    *,
    warm: bool = False,
    block_context: BlockContext | None = None,
    changed: Callable[[SeDeM], SeDeM] = lambda model: model,
    **changes: Any,
) -> Opener:
    """SeDeM with other settings than those of the plan, as a row of its own."""

    def opened(plan: BenchPlan) -> Subject:
        plan = plan.with_changes(**changes)
        model = changed(open_sedem(plan, block_context, None if warm else NOTHING))
        if warm:
            keeping_engine(model.engine)  # a model that keeps nothing has no such row
        reader = (WarmSedem if warm else BoundSedem)(model, plan.k, decoding_of(plan))
        return Subject(name, reader, model.decoder)

    return opened


def _short_pieces(plan: BenchPlan) -> Subject:
    settings = with_random_baseline("comprexit", plan).with_changes(k=None)
    method = readers.open_method("comprexit", settings)
    reader = method.reader
    assert isinstance(reader, TrainedReader)
    reader.config = reader.config.with_changes(piece=128)
    return Subject("comprexit-128", reader, method.backbone)


def _prefix_cache(kind: type[PrefixCached]) -> Opener:
    def opened(plan: BenchPlan) -> Subject:
        peer = kind(frozen_decoder(plan), decoding_of(plan))
        return Subject(kind.name, peer, peer.backbone, reads_text=True)

    return opened


PEERS: dict[str, Opener] = {
    **{kind.name: _prefix_cache(kind) for kind in (PrefixCached, LlamaCpp)},
    # Joint blocks cannot be kept. Times do not depend on how a model was trained.
    "sedem": _sedem("sedem", block_context="independent"),
    "sedem-warm": _sedem("sedem-warm", warm=True, block_context="independent"),
    "sedem-warm-int8-weights": _sedem("sedem-warm-int8-weights", warm=True, engine="int8"),
    "sedem-all-blocks": _sedem("sedem-all-blocks", k=ALL),
    "sedem-all-layers": _sedem("sedem-all-layers", changed=without_early_exit),
    "comprexit-128": _short_pieces,
}
"""Methods of the studies in addition to those of `sedem eval --list`."""

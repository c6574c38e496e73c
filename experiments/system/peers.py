"""Peers of the methods: Hugging Face's forward, kept blocks of text, and other settings.

The first four have the prompt of `full-context`, token for token. Documents are tokenized when
they are read, so the time of a question is the model's alone.

- `hf`: plain forward with `DynamicCache`.
- `hf-compiled`: `StaticCache`, with a plain prefill and a compiled decoding step, as in `generate`.
- `hf-prefix`: caches the context's keys and values when it is read, as servers with a prefix cache
  do; a question runs only its own tokens. This is full context with a prebuilt memory.
- `llama-cpp`: the same, by llama.cpp from the backbone's own GGUF file, with its defaults.
- `text-blocks`: keys and values of raw-text blocks, computed independently and kept: SeDeM without
  memory. Block-Attention (2409.15355) and TurboRAG (2410.07590) keep them this way. Each block is
  run through all layers of the frozen decoder, with the start token before it and positions from 1
  on. Those of the K selected blocks are placed before the question. This is `guidance.independent`
  with injection at layer 0 and token embeddings as the states, so it runs on SeDeM's engine.
  SeDeM's selector chooses the blocks, in the same time as for SeDeM, and the same text is read.

Other settings of a method, on the random weights of a shape:

- `sedem`: blocks are independent of each other, as in `sedem-warm`.
- `sedem-int8`, `sedem-fp8`: slots are stored in fewer bytes.
- `sedem-warm`: keys and values of independent blocks are kept, with int8 weights in
  `sedem-warm-int8-weights`.
- `sedem-all-blocks`: every block is decompressed.
- `sedem-all-layers`: the encoder runs all layers, and the states of the deeper ones are dropped.
- `comprexit-128`: ComprExIT with pieces of 128 tokens.

Letters: B batch, T tokens, X extraction layers, E encoder width, K blocks, J tokens of the longest
block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, StaticCache

from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone, check_compiler
from sedem.backbone.gguf import found_file, is_gguf
from sedem.backbone.prompts import context_prompt, question_ids
from sedem.bank.keys import prepare
from sedem.bank.memory_bank import BankReader, MemoryBank, Snapshot
from sedem.config import BlockContext, SedemConfig
from sedem.engine.device import Clock
from sedem.engine.fused import FusedEncoder
from sedem.engine.interface import AnswerInputs
from sedem.engine.kept import Kept
from sedem.engine.static import Static, keeping_engine, open_engine
from sedem.errors import ConfigError, DataError
from sedem.guidance.scores import Budget
from sedem.method.encoder import encode
from sedem.method.selector import ALL
from sedem.model import SeDeM
from sedem.modules import SedemModules
from sedem.selecting.plan import Request, check_fits, plan_of
from sedem.selecting.select import select
from sedem.types import Answer, Document, check_documents
from sedem_lab.baselines.full_context import generate_timed, text_bytes
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
from sedem_lab.evaluation.config import MethodSettings
from sedem_lab.evaluation.readers import BoundSedem, decoding_of, frozen_decoder

QUESTION_ROOM = 64
"""Number of positions reserved for a question when a context is read."""

Prefilled = tuple[Tensor, Callable[..., Tensor]]
"""Logits after context and question `[1, V]`, and a function that runs one more token."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a context, truncated to the model's positions.

    Attributes:
        ids: start token and context `[1, P]`.
        tokens: number of tokens of the whole context.
        cache: keys and values of `ids`; None if they are not cached.
    """

    ids: Tensor
    tokens: int
    stored_bytes: int
    cache: DynamicCache | None = None


class HuggingFace:
    """A plain forward over context and question."""

    name = "hf"

    def __init__(self, backbone: Backbone, decoding: Decoding) -> None:
        self.backbone, self.decoding = backbone, decoding

    @classmethod
    def open(cls, settings: MethodSettings) -> Self:
        """Open the frozen decoder of a checkpoint."""
        return cls(frozen_decoder(settings), decoding_of(settings))

    def read(self, documents: Sequence[Document]) -> Tokens:
        """Tokenize the documents, and truncate the end that does not fit."""
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

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> Prefilled:
        """Run context and question."""
        cache = DynamicCache(config=self.backbone.model.config)
        logits_1V = self.forward(torch.cat([memory.ids, prompt_1P], dim=1), cache)
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

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> Prefilled:
        """Drop the tokens of an earlier question, and run the question."""
        cache = memory.cache
        assert cache is not None
        if extra := cache.get_seq_length() - memory.ids.shape[1]:
            cache.crop(-extra)
        return self.forward(prompt_1P, cache), lambda ids_B: self.forward(ids_B[:, None], cache)


class LlamaCpp(HuggingFace):
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

    def read(self, documents: Sequence[Document]) -> Tokens:
        """Run the context and keep its keys and values."""
        tokens = super().read(documents)
        self._run_context(tokens)
        kept = self._library.llama_state_seq_get_size(self._model.ctx, 0)
        return replace(tokens, stored_bytes=kept)

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> Prefilled:
        """Run the question; a context that was replaced is run again first."""
        if memory.ids is not self._kept:
            self._run_context(memory)
        # The next run drops the keys and values of tokens after these.
        self._model.n_tokens = memory.ids.shape[1]
        return self._run(prompt_1P[0]), self._run

    def _run_context(self, tokens: Tokens) -> None:
        self._model.reset()
        self._run(tokens.ids[0])
        self._kept = tokens.ids

    def _run(self, ids_P: Tensor) -> Tensor:
        """Run more tokens and return the logits after them `[1, V]`."""
        self._model.eval(ids_P.tolist())
        logits = self._library.llama_get_logits(self._model.ctx)
        logits_1V = np.ctypeslib.as_array(logits, (1, self._model.n_vocab()))
        return torch.from_numpy(logits_1V.copy())


class Compiled(HuggingFace):
    """Uses a static cache with a compiled decoding step."""

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

    def prefill(self, memory: Tokens, prompt_1P: Tensor) -> Prefilled:
        """Run context and question; the step is compiled once for each length."""
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

        return self.forward(torch.cat([memory.ids, prompt_1P], dim=1), cache), step


def _bytes(cache: Cache) -> int:
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


class TextSource:
    """Blocks of token embeddings, as engines see a bank.

    Args:
        embedding: embeddings of all tokens `[V, D]`.
        bank: the same blocks, to select from.
    """

    path = None
    """Nothing of it is stored."""

    def __init__(self, ids: Sequence[Tensor], embedding: Tensor, bank: MemoryBank) -> None:
        self.ids, self.embedding, self.bank = ids, embedding, bank

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


class TextBlocks:
    """Answers from kept keys and values of blocks of raw text.

    Args:
        model: reads the bank and selects its blocks.
        backbone: a separate frozen decoder, which answers.
    """

    name = "text-blocks"

    def __init__(
        self, model: SeDeM, backbone: Backbone, k: Budget | None, decoding: Decoding, engine: str
    ) -> None:
        self.model, self.backbone, self.k, self.decoding = model, backbone, k, decoding
        # Token embeddings of independent blocks enter at the first layer.
        layers: dict[str, Any] = {"extract_layers": (1,), "inject_layer": 0, "lora_rank": 0}
        config = SedemConfig(
            encoder=model.config.decoder or model.config.encoder,
            segment_length=model.config.segment_length,
            compression=1,
            decompressor="identity",
            selector_heads=1,
            block_context="independent",
            **layers,
        )
        self.modules = SedemModules(config, backbone, backbone)
        self.modules.parts().to(backbone.device)
        self.modules.requires_grad_(False).eval()
        opened = open_engine(engine, self.modules)
        if not isinstance(opened, Static):
            raise ConfigError(f"engine '{opened.name}' keeps no keys and values of text")
        self.engine = opened

    @classmethod
    def open(cls, settings: MethodSettings) -> Self:
        """Open the selecting model and the frozen decoder of a checkpoint."""
        model, decoder = readers.open_model(settings), frozen_decoder(settings)
        return cls(model, decoder, settings.k, decoding_of(settings), settings.engine)

    def read(self, documents: Sequence[Document]) -> TextSource:
        """Read documents into a bank, and tokenize its blocks; nothing is kept yet."""
        bank = self.model.read(documents)
        texts = [bank.block_text(index) for index in range(len(bank))]
        ids = [torch.tensor(self.backbone.token_ids(text)) for text in texts]
        return TextSource(ids, self.engine.decoder.embedding, bank)

    @torch.no_grad()
    def warm(self, memory: TextSource) -> int:
        """Compute those of all blocks that fit; return how many blocks are ready."""
        kept = self.engine.kept
        room = sum(level.limit for level in kept.levels)
        for index, tokens in enumerate(kept.walk.sizes(memory, range(len(memory)))):
            room -= kept.entry_bytes(tokens)
            if room < 0:
                return index
            with self.engine.device_lock():
                kept.fetch(memory, [index])
        return len(memory)

    def anew(self, memory: TextSource) -> TextSource:
        """The same memory, with nothing kept."""
        prepare(memory.bank, self.model.selector)
        return TextSource(memory.ids, memory.embedding, memory.bank)

    def kept_bytes(self, memory: TextSource) -> int:
        """Bytes of the keys and values of all blocks, in all layers."""
        return _every_block_bytes(self.engine.kept, memory)

    @torch.no_grad()
    def answer(self, memory: TextSource, question: str) -> Answer:
        """Answer one question."""
        model, bank, clock = self.model, memory.bank, Clock(self.backbone.device)
        plan = plan_of(model, Request(bank, question, self.k, condition="memory", hops=1))
        [selection] = select(model, model.engine, [plan], clock)
        clock.timings["select_ms"] = clock.timings["encode_ms"] + clock.timings["score_ms"]
        blocks, total = selection.memory, selection.scores.total
        limit = self.decoding.max_new_tokens
        prefix = torch.tensor(question_ids(self.backbone, question))
        sizes = self.engine.kept.walk.sizes(memory, blocks)
        check_fits(self.modules, sizes, len(prefix), limit)
        inputs = AnswerInputs(memory, blocks, total[blocks], prefix)
        clock.lap("gather_ms")
        with self.engine.open_rows(1) as rows:
            logits_1V = rows.join([0], [inputs], [limit])
            clock.lap("prefill_ms")
            given = self.backbone, logits_1V, rows.step, self.decoding, clock
            (transcript,) = generate_timed(*given)
        ended, ranked = transcript.finish_reason, enumerate(selection.ranked, start=1)
        assert ended is not None
        cited = tuple(bank.citation(block, rank, float(total[block])) for rank, block in ranked)
        return Answer(
            *(transcript.text, cited, len(blocks), len(bank), clock.timings, ended, self.name),
            cut=transcript.cut(),
            conditioning=sum(sizes) + len(prefix),
            stored_bytes=bank.memory_bytes,
            context_tokens=bank.tokens,
        )


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
    """SeDeM that keeps keys and values of independent blocks; arguments as in `BoundSedem`."""

    def warm(self, memory: BankReader) -> int:
        """Compute the keys and values of all blocks ahead; return how many blocks are ready."""
        return self.model.warm(memory)

    def anew(self, memory: BankReader) -> Snapshot:
        """The same bank as another snapshot, with its selector's keys but nothing kept."""
        # The files are shared. Kept keys and values belong to the snapshot.
        bank = memory.snapshot().part(range(len(memory)))
        prepare(bank, self.model.selector)
        return bank

    def kept_bytes(self, memory: BankReader) -> int:
        """Bytes of the keys and values of all blocks above injection."""
        return _every_block_bytes(keeping_engine(self.model.engine).kept, memory)


KEEPERS = TextBlocks | WarmSedem
"""Readers that keep keys and values of blocks."""


def _every_block_bytes(kept: Kept, source: Any) -> int:
    """Bytes of the keys and values of all blocks, whether they are computed or not."""
    return sum(kept.entry_bytes(n) for n in kept.walk.sizes(source, range(len(source))))


def sedem_opener(
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
            keeping_engine(model.engine)
        reader = (WarmSedem if warm else BoundSedem)(model, plan.k, decoding_of(plan), plan.memory)
        return Subject(name, reader, model.decoder)

    return opened


def _short_pieces(plan: BenchPlan) -> Subject:
    settings = with_random_baseline("comprexit", plan).with_changes(k=None)
    method = readers.open_method("comprexit", settings)
    reader = method.reader
    assert isinstance(reader, TrainedReader)
    reader.config = reader.config.with_changes(piece=128)
    return Subject("comprexit-128", reader, method.backbone)


def _opener(kind: type[HuggingFace] | type[TextBlocks]) -> Opener:
    def opened(plan: BenchPlan) -> Subject:
        peer = kind.open(plan)
        return Subject(kind.name, peer, peer.backbone, isinstance(peer, HuggingFace))

    return opened


_KINDS = (HuggingFace, Compiled, PrefixCached, LlamaCpp, TextBlocks)
# Joint blocks cannot be kept. Times do not depend on how a model was trained.
_APART: dict[str, Any] = {"block_context": "independent"}
PEERS: dict[str, Opener] = {
    **{kind.name: _opener(kind) for kind in _KINDS},
    **{f"sedem-{slots}": sedem_opener(f"sedem-{slots}", memory=slots) for slots in ("int8", "fp8")},
    "sedem": sedem_opener("sedem", **_APART),
    "sedem-warm": sedem_opener("sedem-warm", warm=True, **_APART),
    "sedem-warm-int8-weights": sedem_opener("sedem-warm-int8-weights", warm=True, weights="int8"),
    "sedem-all-blocks": sedem_opener("sedem-all-blocks", k=ALL),
    "sedem-all-layers": sedem_opener("sedem-all-layers", changed=without_early_exit),
    "comprexit-128": _short_pieces,
}
"""Methods of the studies in addition to those of `sedem eval --list`."""

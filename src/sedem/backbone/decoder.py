"""A Hugging Face decoder with its tokenizer; any range of its layers can be run on its own.

transformers and PEFT are imported only when used: importing them takes longer than opening a small
model.

Letters: B batch, P positions of one call, K keys seen so far, G key heads, H head width, D width,
V vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sedem.backbone.tokenizer import ChatTemplate, read_chat_template
from sedem.errors import ConfigError
from sedem.tensors import (
    check_weights,
    dequantize_int8,
    load_weights,
    quantize_int8,
    save_tensors,
    weights_digest,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Layouts that every engine and every baseline runs."""
EAGER_FAMILIES = (
    "olmo2",
    "phi3",
    "smollm3",
    "granite",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
)
"""Layouts that only the eager engine runs, layer by layer; the fast one cannot fuse them yet."""
ATTENTION = ("sdpa", "eager")
SINK_FAMILIES = ("gpt_oss",)
"""Layouts whose softmax has one extra logit, a trained sink, which SDPA does not support."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""The joined matrix that contains each one, in layouts that join several (Phi-3)."""


NO_END = "no end token, so no answer would end"
FORMS = 64
"""Most compiled forms of a layer."""


class KeyValues(Protocol):
    """Where a range of layers puts its keys and values, as in Hugging Face's caches."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values `[B, G, P, H]`; return those to attend to."""
        ...


@dataclass(frozen=True)
class KeyAxis:
    """The columns in the cache of a range of layers.

    Columns may be in any order: only positions decide what sees what.

    Attributes:
        positions: position of each column `[B, K]`.
        valid: False where a column is padding `[B, K]`.
        padded: whether any column is padding that causal order does not hide; it hides padding at
            the end. Kept on the host, so that no step waits for a device.
        span: number of positions from the first to the last one, also kept on the host. It exceeds
            the number of columns if the stream has positions that these layers do not see.
        block: number of the block that each column belongs to, -1 for text `[B, K]`. Positions of a
            block see only text and their own block. Below -1 are branches: alternative texts, each
            hidden from the others. None if every position sees all earlier ones.
        bias: added to the logits of text on each column `[B, K]`, 0 where there is no bias; None
            adds nothing.
    """

    positions: Tensor
    valid: Tensor
    padded: bool
    span: int
    block: Tensor | None = None
    bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether causal order alone decides what sees what."""
        return not self.padded and self.block is None and self.bias is None

    def extended(
        self, positions_BP: Tensor, valid_BP: Tensor, branch_BP: Tensor | None = None
    ) -> KeyAxis:
        """Return the axis with new columns of text at its end.

        Args:
            branch_BP: the branch of each column, below -1; None if there is only one text.
        """
        block, bias = self.block, self.bias
        if block is None and branch_BP is not None:
            block = torch.full_like(self.positions, -1)
        if block is not None:
            new_BP = torch.full_like(positions_BP, -1) if branch_BP is None else branch_BP
            block = torch.cat([block, new_BP], dim=1)
        if bias is not None:
            bias = torch.cat([bias, bias.new_zeros(positions_BP.shape)], dim=1)
        return replace(
            self,
            positions=torch.cat([self.positions, positions_BP], dim=1),
            valid=torch.cat([self.valid, valid_BP], dim=1),
            span=self.span + positions_BP.shape[1],
            block=block,
            bias=bias,
        )

    def row(self, index: int) -> KeyAxis:
        """Return the columns of one row."""
        own = slice(index, index + 1)
        return replace(
            self,
            positions=self.positions[own],
            valid=self.valid[own],
            block=None if self.block is None else self.block[own],
            bias=None if self.bias is None else self.bias[own],
        )

    def visible_to(
        self,
        positions_BP: Tensor,
        valid_BP: Tensor,
        window: int | None = None,
        block_BP: Tensor | None = None,
    ) -> Tensor:
        """Which columns each position may attend to `[B, P, K]`.

        A padding position sees every valid column: its output is never read, and a row without
        anything to attend to would be NaN.

        Args:
            valid_BP: False where such a position is padding.
            window: number of positions that a layer attends to; None for all earlier ones.
            block_BP: block of each of these positions, -1 for text; None if all are text.
        """
        # Compared, not subtracted: differences of a long context would take eight times as much.
        seen_BPK = positions_BP[:, :, None] >= self.positions[:, None, :]
        if window is not None:
            seen_BPK &= (positions_BP - window)[:, :, None] < self.positions[:, None, :]
        if self.block is not None and block_BP is not None:
            own_BPK = block_BP[:, :, None] == self.block[:, None, :]
            of_text_B1K, of_memory_B1K = (self.block == -1)[:, None], (self.block >= 0)[:, None]
            is_text_BP1 = (block_BP < 0)[:, :, None]
            seen_BPK &= own_BPK | of_text_B1K | (is_text_BP1 & of_memory_B1K)
        return self.valid[:, None, :] & (seen_BPK | ~valid_BP[:, :, None])

    def added_to(
        self,
        visible_BPK: Tensor,
        dtype: torch.dtype,
        hidden: float = -torch.inf,
        block_BP: Tensor | None = None,
    ) -> Tensor:
        """Return what attention adds to its logits `[B, P, K]`.

        Args:
            hidden: value where a column is not visible.
            block_BP: as for `visible_to`.
        """
        if self.bias is None:
            added_BPK = torch.zeros(visible_BPK.shape, dtype=dtype, device=visible_BPK.device)
        else:
            added_BPK = self.bias[:, None, :].to(dtype)
            if block_BP is not None:
                added_BPK = added_BPK * (block_BP < 0)[:, :, None]
            added_BPK = added_BPK.expand(visible_BPK.shape)
        return added_BPK.masked_fill(~visible_BPK, hidden)


class Backbone(nn.Module):
    """A decoder whose layers can be run one by one, and its tokenizer.

    Args:
        revision: hub revision; None for the newest one or for a folder.
        digest: identifies the weights, if the digest of the file that they are from is known; None
            computes one from their values.

    Raises:
        ConfigError: the layout, the attention implementation or the tokenizer cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str | None = None,
        digest: str | None = None,
    ) -> None:
        check_family(model.config.model_type, name)
        implementation = model.config._attn_implementation
        if implementation not in ATTENTION:
            raise ConfigError(
                f"backbone '{name}' was opened with attention '{implementation}'; "
                f"sedem needs {' or '.join(ATTENTION)}"
            )
        if not tokenizer.is_fast:
            raise ConfigError(
                f"backbone '{name}' has no fast tokenizer; citations need its character offsets"
            )
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        # Adapters of the layers after this many are merged; the original weights are gone.
        self.merged_from: int | None = None
        self._adapters_off = False
        self.checkpointing = False
        """Whether training keeps only the input of each layer, and runs the layer again for its
        gradient: less memory, a third more work, the same numbers."""
        self.compiled = False
        self._entered: tuple[Callable[[], AbstractContextManager[None]], ...] = ()
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        # The first token of any sequence becomes an attention sink, so every sequence starts with a
        # spare token. Families without a BOS (Qwen) use their end-of-text token.
        ends = [tokenizer.eos_token_id, model.config.eos_token_id]
        starts = [tokenizer.bos_token_id, model.config.bos_token_id, tokenizer.eos_token_id]
        for needed, ids in (("neither a start nor an end token", starts), (NO_END, ends)):
            if not any(isinstance(one, int) for one in ids):
                raise ConfigError(f"backbone '{name}' has {needed}; set one in its config.json")
        self.bos_token_id, self.eos_token_id = (
            next(one for one in ids if isinstance(one, int)) for ids in (starts, ends)
        )
        # Special tokens in a text are split, so it has no id of theirs.
        backend = tokenizer.backend_tokenizer
        known = backend.get_added_tokens_decoder().values()
        special = {one.content for one in known if one.special}
        texts = [number for token, number in backend.get_vocab().items() if token not in special]
        self.check_ids([self.bos_token_id, self.eos_token_id, *texts])
        self.depth = len(model.get_decoder().layers)
        # All that determines how the tokenizer splits text.
        rules = json.loads(backend.to_str())
        splits = ("normalizer", "pre_tokenizer", "model", "added_tokens")
        self.vocabulary = json.dumps({name: rules[name] for name in splits}, sort_keys=True)
        # Computed now, because adapters change the names of the weights. Rounded, so that a model
        # has the same digest in float32 and in bfloat16.
        self.digest = digest or weights_digest(model.state_dict(), self.vocabulary, torch.bfloat16)

    @property
    def width(self) -> int:
        """Hidden size."""
        return int(self.model.config.hidden_size)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        return int(self.model.config.max_position_embeddings)

    @cached_property
    def chat(self) -> ChatTemplate:
        """What the tokenizer's chat template puts around a user's words.

        Raises:
            ConfigError: there is no such template, or it cannot be used.
        """
        generation = getattr(self.model, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        more = ends if isinstance(ends, list) else [] if ends is None else [ends]
        found = read_chat_template(
            self.chat_tokenizer, self.name, self.bos_token_id, [self.eos_token_id, *more]
        )
        around = [*found.before, *found.after]
        self.check_ids(around)
        if len(around) >= self.max_positions:
            raise ConfigError(
                f"the chat template of backbone '{self.name}' writes {len(around):,} tokens around "
                f"a question, and the model has {self.max_positions:,} positions; turn "
                "chat_template off"
            )
        return found

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse tokens that have no embedding.

        Raises:
            ConfigError: an id is not below the number of embeddings.
        """
        rows = len(self.model.get_input_embeddings().weight)
        if not all(0 <= one < rows for one in (min(ids, default=0), max(ids, default=0))):
            raise ConfigError(
                f"the tokenizer of backbone '{self.name}' has the id {max(ids)}, but there are "
                f"{rows:,} embeddings; use the tokenizer that the model was trained with"
            )

    @cached_property
    def chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy for chat templates, whose special tokens it keeps whole.

        Whether they are split is a setting of a tokenizer, so threads could not share one.
        """
        return deepcopy(self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.model.get_input_embeddings().weight.dtype

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text without a start token; special tokens written in it stay plain text."""
        return list(self.tokenize([text])["input_ids"][0])

    def tokenize(self, texts: list[str], *, offsets: bool = False) -> dict[str, Any]:
        """Tokens of several texts, as in `token_ids`, with character offsets on request."""
        return dict(self._encode(texts, return_offsets_mapping=offsets))

    def encodings(self, texts: list[str]) -> list[Encoding]:
        """The same tokens in the tokenizer's own form, which finds the offsets of single tokens."""
        return list(self._encode(texts).encodings or [])

    def _encode(self, texts: list[str], **options: bool) -> BatchEncoding:
        return self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            split_special_tokens=True,
            verbose=False,
            **options,
        )

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Token embeddings `[B, P, D]`, the states before the first layer."""
        embedded_BPD = self.model.get_input_embeddings()(ids_BP)
        # Granite scales them outside the module, Gemma inside.
        scale = getattr(self.model.config, "embedding_multiplier", None)
        return embedded_BPD if scale is None else embedded_BPD * scale

    def run(
        self,
        hidden_BPD: Tensor,
        first: int,
        last: int,
        positions_BP: Tensor,
        valid_BP: Tensor | None = None,
        keys: KeyAxis | None = None,
        cache: KeyValues | None = None,
        block_BP: Tensor | None = None,
        only_BQ: Tensor | None = None,
    ) -> Tensor:
        """Run layers first + 1 to last on hidden states.

        Args:
            hidden_BPD: states after `first` layers `[B, P, D]`.
            first: number of layers that have run before this call.
            last: number of layers that have run after it. For last < depth, the result is Hugging
                Face's `hidden_states[last]`; its final entry is after the final norm, this result
                never is.
            valid_BP: False where a position is padding; required with `keys`.
            keys: the columns that attention sees, including those of this call. None means causal
                attention over this call only; padding must then be on the right.
            cache: keys and values of earlier calls; those of this call are added to it.
            block_BP: block of each position, -1 for text, where `keys` has blocks; None means that
                all are text.
            only_BQ: index of the positions whose states are needed; None means all.

        Returns:
            States after `last` layers `[B, P or Q, D]`.

        Raises:
            ConfigError: a layer must run without its adapters, but they are merged.
        """
        if self._adapters_off and self.merged_from is not None and last > self.merged_from:
            raise ConfigError(
                f"layer {last} of '{self.name}' is to run without its adapters, which are merged "
                f"from layer {self.merged_from + 1} on; open the model with engine 'eager'"
            )
        decoder = self.model.get_decoder()
        if keys is None:
            valid_BP = torch.ones_like(positions_BP, dtype=torch.bool)
            keys = KeyAxis(positions_BP, valid_BP, padded=False, span=positions_BP.shape[1])
        assert valid_BP is not None
        sdpa = self.model.config._attn_implementation == "sdpa"
        count, columns = positions_BP.shape[1], keys.positions.shape[1]
        # Layers share masks by their windows, and rotary embeddings by their kinds.
        masks: dict[int | None, Tensor | None] = {}
        ropes: dict[str | None, tuple[Tensor, Tensor]] = {}
        by_kind = hasattr(decoder.rotary_emb, "layer_types")
        for index in range(first, last):
            window = self.window(index)
            kind = self.model.config.layer_types[index] if by_kind else None
            if kind not in ropes:
                given = () if kind is None else (kind,)
                ropes[kind] = decoder.rotary_emb(hidden_BPD, positions_BP, *given)
            if window not in masks:
                masks[window] = None
                # None where no mask is needed, or where SDPA's own causal mask is the same.
                near = keys.plain and (window is None or keys.span <= window)
                if not (near and (count == 1 or (sdpa and count == columns))):
                    mask_BPK = keys.visible_to(positions_BP, valid_BP, window, block_BP)
                    if not sdpa or keys.bias is not None:
                        # Eager attention adds its mask: a boolean one would be silently wrong.
                        lowest = torch.finfo(hidden_BPD.dtype).min
                        mask_BPK = keys.added_to(mask_BPK, hidden_BPD.dtype, lowest, block_BP)
                    masks[window] = mask_BPK[:, None]
            layer = partial(
                decoder.layers[index],
                attention_mask=masks[window],
                position_ids=positions_BP,
                use_cache=cache is not None,
                position_embeddings=ropes[kind],
            )
            if torch.is_grad_enabled() and (self.checkpointing or self.compiled):
                hidden_BPD = self._trained(layer, index, hidden_BPD, cache)
            else:
                hidden_BPD = layer(hidden_BPD, past_key_values=cache)
        if only_BQ is not None:
            hidden_BPD = torch.take_along_dim(hidden_BPD, only_BQ[..., None], 1)
        return hidden_BPD

    def _trained(
        self,
        layer: Callable[..., Tensor],
        index: int,
        hidden_BPD: Tensor,
        cache: KeyValues | None,
    ) -> Tensor:
        """Run a layer that sees its own part of the cache alone.

        With checkpointing, only its input is kept, and it runs again in the backward pass.
        """
        # A second run must find what the first one found: not what the cache has by then, and the
        # same adapters and hooks. A compiled layer would be compiled anew for a cache that has
        # grown by another layer.
        past = None if cache is None else cast(Growing, cache).stored.get(index, ())

        def run(hidden_BPD: Tensor) -> tuple[Tensor, ...]:
            # Made here: what a layer adds must not outlive its run.
            own = None if past is None else _LayerCache(past)
            after_BPD = layer(hidden_BPD, past_key_values=own)
            return (after_BPD,) if own is None else (after_BPD, *own.all)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _all_of(entered)

        entered = self._entered
        if self.checkpointing:
            found = checkpoint(run, hidden_BPD, use_reentrant=False, context_fn=contexts)
        else:
            found = run(hidden_BPD)
        if cache is not None:
            cast(Growing, cache).stored[index] = found[1], found[2]
        return cast(Tensor, found[0])

    @contextmanager
    def within(self, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Run layers inside a context, which is entered again where they are run again."""
        before = self._entered
        self._entered = (*before, context)
        try:
            with context():
                yield
        finally:
            self._entered = before

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[..., V]` from states after the last layer: final norm and head."""
        head, config = self.model.get_output_embeddings(), self.model.config
        logits = head(self.model.get_decoder().norm(hidden))
        if (scale := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Let torch.compile fuse each layer at its first call; weight names do not change.

        Batch shapes vary, so they are compiled as dynamic. Calling it again does nothing.
        """
        self.compiled = True
        # All layers share one code, of which there is a form for each kind of mask, of cache and of
        # adapters; beyond the limit, torch would run the others uncompiled.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, FORMS)
        for layer in self.model.get_decoder().layers:
            if layer._compiled_call_impl is None:
                layer.compile(dynamic=True, backend=backend)

    def window(self, index: int) -> int | None:
        """Number of positions that a layer attends to; None for all earlier ones."""
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[index] != "sliding_attention":
            return None
        return window

    def truncate(self, depth: int) -> None:
        """Remove the layers after the first `depth`, and the output head if it is untied."""
        decoder = self.model.get_decoder()
        decoder.layers = decoder.layers[:depth]
        self.depth = depth
        if not self.model.config.tie_word_embeddings:
            self.model.set_output_embeddings(None)

    # Adapters

    @property
    def has_lora(self) -> bool:
        """Whether adapters are attached."""
        return bool(getattr(self.model, "peft_config", None))

    def add_lora(
        self,
        rank: int,
        alpha: int,
        targets: Sequence[str] = LORA_TARGETS,
        dropout: float = 0.0,
    ) -> None:
        """Attach adapters, W' = W + (alpha / r) A B, to matrices of every layer (equation 15).

        Appendix Trainable Parameters.

        Args:
            targets: names of the matrices; the query, key, value and output projections by default.
                The name of a part of a joined matrix means the joined matrix.
            dropout: share of the adapters' inputs that is dropped in training.

        Raises:
            ConfigError: a layer has no such matrix, such as with experts instead of an MLP.
        """
        from peft import LoraConfig

        layers = self.model.get_decoder().layers
        own = Counter(name.rpartition(".")[2] for name, _ in layers.named_modules())
        present = [name if own[name] else JOINED.get(name, name) for name in targets]
        for target, name in zip(targets, present, strict=True):
            if own[name] < len(layers):
                raise ConfigError(
                    f"adapters are to be on '{target}', but {len(layers) - own[name]} of "
                    f"{len(layers)} layers have no such matrix (experts hold theirs together); "
                    f"give some of {', '.join(LORA_TARGETS)}"
                )
        self.model.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=alpha,
                target_modules=list(dict.fromkeys(present)),
                lora_dropout=dropout,
                bias="none",
            )
        )
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()

    def lora_parameters(self) -> list[nn.Parameter]:
        """The adapters' factors A and B."""
        return [p for n, p in self.model.named_parameters() if "lora_" in n]

    def without_lora(self) -> AbstractContextManager[None]:
        """Run only the frozen weights inside the `with` block, as the encoder must."""
        return self.within(self._without_lora)

    @contextmanager
    def _without_lora(self) -> Iterator[None]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = (m for m in self.model.modules() if isinstance(m, BaseTunerLayer))
        layers = [layer for layer in adapted if not layer.disable_adapters]
        trainable = [p for p in self.lora_parameters() if p.requires_grad]
        for layer in layers:
            layer.enable_adapters(False)
        outermost, self._adapters_off = not self._adapters_off, True
        try:
            yield
        finally:
            self._adapters_off = not outermost
            for layer in layers:
                layer.enable_adapters(True)
            # PEFT marks every factor trainable when it enables adapters.
            for parameter in self.lora_parameters():
                parameter.requires_grad_(False)
            for parameter in trainable:
                parameter.requires_grad_(True)

    def save_lora(self, folder: Path, base: str, *, int8: bool = False) -> None:
        """Write the adapters in PEFT's layout, with `int8` as int8 rows with one scale each."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: one.float().contiguous() for name, one in self._factors().items()}
        save_tensors(quantize_int8(weights) if int8 else weights, folder / ADAPTER_WEIGHTS)
        config = self._lora_config()
        config.base_model_name_or_path = base
        # PEFT holds a set, whose order differs from run to run.
        config.target_modules = sorted(config.target_modules)
        config.save_pretrained(str(folder))

    def load_lora(self, folder: Path) -> None:
        """Read adapters into those that `add_lora` attached; they may be stored as int8 rows.

        Raises:
            CheckpointError: a file is missing or a factor is missing, extra or of another shape.
        """
        path = folder / ADAPTER_WEIGHTS
        weights = dequantize_int8(load_weights(path), torch.float32, str(path))
        factors = self._factors()
        check_weights(factors, weights, str(path))
        with torch.no_grad():
            for name, factor in factors.items():
                factor.copy_(weights[name])

    def _factors(self) -> dict[str, Tensor]:
        """The adapters' factors, by their names in PEFT's files."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model)

    def _lora_config(self) -> LoraConfig:
        """A copy of PEFT's settings of the adapters."""
        return copy(self.model.peft_config["default"])


class Growing(KeyValues, Protocol):
    """Keys and values that a training step can have: those of the layers that have run."""

    stored: dict[int, tuple[Tensor, Tensor]]


class _LayerCache:
    """One layer of a cache as it was before a call: every run of the layer extends it anew."""

    def __init__(self, past: tuple[Tensor, ...]) -> None:
        self.past = self.all = past

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """All keys and values, as the layer's attention asks for them."""
        self.all = keys, values
        if self.past:
            self.all = torch.cat([self.past[0], keys], 2), torch.cat([self.past[1], values], 2)
        return self.all


@contextmanager
def _all_of(contexts: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def check_family(model_type: str, name: str) -> None:
    """Refuse a layout whose layers sedem cannot run one by one.

    Raises:
        ConfigError: the layout is not supported; the message lists those that are.
    """
    known = FAMILIES + EAGER_FAMILIES
    if model_type not in known:
        raise ConfigError(
            f"backbone '{name}' has the layout '{model_type}'; sedem supports {', '.join(known)}"
        )


def check_compiler(device: torch.device | str, needed_by: str) -> None:
    """Compile a trivial function, so that a missing compiler is reported before any work is done.

    Args:
        device: what the code would be compiled for.
        needed_by: the setting or method that requires it, for the message.
    """
    try:
        torch.compile(torch.neg)(torch.ones(1, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{needed_by} needs torch.compile, but nothing can be compiled on this machine "
            f"({reason}); install a C++ compiler, or leave {needed_by} out"
        ) from None

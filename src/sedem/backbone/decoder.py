"""A Hugging Face decoder, opened so that any range of its layers can be run on its own.

Letters: B batch, P positions of one call, D width, V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from sedem.backbone.lora import LoraModel
from sedem.backbone.masks import KeyAxis
from sedem.backbone.safetensors import weights_digest
from sedem.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ATTENTION = ("sdpa", "eager")


class Backbone(LoraModel):
    """One decoder of the Llama kind with its tokenizer.

    Args:
        model: the causal language model.
        tokenizer: its fast tokenizer.
        name: folder or hub id it was opened from.
        revision: hub revision, None for the newest or for a folder.

    Raises:
        ConfigError: the layout, the attention implementation or the tokenizer cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        revision: str | None = None,
    ) -> None:
        _check_layout(model, tokenizer, name)
        super().__init__(model.eval().requires_grad_(False))
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.bos_token_id = _bos_token_id(model, tokenizer, name)
        self.eos_token_id = _eos_token_id(model, tokenizer, name)
        self.depth = len(model.get_decoder().layers)
        # Taken before adapters change the names of the weights.
        self.vocabulary = tokenizer_description(tokenizer)
        self.digest = weights_digest(model.state_dict(), self.vocabulary)

    @property
    def width(self) -> int:
        """Hidden size."""
        return int(self.model.config.hidden_size)

    @property
    def max_positions(self) -> int:
        """Longest sequence the model was made for, in tokens."""
        return int(self.model.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return self.model.get_input_embeddings().weight.dtype

    def token_ids(self, text: str) -> list[int]:
        """Tokens of a text, no start token in front; special tokens written in it stay text."""
        return list(self.tokenize([text])["input_ids"][0])

    def tokenize(self, texts: list[str], *, offsets: bool = False) -> dict[str, Any]:
        """Tokens of several texts, with character offsets when asked for."""
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=offsets,
            split_special_tokens=True,
            verbose=False,
        )
        return dict(encoded)

    def embed(self, ids_BP: Tensor) -> Tensor:
        """Token embeddings `[B, P, D]`: the states before the first layer."""
        return self.model.get_input_embeddings()(ids_BP)

    def run(
        self,
        hidden_BPD: Tensor,
        first: int,
        last: int,
        positions_BP: Tensor,
        valid_BP: Tensor | None = None,
        keys: KeyAxis | None = None,
        cache: DynamicCache | None = None,
    ) -> Tensor:
        """Run layers first+1..last on hidden states.

        Args:
            hidden_BPD: states after `first` layers `[B, P, D]`.
            first: layers already run.
            last: layers run afterwards; `hidden_states[last]` of Hugging Face for last < depth
                (its final entry is after the closing norm, this never is).
            positions_BP: rotary positions.
            valid_BP: False where a position is padding; needed with `keys`.
            keys: the columns that attention sees, this call's included; None for plain causal
                attention over this call alone (padding then stands on the right).
            cache: holds the keys and values of earlier calls and takes those of this one.

        Returns:
            States after `last` layers `[B, P, D]`.

        Raises:
            ConfigError: a layer is wanted without adapters that has them merged.
        """
        if self._adapters_off and self.merged_from is not None and last > self.merged_from:
            raise ConfigError(
                f"layer {last} of '{self.name}' is to run without its adapters, which are merged "
                f"from layer {self.merged_from + 1} on; open the model with engine 'eager'"
            )
        decoder = self.model.get_decoder()
        rope = decoder.rotary_emb(hidden_BPD, position_ids=positions_BP)
        if keys is None:
            valid_BP = torch.ones_like(positions_BP, dtype=torch.bool)
            keys = KeyAxis(positions_BP, valid_BP, padded=False, span=positions_BP.shape[1])
        assert valid_BP is not None
        masks: dict[int | None, Tensor | None] = {}
        for index in range(first, last):
            window = self.window(index)
            if window not in masks:
                masks[window] = self._mask(hidden_BPD, positions_BP, valid_BP, keys, window)
            hidden_BPD = decoder.layers[index](
                hidden_BPD,
                attention_mask=masks[window],
                position_ids=positions_BP,
                past_key_values=cache,
                use_cache=cache is not None,
                position_embeddings=rope,
            )
        return hidden_BPD

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[..., V]` from states after the last layer: closing norm and head."""
        head = self.model.get_output_embeddings()
        return head(self.model.get_decoder().norm(hidden))

    def window(self, index: int) -> int | None:
        """How far back a layer sees; None is all the way."""
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[index] != "sliding_attention":
            return None
        return window

    def _mask(
        self,
        hidden_BPD: Tensor,
        positions_BP: Tensor,
        valid_BP: Tensor,
        keys: KeyAxis,
        window: int | None,
    ) -> Tensor | None:
        """None where attention needs no mask, or where SDPA's own causal one is the same."""
        sdpa = self.model.config._attn_implementation == "sdpa"
        asked, held = positions_BP.shape[1], keys.positions.shape[1]
        if not keys.padded and (window is None or keys.span <= window):
            if asked == 1:
                return None
            if sdpa and asked == held:
                return None
        mask_B1PK = keys.visible_to(positions_BP, valid_BP, window)[:, None]
        if sdpa:
            return mask_B1PK
        # Eager attention adds its mask to the logits; a boolean one would silently be wrong.
        bias = torch.zeros(mask_B1PK.shape, dtype=hidden_BPD.dtype, device=hidden_BPD.device)
        return bias.masked_fill(~mask_B1PK, torch.finfo(hidden_BPD.dtype).min)

    def truncate(self, depth: int) -> None:
        """Let go of the layers after the first `depth`, and of a head of its own."""
        decoder = self.model.get_decoder()
        decoder.layers = decoder.layers[:depth]
        self.depth = depth
        if not self.model.config.tie_word_embeddings:
            self.model.set_output_embeddings(None)


def tokenizer_description(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that decides how a tokenizer cuts text, as JSON."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(
        {k: description[k] for k in ("normalizer", "pre_tokenizer", "model", "added_tokens")},
        sort_keys=True,
    )


def check_family(model_type: str, name: str) -> None:
    """Refuse a layout whose layers sedem cannot run one by one.

    Raises:
        ConfigError: with the layouts that it can.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"backbone '{name}' has the layout '{model_type}'; sedem runs decoders of the Llama "
            f"kind: {', '.join(FAMILIES)}"
        )


def _check_layout(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    check_family(model.config.model_type, name)
    implementation = model.config._attn_implementation
    if implementation not in ATTENTION:
        raise ConfigError(
            f"backbone '{name}' was opened with attention '{implementation}'; "
            f"sedem needs {' or '.join(ATTENTION)}"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"backbone '{name}' has no fast tokenizer; character offsets, and so citations, "
            "need one"
        )


def _bos_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    # The first token of any sequence becomes an attention sink, so there is always one to spare;
    # families without a BOS (Qwen) take their end-of-text token for it.
    for candidate in (tokenizer.bos_token_id, model.config.bos_token_id, tokenizer.eos_token_id):
        if isinstance(candidate, int):
            return candidate
    raise ConfigError(f"backbone '{name}' names neither a begin nor an end token")


def _eos_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    for candidate in (tokenizer.eos_token_id, model.config.eos_token_id):
        if isinstance(candidate, int):
            return candidate
    raise ConfigError(f"backbone '{name}' names no end token, so answers could not end")

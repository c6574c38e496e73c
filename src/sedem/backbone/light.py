"""A backbone for fused engines only: its modules hold the weights and cannot be run.

Importing transformers' models and PEFT takes longer than opening a small model and answering with
it. A fused engine needs neither, because it takes the matrices and runs them itself. Only the plain
Llama layout is opened this way; a config.json that differs in any entry is left to transformers.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import Encoding, Tokenizer
from torch import Tensor, nn
from typing_extensions import TypedDict

from sedem.backbone.decoder import LORA_TARGETS, Backbone
from sedem.backbone.safetensors import (
    INT8_FILE,
    WEIGHTS_FILE,
    Inner,
    Layers,
    Sizes,
    check_weights,
    read_whole,
)
from sedem.config import CONFIG_FILE
from sedem.errors import CheckpointError, ConfigError
from sedem.untrusted import DOCUMENT_BYTES, exists, read_json, read_text
from sedem.validation import WholeAbove0, WidthAbove0

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import GenerationConfig, PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that change a tokenizer; a folder with any of them is left to transformers."""


def open_light(
    folder: Path,
    dtype: torch.dtype,
    attention: str,
    name: str | None = None,
    digest: str | None = None,
) -> LightBackbone | None:
    """Open one file of weights of the plain Llama layout without transformers' models.

    Args:
        name: the name of the backbone; None means the folder's.
        digest: its digest, if that of the weights need not be computed.

    Returns:
        The backbone on the CPU; None if it has another layout or is damaged, so that opening it
        with transformers reports what is wrong.

    Raises:
        CheckpointError: its weights are damaged.
    """
    try:
        config = LightConfig.model_validate(_entries(folder / CONFIG_FILE))
    except (CheckpointError, OSError, ValidationError):
        return None
    file = next((f for f in (folder / INT8_FILE, folder / WEIGHTS_FILE) if f.is_file()), None)
    if file is None or (tokenizer := open_light_tokenizer(folder)) is None:
        return None
    config.open_as(folder, dtype, attention)
    model = LightModel(config, file)
    return LightBackbone(model, tokenizer, name or str(folder), digest=digest)


def _entries(path: Path) -> dict[str, Any]:
    entries = read_json(path, CheckpointError, DOCUMENT_BYTES)
    return entries if isinstance(entries, dict) else {}


class _Rope(TypedDict):
    rope_theta: float
    rope_type: Literal["default"]


class LightConfig(Sizes):
    """A config.json of the plain Llama layout, in which every entry is known."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model_type: Literal["llama"]
    hidden_act: Literal["silu"]
    rope_parameters: _Rope
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    num_hidden_layers: Layers
    hidden_size: WidthAbove0
    intermediate_size: Inner
    vocab_size: Inner
    num_attention_heads: WidthAbove0
    num_key_value_heads: WidthAbove0
    head_dim: WidthAbove0
    max_position_embeddings: WholeAbove0
    bos_token_id: int
    eos_token_id: int
    # Entries that do not affect how answers are computed.
    pad_token_id: int | None = None
    architectures: list[str] | None = None
    attention_dropout: float = 0.0
    dtype: str | None = None
    initializer_range: float = 0.02
    pretraining_tp: int = 1
    transformers_version: str | None = None
    unk_token_id: int | None = None
    use_cache: bool = True

    _folder: Path
    _opened_as: torch.dtype
    _attn_implementation: str

    def open_as(self, folder: Path, dtype: torch.dtype, attention: str) -> None:
        """Record where it is from and how its model is opened."""
        self._folder, self._opened_as, self._attn_implementation = folder, dtype, attention

    def to_dict(self) -> dict[str, Any]:
        """All entries, as transformers' configurations return them."""
        return self.model_dump()


class LightModel(nn.Module):
    """The weights of a decoder, by their names in Hugging Face's modules.

    Raises:
        CheckpointError: weights are missing, unknown or of another shape.
    """

    def __init__(self, config: LightConfig, file: Path) -> None:
        super().__init__()
        self.config = config
        layers, tied = config.num_hidden_layers, config.tie_word_embeddings
        weights = read_whole(file, config._opened_as, layers=layers, tied=tied)
        with torch.device("meta"):  # only shapes; the weights replace them
            self.model = _Trunk(config)
            self.lm_head: nn.Module = _Linear(config.hidden_size, config.vocab_size)
        check_weights(self.state_dict(), weights, str(file))
        self.load_state_dict(weights, assign=True)

    @property
    def generation_config(self) -> GenerationConfig | None:
        """What ends an answer in the chat template, as transformers reads it."""
        from transformers import GenerationConfig

        folder = self.config._folder
        if not exists(folder / GENERATION_FILE):
            return None
        return GenerationConfig.from_pretrained(str(folder))

    def get_decoder(self) -> nn.Module:
        """All but the output head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def set_output_embeddings(self, head: nn.Module) -> None:
        """Replace the output head."""
        self.lm_head = head


class LightBackbone(Backbone):
    """A backbone whose layers only a fused engine runs."""

    @cached_property
    def chat_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer as transformers reads it, which alone runs chat templates."""
        from transformers import AutoTokenizer

        folder = str(self.model.config._folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    @property
    def has_lora(self) -> bool:
        """Whether adapters are attached."""
        return bool(self._adapted())

    def add_lora(self, rank: int, alpha: int, *others: Any) -> None:
        """Attach adapters to the four projections of every layer; `load_lora` fills them."""
        self._rank, self._alpha = rank, alpha
        for layer in self.model.get_decoder().layers:
            for target in LORA_TARGETS:
                base = getattr(layer.self_attn, target)
                setattr(layer.self_attn, target, _Adapted(base, rank, alpha / rank))

    def _factors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{factor}.weight": getattr(module, factor)
            for name, module in self._adapted().items()
            for factor in ("lora_A", "lora_B")
        }

    def _lora_config(self) -> LoraConfig:
        from peft import LoraConfig

        targets = list(LORA_TARGETS)
        return LoraConfig(r=self._rank, lora_alpha=self._alpha, target_modules=targets)

    def _adapted(self) -> dict[str, _Adapted]:
        return {n: m for n, m in self.model.named_modules() if isinstance(m, _Adapted)}

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise ConfigError(
            f"backbone '{self.name}' was opened without transformers' layers, which reads and "
            "answers only with the engine that it was opened for; open the model with engine "
            "'eager'"
        )

    run = compile_layers = without_lora = _refuse


class _Trunk(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        self.embed_tokens = _Linear(config.hidden_size, config.vocab_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = _Rotary(config.rope_parameters["rope_theta"], config.head_dim)


class _Layer(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)


class _Attention(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = _Linear(width, queries, bias)
        self.k_proj = _Linear(width, keys, bias)
        self.v_proj = _Linear(width, keys, bias)
        self.o_proj = _Linear(queries, width, bias)


class _Mlp(nn.Module):
    def __init__(self, config: LightConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _Linear(width, inner, bias)
        self.up_proj = _Linear(width, inner, bias)
        self.down_proj = _Linear(inner, width, bias)
        self.act_fn = F.silu


class _Linear(nn.Module):
    """An uninitialized matrix: initializing on the meta device makes torch import its compiler."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(hidden.dtype)


class _Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self, theta: float, width: int) -> None:
        super().__init__()
        even = torch.arange(0, width, 2, dtype=torch.float, device="cpu")
        self.register_buffer("inv_freq", 1.0 / (theta ** (even / width)), persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


class _Adapted(nn.Module):
    """A projection and its adapter, with the parts of PEFT's module that `engine.fused` uses."""

    def __init__(self, base_layer: _Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(torch.empty(rank, base_layer.weight.shape[1]))
        self.lora_B = nn.Parameter(torch.empty(len(base_layer.weight), rank))
        self.scale = scale
        self.merged_adapters: list[str] = []

    def get_delta_weight(self, adapter: str) -> Tensor:
        return (self.lora_B @ self.lora_A) * self.scale


class LightEncodings(dict[str, Any]):
    """Tokens of several texts, as transformers returns them.

    Attributes:
        encodings: the same in the tokenizer's own form.
    """

    encodings: list[Encoding]


class LightTokenizer:
    """The part of transformers' tokenizers that sedem uses, with identical tokens."""

    is_fast = True

    def __init__(
        self, backend: Tokenizer, bos_token_id: int, eos_token_id: int, chat_template: str | None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend_tokenizer = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.chat_template = chat_template

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: Literal[False],
        return_attention_mask: Literal[False],
        split_special_tokens: Literal[True],
        verbose: bool,
        return_offsets_mapping: bool = False,
    ) -> LightEncodings:
        """Tokenize texts; special tokens written in them stay plain text."""
        encodings = self.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        result = LightEncodings(input_ids=[encoding.ids for encoding in encodings])
        if return_offsets_mapping:
            result["offset_mapping"] = [encoding.offsets for encoding in encodings]
        result.encodings = encodings
        return result

    def decode(
        self,
        ids: list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Literal[False] = False,
    ) -> str:
        """The text of tokens."""
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class _Settings(BaseModel):
    """A tokenizer_config.json that adds nothing to tokenizer.json; any other is refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    tokenizer_class: Literal["TokenizersBackend", "PreTrainedTokenizerFast"]
    bos_token: str
    eos_token: str
    pad_token: str | None = None
    extra_special_tokens: list[str] = []
    # Entries that do not affect how text is tokenized or decoded here.
    clean_up_tokenization_spaces: bool = False
    backend: str | None = None
    chat_template: None = None  # it has a file of its own
    model_max_length: int | None = None
    unk_token: str | None = None


def open_light_tokenizer(folder: Path) -> LightTokenizer | None:
    """Open the tokenizer of a folder.

    Returns:
        None if tokenizer.json does not describe it fully or is damaged, so that opening it with
        transformers reports what is wrong.
    """
    if any(exists(folder / name) for name in OTHER_FILES):
        return None
    try:
        entries = read_json(folder / SETTINGS_FILE, CheckpointError, DOCUMENT_BYTES)
        settings = _Settings.model_validate(entries)
        backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        template = folder / TEMPLATE_FILE
        chat = read_text(template, CheckpointError, DOCUMENT_BYTES) if exists(template) else None
    except Exception:  # tokenizers raises nothing narrower
        return None
    special = {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    named = [settings.bos_token, settings.eos_token, settings.pad_token or settings.eos_token]
    if not special.keys() >= {*named, *settings.extra_special_tokens}:
        return None
    ends = special[settings.bos_token], special[settings.eos_token]
    return LightTokenizer(backend, *ends, chat)

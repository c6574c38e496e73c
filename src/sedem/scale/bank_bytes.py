"""Estimate the size of a bank: blocks, and bytes of slots, files, keys, and kept keys and values.

Letters: J slots of a block, R heads of the selector, H width of a head, D width of a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sedem.bank.database import page_size, stored_bytes
from sedem.bank.rows import Meta, row_bytes
from sedem.bank.search import GROUPS
from sedem.evaluation.cost import head_widths, model_shapes
from sedem.quantization import BFLOAT16, DTYPES, vector_bytes

FLOAT32_BYTES = 4
PLACE_BYTES = 28
"""Bytes of a block's entry in the index of the file, in addition to one per slot."""


@dataclass(frozen=True)
class BlockShape:
    """The shape of a model's blocks.

    Attributes:
        tokens: tokens of a full block.
        slots: J.
        width: D.
        heads: R.
        head_width: H.
        layers: layers above injection, whose keys and values can be kept; 0 if blocks attend to
            each other, so that nothing can be kept.
        key_heads: heads of those keys.
        key_width: width of such a head.
    """

    tokens: int
    slots: int
    width: int
    heads: int
    head_width: int
    layers: int
    key_heads: int
    key_width: int

    @classmethod
    def of_model(cls, model: str) -> BlockShape:
        """Return the shape of a model's blocks.

        Args:
            model: a preset, a checkpoint folder, a backbone folder or a hub id.

        Raises:
            ConfigError: the model is unknown.
        """
        config, _, decoder = model_shapes(model)
        width = decoder.hidden_size
        key_heads = decoder.num_key_value_heads
        is_independent = config.block_context == "independent"
        return cls(
            tokens=config.slots_per_block * config.compression,
            slots=config.slots_per_block,
            width=width,
            heads=config.selector_heads,
            head_width=config.selector_dim or width // config.selector_heads,
            layers=decoder.num_hidden_layers - config.inject_layer if is_independent else 0,
            key_heads=key_heads,
            key_width=head_widths(decoder)[1] // key_heads,
        )

    def blocks(self, tokens: int, document_tokens: int | None = None) -> int:
        """Return the number of blocks for a number of tokens.

        Args:
            tokens: tokens of all documents.
            document_tokens: tokens of each document, whose last block may be short; None means that
                every block is full.
        """
        if document_tokens is None:
            return -(-tokens // self.tokens)
        documents, rest = divmod(tokens, document_tokens)
        return documents * -(-document_tokens // self.tokens) + -(-rest // self.tokens)

    def slot_bytes(self, dtype: str) -> int:
        """Bytes of the slots of a block, including their scales."""
        return self.slots * vector_bytes(self.width, dtype)

    def file_bytes(self, dtype: str) -> float:
        """Bytes of a block in the file of a bank, with unused space of its pages."""
        row = row_bytes(Meta("", {}, self.slots, self.width, dtype))
        return stored_bytes(row, page_size(row)) + self.slots + PLACE_BYTES

    def key_bytes(self, dtype: str) -> int:
        """Bytes of a block's selector keys, including their scales; in RAM also "float32"."""
        return self.slots * self.heads * _vector_bytes(self.head_width, dtype)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of the pooled keys of a block, which a coarse search reads."""
        groups = math.gcd(self.slots, GROUPS)
        return groups * self.heads * vector_bytes(self.head_width, BFLOAT16)

    def kept_bytes(self, dtype: str) -> int:
        """Bytes per token of kept keys and values; 0 if nothing can be kept.

        Args:
            dtype: "float32", or a type of `DTYPES`.
        """
        return 2 * self.layers * self.key_heads * _vector_bytes(self.key_width, dtype)


def _vector_bytes(width: int, dtype: str) -> int:
    return FLOAT32_BYTES * width if dtype == "float32" else vector_bytes(width, dtype)


def bank_bytes(shape: BlockShape, tokens: int, blocks: int) -> dict[str, Any]:
    """Return the bytes of a bank by content, and by type where there are several.

    Returns:
        `slots`, `file` (slots in the file of the bank) and `keys` by type, `pooled_keys`, and
        `kept` by type (empty if blocks cannot be kept).
    """
    kept = {dtype: tokens * shape.kept_bytes(dtype) for dtype in ("float32", *DTYPES)}
    return {
        "slots": {dtype: blocks * shape.slot_bytes(dtype) for dtype in DTYPES},
        "file": {dtype: round(blocks * shape.file_bytes(dtype)) for dtype in DTYPES},
        "keys": {dtype: blocks * shape.key_bytes(dtype) for dtype in DTYPES},
        "pooled_keys": blocks * shape.pooled_bytes,
        "kept": kept if shape.layers else {},
    }

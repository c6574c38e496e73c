"""A tokenizer without its backbone, for counting tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sedem.checkpoint.folder import BACKBONE, locate
from sedem.config import SMALL_MODEL
from sedem.errors import ConfigError, first_line
from sedem.untrusted import exists, is_folder

Span = tuple[int, int]


class Tokenizer:
    """Counts tokens as a backbone does: no start token, and special tokens are treated as text."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Number of tokens in a text."""
        return len(self._encode([text], offsets=False)["input_ids"][0])

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens in each text."""
        return [len(ids) for ids in self._encode(texts, offsets=False)["input_ids"]]

    def spans(self, texts: Sequence[str]) -> list[list[Span]]:
        """First and end character of each token of each text."""
        return list(self._encode(texts, offsets=True)["offset_mapping"])

    def _encode(self, texts: Sequence[str], *, offsets: bool) -> Any:
        return self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=offsets,
            split_special_tokens=True,
            verbose=False,
        )


def open_tokenizer(name: str | None = None) -> Tokenizer:
    """Open a tokenizer.

    Args:
        name: folder of a backbone or of a checkpoint with its backbone, or a hub id; None means
            sedem-nano's tokenizer.

    Raises:
        ConfigError: there is no such tokenizer, or it needs code of its own.
    """
    from sedem.backbone.loading import read_tokenizer

    shown = name or SMALL_MODEL
    folder = Path(name) if name else locate(SMALL_MODEL)
    if exists(folder / BACKBONE / "tokenizer_config.json"):
        folder = folder / BACKBONE
    try:
        opened = read_tokenizer(str(folder) if is_folder(folder) else shown)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer '{shown}' is neither a local folder nor available from the hub: "
            f"{first_line(error)}"
        ) from None
    if not opened.is_fast:
        raise ConfigError(
            f"tokenizer '{shown}' has no character offsets; a fast tokenizer is needed"
        )
    return Tokenizer(opened, shown)

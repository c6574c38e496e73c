"""A tokenizer that tokenizer.json describes fully, used without transformers.

Importing transformers takes longer than opening a small model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from tokenizers import Encoding, Tokenizer

from sedem.errors import CheckpointError
from sedem.untrusted import DOCUMENT_BYTES, exists, read_json

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
OTHER_FILES = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
"""Files that change a tokenizer; a folder with any of them is left to transformers."""


class LightEncodings(dict[str, Any]):
    """Tokens of several texts, as transformers returns them.

    Attributes:
        encodings: the same in the tokenizer's own form.
    """

    encodings: list[Encoding]


class LightTokenizer:
    """The part of transformers' tokenizers that sedem uses, with identical tokens.

    Args:
        backend: the tokenizer.
        bos_token_id: its start token.
        eos_token_id: its end token.
    """

    is_fast = True
    chat_template: str | None = None

    def __init__(self, backend: Tokenizer, bos_token_id: int, eos_token_id: int) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self.backend_tokenizer = backend
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

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
    # Entries that do not affect how text is tokenized or decoded here.
    clean_up_tokenization_spaces: bool = False
    backend: str | None = None
    model_max_length: int | None = None


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
    except Exception:  # tokenizers raises nothing narrower
        return None
    special = {
        token.content: number
        for number, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    named = {settings.bos_token, settings.eos_token, settings.pad_token or settings.eos_token}
    if not named <= special.keys():
        return None
    return LightTokenizer(backend, special[settings.bos_token], special[settings.eos_token])

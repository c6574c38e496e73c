"""Try a tokenizer from others in a process with limits, before it is opened in this one.

Its file may panic the library, and its rules may make a text grow without end or backtrack forever.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from sedem.durable_files import remembered, state_of
from sedem.errors import DataError
from sedem.untrusted import TOKENIZER_BYTES, TOKENIZER_SECONDS, LimitError, apart

FILE = "tokenizer.json"
GROWTH = 64
"""How many times as long the rules may make a text."""
SAMPLES = (
    "".join(map(chr, range(32, 0x250))) * 8 + "Görlitz, 3 May 2024;\n\n\t№ 7 «late» 漢字 🥧 ",
    *(character * 5000 for character in "a 0.\n"),
    "a" * 5000 + "!",
)


def check_tokenizer(folder: Path) -> None:
    """Refuse the tokenizer of a folder if it is not safe to use; one that has none passes.

    What was tried is noted in the cache, because it takes as long as opening it.

    Raises:
        ValueError: why it cannot be used, in a few words.
    """
    file = folder / FILE
    if not file.is_file():
        return

    def find() -> str:
        call, place = f"{__name__}:_try", str(file.resolve())
        apart(call, place, seconds=TOKENIZER_SECONDS, memory=TOKENIZER_BYTES)
        return "safe"

    try:
        remembered("tokenizers", state_of(file), find)
    except (LimitError, DataError) as error:
        raise ValueError(f"{FILE} {error}") from None


def _try(file: str) -> None:
    """Tokenize texts: in the process."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception:  # opening it reports what is wrong; a panic is no Exception
        return
    rules = json.loads(tokenizer.to_str())
    if max(_growth(rules["normalizer"]), _growth(rules["decoder"])) > GROWTH:
        raise DataError(f"makes a text more than {GROWTH} times as long")
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        shown = tokenizer.decode(ids)
        if max(len(ids), len(shown)) > GROWTH * len(text):
            raise DataError(f"makes a text more than {GROWTH} times as long")


def _growth(rule: dict[str, Any] | None) -> float:
    """How many times as long a normalizer or a decoder may make a text by replacing parts."""
    if rule is None:
        return 1
    if rule["type"] == "Sequence":
        return prod(map(_growth, rule.get("normalizers") or rule.get("decoders") or ()))
    if rule["type"] != "Replace":
        return 1
    pattern, content = rule["pattern"], len(rule["content"])
    # A regular expression may match nothing, between any two characters.
    return max(1, content / len(pattern["String"])) if pattern.get("String") else 1 + content

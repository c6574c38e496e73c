"""Decodes text whose encoding nobody has told: byte order mark, UTF-8, what HTML says, a guess."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from sedem.errors import DataError

MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and their encodings; the mark of UTF-32 begins with one of UTF-16."""
GUESSED = (
    "cp1252 utf_16_le utf_16_be cp1250 cp1251 koi8_r cp1253 cp1254 cp1255 cp1256 cp932 euc_jp "
    "gb18030 big5 cp949 mac_roman cp850"
).split()
"""Encodings that are guessed, the most usual first."""
JOINING = "\u2019\u00ad\u2010\u2011\u00b7"
"""Symbols that stand inside words."""
SAMPLE = 2**16
"""Bytes that a guess looks at."""
HEAD = 2**12
"""Bytes of HTML that may name its encoding."""

_META = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)


def decode(path: Path, content: bytes, encoding: str | None) -> tuple[str, tuple[str, ...]]:
    """Decode text, without its byte order mark.

    Args:
        encoding: its encoding, if it has no byte order mark; None finds it out.

    Returns:
        The text, and a note if its encoding was guessed.

    Raises:
        DataError: the content is binary or in another encoding, or the encoding is unknown.
    """
    marked = next((name for mark, name in MARKS if content.startswith(mark)), None)
    if given := marked or encoding:
        return _strictly(path, content, given, advise=marked is None), ()
    told = ["utf-8", _declared(path, content)]
    for name in chain(told, _guesses(content)):
        try:
            text = content.decode(name)
        except (LookupError, ValueError):
            continue
        if "\0" not in text:
            guess = f"'{path}' does not say its encoding; it was read as {name}"
            return text, () if name in told else (guess,)
    raise _binary(path)


def is_text(head: bytes) -> bool:
    """Whether the first bytes of a file look like text."""
    marked = any(head.startswith(mark) for mark, _ in MARKS)
    return bool(head) and (marked or (b"\0" not in head and (_utf8(head) or any(_guesses(head)))))


def _utf8(head: bytes) -> bool:
    """Whether bytes are UTF-8 up to a last character that may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _strictly(path: Path, content: bytes, encoding: str, advise: bool) -> str:
    advice = "name its encoding, such as --encoding latin-1, or leave it out" if advise else ""
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if advise and b"\0" in content:
            raise _binary(path) from None
        raise DataError(
            f"'{path}' is not {encoding.removesuffix('-sig')} text (byte {error.start}); "
            f"{advice or 'save it again as UTF-8'}"
        ) from None
    # A name with NUL raises ValueError, and some encodings raise errors of their own.
    except (LookupError, ValueError):
        raise DataError(
            f"'{path}' cannot be read as '{encoding}', or there is no such encoding; "
            "try utf-8 or latin-1"
        ) from None
    if "\0" in text:
        raise _binary(path)
    return text


def _declared(path: Path, content: bytes) -> str:
    """The encoding that a page of HTML names."""
    found = _META.search(content[:HEAD]) if path.suffix.lower() in (".html", ".htm") else None
    return found[1].decode() if found else "utf-8"


def _guesses(content: bytes) -> Iterator[str]:
    """Encodings of some bytes, the likeliest first; none for binary data."""
    from charset_normalizer import from_bytes

    sample = content[:SAMPLE]
    if b"\0" not in sample:
        # ASCII says nothing, and the first letter beyond it may come late.
        sample = b"\n".join(line for line in content.splitlines() if not line.isascii())
        sample = sample if len(sample) <= SAMPLE else sample[:SAMPLE].rpartition(b"\n")[0]
    found = from_bytes(sample, cp_isolation=GUESSED, enable_fallback=False)
    # A match names one of several encodings that give the same text.
    known = [
        (min(names, key=GUESSED.index), one)
        for one in found
        if (names := {one.encoding, *one.could_be_from_charset}.intersection(GUESSED))
    ]

    def rank(guess: tuple[str, Any]) -> tuple[float, ...]:
        name, one = guess
        usual = 0.02 if name == GUESSED[0] else 0
        return _odd(str(one)), round(one.chaos, 1), -one.coherence - usual, GUESSED.index(name)

    for name, _ in sorted(known, key=rank):
        yield name


def _odd(text: str) -> int:
    """Count what no language has: a symbol inside a word, or a capital letter after small ones."""
    pairs = [*pairwise(text)]
    return sum(
        b > "\x7f" and a.isalpha() and c.isalpha()
        and (b.isupper() and a.islower() if b.isalpha() else b not in JOINING)
        for (a, b), (_, c) in pairwise(pairs)
    )  # fmt: skip


def _binary(path: Path) -> DataError:
    return DataError(f"'{path}' holds binary data, not text; save it as plain text")

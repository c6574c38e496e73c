"""Errors of sedem. Each message says what was given, what is needed and what to do."""

import re
import unicodedata

QUOTED = 200
"""Maximum characters of anything that a message quotes."""
MESSAGE = 4000
"""Maximum characters of a message, which may list names."""


class SedemError(Exception):
    """Base class of all errors that sedem raises on purpose; the CLI prints them as one line."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(shortened(str(message))))


class ConfigError(SedemError):
    """A setting, a recipe or a backbone layout that cannot be used."""


class DataError(SedemError):
    """A document, a question or a data file that cannot be used."""


class CheckpointError(SedemError):
    """A checkpoint that is damaged, incomplete or of another kind."""


class BankError(SedemError):
    """A memory bank that is corrupt, locked or of an unknown format."""


class DamagedBankError(BankError):
    """A bank whose file is damaged."""


class UnknownDocumentError(BankError):
    """A requested document that a memory bank does not have."""


class BankMismatchError(BankError):
    """A memory bank that another model built; this model cannot use its memory."""


class UnavailableError(SedemError):
    """A scheduler that cannot answer a question: it was closed, or its engine failed."""


class ReaderError(UnavailableError):
    """A reader, somebody's own model, that cannot be reached, refuses, or fails."""


class QueueFullError(UnavailableError):
    """A scheduler whose queue is full; the same question can be asked again later.

    Args:
        message: what is full.
        retry_after: seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoomError(UnavailableError):
    """An answer whose caches do not fit beside those that others use; they fit later."""


class CancelledError(SedemError):
    """An answer that its reader cancelled; nothing more of it comes."""


JOINERS = "\u200c\u200d"
"""Zero-width joiners: invisible, but part of Persian, Indic scripts and emoji."""


def is_safe(character: str) -> bool:
    """Return whether a terminal shows a character and does nothing else with it.

    Control characters, changes of the writing direction, line separators, unassigned characters
    and halves of surrogate pairs are not safe.
    """
    return (
        character.isprintable() or unicodedata.category(character) == "Zs" or character in JOINERS
    )


def printable(text: str, keep: str = "") -> str:
    r"""Escape every character that could steer a terminal or a model, such as ESC as `\x1b`.

    Anybody may have written a document, and the names in a bank or a data file.

    Args:
        text: any text.
        keep: characters that stay as they are, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        c if is_safe(c) or c in keep else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


def first_line(error: BaseException) -> str:
    """The first line of another library's error; its class name if the message is empty."""
    return cut(next(iter(str(error).strip().splitlines()), type(error).__name__))


def shortened(message: str) -> str:
    """Cut whatever a message has between single quotes, and a message that is still too long."""
    text = re.sub(r"(?<!\w)'([^']*)'", lambda found: f"'{cut(found[1])}'", message)
    return cut(text, MESSAGE)


def cut(text: str, most: int = QUOTED) -> str:
    """Cut a text that a message quotes."""
    return text if len(text) <= most else f"{text[:most]}..."

"""Errors of sedem. Each message says what was given, what is needed and what to do."""

import re

QUOTED = 200
"""Maximum characters of anything that a message quotes."""
MESSAGE = 4000
"""Maximum characters of a message, which may list names."""


class SedemError(Exception):
    """Base class of all errors that sedem raises on purpose; the CLI prints them as one line."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shortened(str(message)))


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


class NoTextError(BankError):
    """A text that a memory bank does not hold and that cannot be read from its source."""


class UnknownDocumentError(BankError):
    """A requested document that a memory bank does not have."""


class BankMismatchError(BankError):
    """A memory bank that another model built; this model cannot use its memory."""


class UnavailableError(SedemError):
    """A scheduler that cannot answer a question: it was closed, or its engine failed."""


class QueueFullError(UnavailableError):
    """A scheduler whose queue is full; the same question can be asked again later.

    Args:
        message: what is full.
        retry_after: seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CancelledError(SedemError):
    """An answer that its reader cancelled; nothing more of it comes."""


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

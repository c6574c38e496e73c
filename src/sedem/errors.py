"""Errors of sedem. Each message says what was given, what is needed and what to do."""


class SedemError(Exception):
    """Base class of all errors that sedem raises on purpose; the CLI prints them as one line."""


class ConfigError(SedemError):
    """A setting, a recipe or a backbone layout that cannot be used."""


class DataError(SedemError):
    """A document, a question or a data file that cannot be used."""


class CheckpointError(SedemError):
    """A checkpoint that is damaged, incomplete or of another kind."""


class BankError(SedemError):
    """A memory bank that is corrupt, locked or of an unknown format."""


class BankMismatchError(BankError):
    """A memory bank that another model built; this model cannot use its memory."""


def first_line(error: BaseException) -> str:
    """The first line of an error of another library; the name of its class if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""What can go wrong, in words: every message says what was given, what is needed and what to do."""


class SedemError(Exception):
    """Root of all errors that sedem raises on purpose; the CLI prints them as one line."""


class ConfigError(SedemError):
    """A setting, a recipe or a backbone layout that cannot work."""


class DataError(SedemError):
    """A document, a question or a data file that cannot be used."""


class CheckpointError(SedemError):
    """A checkpoint that is truncated, foreign or incomplete."""


class BankError(SedemError):
    """A memory bank that is corrupt, locked or of an unknown format."""


class BankMismatchError(BankError):
    """A memory bank that another model built; its memory means nothing to this one."""

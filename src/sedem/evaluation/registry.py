"""The methods that can be evaluated by name.

A method's module is imported when the method is opened, because torch takes seconds to import.
"""

from __future__ import annotations

import importlib

from sedem.baselines.registry import TRAINED, reader_class
from sedem.config import DEFAULT_MODEL
from sedem.errors import ConfigError
from sedem.evaluation.config import MethodSettings
from sedem.evaluation.method import Method

METHODS: dict[str, tuple[str, str]] = {
    "sedem": (
        "open_sedem",
        "selects K blocks of hidden-state memory, decompresses and injects them",
    ),
    "full-context": ("open_full_context", "the frozen backbone reads every document as text"),
    "bm25": ("open_bm25", "the frozen backbone reads the K paragraphs that BM25 finds"),
    "longllmlingua": ("open_longllmlingua", "prunes the text to a quarter for each question"),
    **{name: ("", f"trained: {what}") for name, (_, what) in TRAINED.items()},
}
"""The name of each method, the function in `readers.py` that opens it, and its description.

Trained baselines are opened by their class in `sedem.baselines.registry`.
"""

UNTRAINED_WITH_BUDGET = ("sedem", "bm25")
"""The other methods that have a selection budget (k)."""


def has_selection_budget(method: str) -> bool:
    """Whether a method has a selection budget (k)."""
    if method in TRAINED:
        return reader_class(method).has_selection_budget
    return method in UNTRAINED_WITH_BUDGET


def default_checkpoint(method: str) -> str:
    """The checkpoint that sedem ships for a method."""
    return f"{method}-nano" if method in TRAINED else DEFAULT_MODEL


def open_method(name: str, settings: MethodSettings) -> Method:
    """Open a method by name.

    Raises:
        ConfigError: there is no method of that name, or a setting does not fit it.
    """
    if name not in METHODS:
        raise ConfigError(f"there is no method '{name}'; there are {', '.join(METHODS)}")
    if name in TRAINED:
        from sedem.evaluation.trained import open_trained

        return open_trained(name, settings)
    readers = importlib.import_module("sedem.evaluation.readers")
    method: Method = getattr(readers, METHODS[name][0])(settings)
    return method
